"""trace and summary."""

import io
import json
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from backstash.errors import UsageError
from backstash.hooks import ModuleCall, summary, trace


def test_each_call_as_it_returns(structured: nn.Module) -> None:
    calls: list[ModuleCall] = []
    with trace(structured, to=calls.append):
        structured(torch.ones(2, 3))
    assert [call.path for call in calls] == ["first", "tuple", "dict", "record", ""]
    assert [call.step for call in calls] == [0, 1, 2, 3, 4]
    by_path = {call.path: call for call in calls}
    assert by_path["tuple"].output == "[(2, 3), -, (2, 3)]"
    assert by_path["dict"].inputs == "x=(2, 3), scale=float"
    assert by_path["dict"].output == "{y: (2, 3), inner: {z: [(2, 3)]}}"
    assert by_path["record"].output.startswith("{logits: (2, 3), extra: [(2, 3), (2, 3)]")
    assert by_path["first"].kind == "Linear" and by_path["first"].depth == 1
    assert (by_path[""].dtype, by_path[""].device, by_path[""].depth) == ("float32", "cpu", 0)
    assert by_path[""].seconds >= sum(call.seconds for call in calls[:-1])


def test_time_is_the_modules() -> None:
    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.02)
            return x

    calls: list[ModuleCall] = []
    model = nn.Sequential(Slow(), nn.Identity())
    with trace(model, to=calls.append, sync=True):
        model(torch.ones(1))
    slow, quick, both = (call.seconds for call in calls)
    assert slow >= 0.02 > quick and both >= slow


def test_depth_names_and_file(chain: nn.Sequential) -> None:
    model = nn.Sequential(chain, nn.Identity())
    file = io.StringIO()
    with trace(model, to=file, depth=1), trace(model, to=file, names=nn.ReLU):
        model(torch.ones(5, 4))
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    assert [line["path"] for line in lines] == ["0.1", "0", "1", ""]
    with pytest.raises(UsageError, match="depth=-1"):
        trace(model, depth=-1)


def test_a_module_that_raises_is_reported_first(chain: nn.Sequential) -> None:
    calls: list[ModuleCall] = []
    with trace(chain, to=calls.append):
        with pytest.raises(RuntimeError, match="shapes"):
            chain(torch.ones(5, 3))
        try:
            raise KeyError
        except KeyError:
            chain(torch.ones(5, 4))
    assert [(call.path, call.output) for call in calls[:2]] == [("0", "raised"), ("", "raised")]
    assert calls[0].inputs == "(5, 3)"
    assert [call.output for call in calls[2:]] == ["(5, 8)", "(5, 8)", "(5, 2)", "(5, 2)"]


def test_a_recomputation_is_marked(chain: nn.Sequential) -> None:
    calls: list[ModuleCall] = []
    with trace(chain, to=calls.append, names=["", "0"]):
        checkpoint(chain, torch.ones(5, 4), use_reentrant=False).sum().backward()
    assert [(call.path, call.recomputed) for call in calls] == [
        ("0", False),
        ("", False),
        ("0", True),
        ("", True),
    ]
    assert calls[3].output == "ended early" and str(calls[3]).endswith("(recomputed)")


def saved_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """By another way: every storage of the graph that is no parameter's."""
    storages: dict[int, int] = {}
    keep = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        keep.append(tensor.detach())
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(x)
    for tensor in (*model.parameters(), *model.buffers()):
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    assert out is not None
    return sum(storages.values())


def test_summary_counts(chain: nn.Sequential) -> None:
    x = torch.ones(5, 4)
    table = summary(chain, x)
    assert table.parameters == sum(p.numel() for p in chain.parameters()) == table.trainable
    assert table.saved_bytes == saved_bytes(chain, x) == x.nbytes + 5 * 8 * 4
    assert [row.path for row in table.rows] == ["", "0", "1", "2"]
    assert [row.saved_bytes for row in table.rows] == [0, x.nbytes, 160, 0]
    assert [row.calls for row in table.rows] == [1, 1, 1, 1]
    assert "saved" in str(table).splitlines()[0]


def test_summary_of_structures_reuse_and_containers(
    structured: nn.Module, residual: nn.Module
) -> None:
    rows = {row.path: row for row in summary(structured, torch.ones(2, 3)).rows}
    assert rows["tuple"].output == "[(2, 3), -, (2, 3)]" and rows[""].saved_bytes == 0
    rows = {row.path: row for row in summary(residual, x=torch.ones(2, 4)).rows}
    assert rows["relu"].calls == 2 and "ReLU x2" in str(summary(residual, torch.ones(2, 4)))
    model = nn.ModuleDict({"weights": nn.ParameterList([nn.Parameter(torch.ones(3))])})
    model.forward = lambda x: x * model["weights"][0]
    table = summary(model, torch.ones(3))
    assert table.parameters == 3 and table.saved_bytes == 12
    tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    tied[1].weight = tied[0].weight
    assert summary(tied, torch.ones(1, 3)).parameters == 9


def test_summary_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    buffers = dict(model.named_buffers())
    state = torch.get_rng_state()
    with torch.no_grad():
        assert summary(model, torch.randn(8, 4, generator=torch.Generator())).saved_bytes > 0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(buffers[name] is value for name, value in model.named_buffers())
    assert torch.equal(state, torch.get_rng_state())
    assert model.training and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("training", [True, False])
def test_summary_between_forward_and_backward(training: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train(training)
    x = torch.randn(3, 4)
    loss = model(x).square().sum()
    before = [buffer.clone() for buffer in model.buffers()]
    summary(model, x)
    assert all(map(torch.equal, model.buffers(), before))
    loss.backward()
    assert model[0].weight.grad is not None


def test_summary_restores_what_a_module_writes_without_raising_a_version() -> None:
    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.zeros(3))
            self.register_buffer("shape", torch.zeros(3, device="meta"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.codes.data.add_(1)
            return x + self.codes

    model = Codebook()
    summary(model, torch.ones(3, requires_grad=True))
    assert torch.equal(model.codes, torch.zeros(3)) and model.codes._version == 0


def test_summary_of_a_model_that_catches_what_a_pre_hook_raises() -> None:
    class Catches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                x = self.inner(x)
            except ValueError:
                pass
            return (x * self.inner.weight[0]).tanh()

    def refuse(module: nn.Module, args: object) -> None:
        raise ValueError("refused")

    model = Catches()
    x = torch.ones(1, 3)
    model.inner.register_forward_pre_hook(refuse)
    rows = {row.path: row for row in summary(nn.Sequential(model), x).rows}
    assert (rows["0"].calls, rows["0.inner"].calls, rows["0.inner"].output) == (1, 0, "-")
    assert rows["0"].saved_bytes >= x.nbytes and rows["0.inner"].saved_bytes == 0


def test_summary_of_a_compiled_model_is_refused(chain: nn.Sequential) -> None:
    with pytest.raises(UsageError, match="compiled"):
        summary(torch.compile(chain, backend="eager"), torch.ones(5, 4))
