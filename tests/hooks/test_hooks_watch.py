"""watch_gradients: true numbers, one synchronization, every sink, and failed backwards."""

import io
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from backstash.errors import UsageError
from backstash.hooks import GradientReport, Stats, watch_gradients


def step(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    model(x).pow(2).sum().backward()


def test_numbers_are_those_of_the_gradients(chain: nn.Sequential) -> None:
    with watch_gradients(chain, every=1, to=None) as watch:
        step(chain, torch.randn(5, 4))
    report = watch.last
    assert list(report.rows) == [name for name, _ in chain.named_parameters()]
    for name, parameter in chain.named_parameters():
        row, g = report.rows[name], parameter.grad.double()
        assert row.count == g.numel() and row.finite
        for number, expected in (
            (row.norm, g.norm()),
            (row.mean, g.mean()),
            (row.std, g.std(correction=0)),
            (row.min, g.min()),
            (row.max, g.max()),
            (row.zeros, (g == 0).double().mean()),
        ):
            assert math.isclose(number, expected.item(), rel_tol=1e-5, abs_tol=1e-7)
    every = torch.cat([p.grad.flatten() for p in chain.parameters()]).double()
    assert math.isclose(report.total.norm, every.norm().item(), rel_tol=1e-6)
    assert math.isclose(report.total.std, every.std(correction=0).item(), rel_tol=1e-5)
    assert report.total.count == every.numel()
    assert report.reduction == "none" and report.per == "parameter"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    y = torch.ones(1000, dtype=dtype, requires_grad=True)
    with watch_gradients({"y": y}, to=None) as watch:
        (y * 300).sum().backward()
    assert watch.last.per == "tensor"
    assert math.isclose(watch.last.rows["y"].norm, 300 * math.sqrt(1000), rel_tol=1e-6)


def test_nan_and_inf_are_counted() -> None:
    y = torch.ones(5, requires_grad=True)
    with watch_gradients({"y": y}, to=None) as watch:
        (y * torch.tensor([1.0, float("nan"), float("inf"), 0.0, 3.0])).sum().backward()
    row = watch.last.rows["y"]
    assert (row.nan, row.inf, row.zeros, row.min, row.max) == (1, 1, 0.2, 0.0, 3.0)
    assert math.isnan(row.norm) and not row.finite
    assert math.isclose(row.mean, 4 / 3, rel_tol=1e-6) and "NaN 1  Inf 1" in str(row)
    assert json.dumps(watch.last.as_dict(), allow_nan=False)


def test_sparse_and_complex_gradients() -> None:
    table = nn.Embedding(10, 2, sparse=True)
    z = torch.ones(3, dtype=torch.complex64, requires_grad=True)
    with watch_gradients(table, to=None) as watch, watch_gradients({"z": z}, to=None) as other:
        table(torch.tensor([1, 1])).sum().backward()
        (z * (3 + 4j)).abs().sum().backward()
    assert math.isclose(watch.last.rows["weight"].norm, math.sqrt(8), rel_tol=1e-6)
    assert math.isclose(other.last.rows["z"].norm, z.grad.abs().norm().item(), rel_tol=1e-6)


def test_every(chain: nn.Sequential) -> None:
    steps = []
    with watch_gradients(chain, every=3, to=lambda report: steps.append(report.step)) as watch:
        for _ in range(7):
            step(chain, torch.randn(5, 4))
    assert steps == [0, 3, 6] and watch.backwards == 7


def test_per_module_with_reuse_and_inplace(residual: nn.Module) -> None:
    with watch_gradients(residual, per="module", to=None) as watch:
        step(residual, torch.randn(2, 4))
    assert list(watch.last.rows) == ["", "fc1", "fc2", "relu"]
    assert watch.last.rows["relu"].count == 16
    with watch_gradients(residual, per="module", names=[nn.Linear], to=None) as watch:
        step(residual, torch.randn(2, 4))
    assert list(watch.last.rows) == ["fc1", "fc2"]


class Transfers(TorchDispatchMode):
    """Counts what would wait for a device: values read, and copies to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name.startswith(("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.item")):
            self.waits.append(name)
        return func(*args, **(kwargs or {}))


def test_a_report_waits_once(chain: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []
    real = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: fetched.append(self.shape) or real(self))
    transfers = Transfers()
    with watch_gradients(chain, every=2, to=None), watch_gradients(chain, per="module", to=None):
        for _ in range(2):
            with transfers:
                step(chain, torch.randn(5, 4))
    assert transfers.waits == []
    assert fetched == [(4, 1, 9), (4, 1, 9)]


def test_a_backward_that_raises_does_not_end_the_watch(chain: nn.Sequential) -> None:
    seen: list[GradientReport] = []
    with watch_gradients(chain, every=1, to=seen.append):
        for fails in (False, True, True, False):
            chain.zero_grad()
            hidden = chain[1](chain[0](torch.randn(5, 4)))
            if fails:
                hidden.register_hook(lambda g: 1 / 0)
            out = chain[2](hidden).sum()
            if fails:
                with pytest.raises(ZeroDivisionError):
                    out.backward()
            else:
                out.backward()
    assert [report.step for report in seen] == [0, 3]
    assert all(len(report.rows) == 4 for report in seen)


def test_a_sink_that_raises_leaves_through_backward(chain: nn.Sequential) -> None:
    with watch_gradients(chain, every=1, to=lambda report: 1 / 0) as watch:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                step(chain, torch.randn(5, 4))
    assert watch.backwards == 2 and all(p.grad is not None for p in chain.parameters())


def test_accumulated_gradients(chain: nn.Sequential) -> None:
    with watch_gradients(chain, every=1, to=None) as watch:
        for _ in range(2):
            chain(torch.ones(1, 4)).sum().backward()
    assert math.isclose(watch.last.rows["2.bias"].norm, 2 * math.sqrt(2), rel_tol=1e-6)


def test_json_lines_to_a_path_and_a_file(chain: nn.Sequential, tmp_path: Path) -> None:
    path = tmp_path / "gradients.jsonl"
    file = io.StringIO()
    for _ in range(2):
        with watch_gradients(chain, to=path), watch_gradients(chain, to=file):
            step(chain, torch.randn(5, 4))
    assert not file.closed
    for text in (path.read_text(), file.getvalue()):
        lines = [json.loads(line) for line in text.splitlines()]
        assert len(lines) == 2 and set(lines[0]["rows"]) == {
            "0.weight",
            "0.bias",
            "2.weight",
            "2.bias",
        }
        assert set(lines[0]["total"]) >= {"norm", "min", "max", "zeros", "nan", "inf"}


def test_a_tensorboard_writer(chain: nn.Sequential) -> None:
    class Writer:
        def __init__(self) -> None:
            self.scalars: dict[str, tuple[float, int]] = {}

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.scalars[tag] = (value, step)

    writer = Writer()
    with watch_gradients(chain, every=1, to=writer) as watch:
        for _ in range(2):
            step(chain, torch.randn(5, 4))
    assert writer.scalars["grad/total/norm"] == (watch.last.total.norm, 1)
    assert writer.scalars["grad/0.weight/zeros"] == (watch.last.rows["0.weight"].zeros, 1)


def test_print(chain: nn.Sequential, capsys: pytest.CaptureFixture[str]) -> None:
    with watch_gradients(chain):
        step(chain, torch.randn(5, 4))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "gradients of backward 0, per parameter"
    assert [line.split()[0] for line in lines[1:]] == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
        "total",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "every=0"),
        ({"every": True}, "every=True"),
        ({"per": "layer"}, '"parameter", "module"'),
        ({"to": 3}, "to=3 cannot take reports"),
        ({"names": [nn.Linear]}, 'per="module"'),
    ],
)
def test_what_it_refuses(chain, state_of, arguments, message) -> None:
    before = state_of(chain)
    with pytest.raises(UsageError, match=message):
        watch_gradients(chain, **arguments)
    assert state_of(chain) == before


def test_a_name_that_fails_closes_the_file(chain: nn.Sequential, tmp_path: Path) -> None:
    with pytest.raises(LookupError):
        watch_gradients(chain, names="nothing", to=tmp_path / "x")


class Checkpointed(nn.Module):
    """Each of its layers computes its gradients in a backward of its own, inside the program's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.layers:
            x = checkpoint(each, x, use_reentrant=True)
        return x


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_reentrant_checkpoints_belong_to_one_backward() -> None:
    net, reports = Checkpointed(), list[GradientReport]()
    x = torch.randn(2, 4, requires_grad=True)
    with watch_gradients(net, every=1, to=reports.append) as watch:
        for count in (1, 2):
            net.zero_grad()
            loss = checkpoint(net, x, use_reentrant=True).sum() if count == 2 else net(x).sum()
            loss.backward()
            assert watch.backwards == len(reports) == count
            true = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])
            assert list(reports[-1].rows) == [name for name, _ in net.named_parameters()]
            assert reports[-1].total.norm == pytest.approx(float(true))


