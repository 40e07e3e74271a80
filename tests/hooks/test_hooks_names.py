"""Which modules a name means; wrappers; near misses; all or none."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from backstash.hooks import NoMatchError, capture, clip_gradients, edit_gradients, trace
from backstash.hooks._names import named_tensors, select


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(1, 1)])
        self.module = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(self.layer2(self.layer1(x)))


def paths(model: nn.Module, names: object) -> list[str]:
    return [site.path for site in select(model, names)]


def test_selectors_in_the_models_order() -> None:
    net = Net()
    assert paths(net, ["layer2", "layer1.*"]) == ["layer1.0", "layer1.1", "layer2"]
    assert paths(net, [nn.ReLU, "layer1.0"]) == ["layer1.0", "layer1.1", "layer2.1"]
    assert paths(net, lambda path, module: path.endswith("0")) == [
        "layer1.0",
        "layer2.0",
        "heads.0",
    ]
    assert paths(net, "module") == ["module"]
    assert paths(net, "heads*") == ["heads.0"]


def test_wrappers_prefixes_are_stripped() -> None:
    net = Net()
    compiled = torch.compile(net, backend="eager")
    wrapped = nn.DataParallel(compiled)
    averaged = AveragedModel(net)
    for model in (compiled, wrapped, averaged):
        assert paths(model, "layer1.0") == ["layer1.0"]
        assert paths(model, "module") == ["module"]
    assert paths(wrapped, "module._orig_mod.layer1.0") == ["layer1.0"]
    assert paths(wrapped, compiled) == [""]
    assert select(wrapped, "layer1.0")[0].module is net.layer1[0]
    assert list(named_tensors(wrapped)) == [name for name, _ in net.named_parameters()]


def test_activation_checkpoint_wrapper() -> None:
    wrap = pytest.importorskip(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        reason="torch was built without torch.distributed",
    ).checkpoint_wrapper
    model = nn.Sequential(wrap(nn.Linear(2, 2)), nn.ReLU())
    with capture(model, "0") as got:
        model(torch.ones(1, 2))
    assert got["0"].output.shape == (1, 2)
    assert list(named_tensors(model)) == ["0.weight", "0.bias"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("layer3", r"'layer3' matches no module of Net; near: 'layer\d', 'layer\d'"),
        ("layr1.0", r"near: 'layer1\.0'"),
        ("layer1.0.conv", r"near: .*'layer1\.0'"),
        ([nn.Conv1d], r"class of no module of Net; near: 'Conv2d'"),
        (["layer1", "zzz*"], r"'zzz\*' matches no module of Net; there are: 'layer1', "),
        (
            "heads",
            r"matches only ModuleList, which is never called; name what is in it: 'heads\.\*'",
        ),
        (lambda path, module: False, "matches no module of Net; it has 10 modules"),
        (3, "allowed: a path, a glob"),
    ],
)
def test_a_name_that_matches_nothing(state_of, names: object, message: str) -> None:
    net = Net()
    before = state_of(net)
    for register in (capture, lambda model, names: trace(model, names=names)):
        with pytest.raises(NoMatchError, match=message):
            register(net, names)
    assert state_of(net) == before
    assert issubclass(NoMatchError, LookupError)


def test_parameters_that_match_nothing(state_of) -> None:
    net = Net()
    net.layer2.requires_grad_(False)
    before = state_of(net)
    with pytest.raises(
        NoMatchError, match=r"'layer1.0.wieght' matches no parameter; near: 'layer1"
    ):
        clip_gradients(net, value=1.0, names=["heads.0.bias", "layer1.0.wieght"])
    with pytest.raises(NoMatchError, match=r"require no gradient.*requires_grad_\(\)"):
        clip_gradients(net, value=1.0, names="layer2.*")
    with pytest.raises(NoMatchError, match=r"no parameter and no module; near: 'layer1\.0\.bias'"):
        edit_gradients({"heads.0.bias": print, "layer1.0.bais": print}, net)
    net.requires_grad_(False)
    with pytest.raises(NoMatchError, match="none of the 6 tensors requires a gradient"):
        clip_gradients(net, value=1.0)
    assert state_of(net) == before
