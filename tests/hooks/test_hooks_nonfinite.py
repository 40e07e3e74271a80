"""find_nonfinite: the first culprit, and no one else."""

import io
import json
from collections.abc import Callable

import pytest
import torch
from torch import nn

from backstash.hooks import Finding, NonFiniteError, find_nonfinite


class Log(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.log()


class Root(nn.Module):
    """sqrt: finite at 0, and its gradient is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 0).sqrt()


class Divides(nn.Module):
    """Makes an infinity between its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x) / 0)


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("nan")


class NanBackward(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return FailsBackward.apply(x)


def stack(middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), middle, nn.Linear(2, 2))


def run(model: nn.Module, x: torch.Tensor, loss: Callable = torch.Tensor.sum) -> list[Finding]:
    found: list[Finding] = []
    with find_nonfinite(model, to=found.append) as search:
        loss(model(x)).backward()
    assert search.found == (found[0] if found else None)
    return found


X = torch.tensor([[0.3, -0.8]])


def test_nothing_where_all_is_finite() -> None:
    assert run(stack(nn.Identity()), X) == []


def test_a_module_that_makes_it_in_forward() -> None:
    model = stack(Log())
    nn.init.constant_(model[0].weight, 0.0)
    nn.init.constant_(model[0].bias, 0.0)
    first = run(model, X)[0]
    assert (first.phase, first.kind, first.path, first.module) == ("forward", "output", "2", "Log")
    assert first.made_by == "this module" and first.stats.inf == 2
    assert first.before is not None and first.before.zeros == 1.0
    assert "the output of 2 (Log) is not finite" in str(first)


def test_a_parameter_that_is_not_finite_is_named() -> None:
    model = stack(nn.Linear(2, 2))
    with torch.no_grad():
        model[2].bias[0] = float("nan")
    first = run(model, X)[0]
    assert (first.path, first.parameters) == ("2", ("bias",))
    assert "not finite either: its bias" in str(first)


def test_operations_between_modules() -> None:
    first = run(Divides(), X)[0]
    assert (first.kind, first.path) == ("input", "b")
    assert first.made_by == "operations between modules, after a (output)"


def test_operations_after_the_modules_in_a_module() -> None:
    class Late(Divides):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x)) / 0

    first = run(Late(), X)[0]
    assert (first.kind, first.path) == ("output", "")
    assert first.made_by == "its own operations, outside the modules in it"


def test_it_came_with_the_input() -> None:
    first = run(stack(nn.Identity()), X * float("inf"))[0]
    assert (first.kind, first.path) == ("input", "")
    assert first.made_by == "the caller: it came with the model's input" and first.before is None


@pytest.mark.parametrize("middle", [Root(), NanBackward()])
def test_a_module_whose_backward_makes_it(middle: nn.Module) -> None:
    (first,) = run(stack(middle), X)
    assert (first.phase, first.kind, first.path) == ("backward", "input gradient", "2")
    assert first.made_by == "this module's backward" and first.before.finite


def test_the_loss_makes_it() -> None:
    (first,) = run(stack(nn.Identity()), X, lambda y: (y * 0).sqrt().sum())
    assert (first.phase, first.kind, first.path) == ("backward", "output gradient", "3")
    assert first.made_by == "the loss, or what comes after the model"


def test_it_raises_without_a_sink() -> None:
    model = stack(Log())
    nn.init.constant_(model[0].weight, 0.0)
    nn.init.constant_(model[0].bias, 0.0)
    with pytest.raises(NonFiniteError, match="the output of 2"), find_nonfinite(model):
        model(X)
        pytest.fail("the model's call raises")
    with pytest.raises(NonFiniteError, match="backward 0: the input gradient of 2"):
        with find_nonfinite(model := stack(NanBackward())):
            model(X).sum().backward()
            pytest.fail("backward raises")
    assert model[0].weight.grad is not None


def test_a_submodule_called_by_itself_is_judged_at_the_end() -> None:
    model = stack(Log())
    with pytest.raises(NonFiniteError, match="the output of 2"), find_nonfinite(model):
        model[2](-torch.ones(1, 2))


def test_another_exception_is_not_hidden() -> None:
    model = stack(Log())
    with pytest.raises(ZeroDivisionError), find_nonfinite(model) as search:
        model[2](-torch.ones(1, 2))
        raise ZeroDivisionError
    assert search.found is not None and search.found.path == "2"


def test_a_failed_forward_does_not_taint_the_next() -> None:
    model = stack(Log())
    found: list[Finding] = []
    with find_nonfinite(model, to=found.append):
        with pytest.raises(RuntimeError):
            model(torch.full((1, 3), float("nan")))
        model[2] = nn.Identity()
        model(X)
    assert found == []


def test_infinities_may_be_meant() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return (x + mask).softmax(-1)

    model = Masked()
    mask = torch.tensor([[0.0, float("-inf")]])
    with pytest.raises(NonFiniteError), find_nonfinite(model):
        model(X, mask=mask)
    with find_nonfinite(model, inf=False) as search:
        model(X, mask=mask)
    assert search.found is None


def test_integer_inputs_and_structures(structured: nn.Module) -> None:
    with find_nonfinite(structured) as search:
        structured(torch.ones(2, 3)).sum().backward()
    assert search.found is None
    structured.dict.forward = lambda *, x, scale: {"y": x, "inner": {"z": [x / 0]}}
    with find_nonfinite(structured, to=[].append) as search:
        structured(torch.ones(2, 3))
    assert search.found is not None and search.found.path == "dict"
    table = nn.Embedding(4, 2)
    with find_nonfinite(table) as search:
        table(torch.tensor([1])).sum().backward()
    assert search.found is None


def test_json_lines() -> None:
    file = io.StringIO()
    with find_nonfinite(model := stack(NanBackward()), to=file):
        for _ in range(2):
            model(X).sum().backward()
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    assert [(line["step"], line["path"]) for line in lines] == [(0, "2"), (1, "2")]