def test_after_a_failure_in_a_reentrant_checkpoint_the_next_backward_counts() -> None:
    net = Checkpointed()
    x = torch.randn(2, 4, requires_grad=True)

    def fails(gradient: torch.Tensor) -> None:
        raise ValueError

    with watch_gradients(net, every=1, to=None) as watch:
        handle = net.layers[1][0].weight.register_hook(fails)
        with pytest.raises(ValueError):
            net(x).sum().backward()
        handle.remove()
        net.zero_grad()
        net(x).sum().backward()
    assert watch.last is not None and len(watch.last.rows) == 6


def test_a_part_that_is_scripted_has_gradients() -> None:
    net = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Sequential(nn.Linear(4, 4))))
    with watch_gradients(net, every=1, to=None) as watch:
        step(net, torch.randn(5, 4))
    assert watch.last is not None and len(watch.last.rows) == 4


def stats_of(weight: nn.Parameter, gradient: torch.Tensor) -> Stats:
    model = nn.Module()
    model.weight = weight
    with watch_gradients(model, to=None) as watch:
        weight.backward(gradient)
    return watch.last.rows["weight"]


def test_a_complex_element_counts_once() -> None:
    nan, inf = float("nan"), float("inf")
    elements = [0, 3 - 4j, 1j, complex(nan, 1), complex(1, inf), complex(nan, inf)]
    row = stats_of(nn.Parameter(torch.zeros(6, dtype=torch.complex64)), torch.tensor(elements))
    assert (row.count, row.nan, row.inf, row.zeros) == (6, 2, 1, 1 / 6)
    assert (row.mean, row.min, row.max) == (0, -4, 3)
    assert row.std == pytest.approx((26 / 6) ** 0.5)
    row = stats_of(nn.Parameter(torch.zeros(2, dtype=torch.complex64)), torch.tensor([3, 4j]))
    assert row.norm == 5


@pytest.mark.parametrize("indices", [[1, 1, 3], [], list(range(10))])
def test_a_sparse_gradient_is_measured_like_a_dense_one(indices: list[int]) -> None:
    rows = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = nn.Embedding(10, 2, sparse=sparse)
        with watch_gradients(model, to=None) as watch:
            (model(torch.tensor(indices, dtype=torch.long)).tanh() + 1).prod(-1).sum().backward()
        rows.append(watch.last.rows["weight"].as_dict())
    assert rows[0] == pytest.approx(rows[1])


def test_large_finite_gradients_have_finite_statistics() -> None:
    row = stats_of(nn.Parameter(torch.zeros(4)), torch.tensor([1e25, -1e25, 1e25, -1e25]))
    assert row.finite and row.norm == pytest.approx(2e25)
    assert row.mean == 0 and row.std == pytest.approx(1e25)
