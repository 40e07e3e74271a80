"""capture: values, structures, calls, edits."""

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from backstash.errors import InplaceError, UsageError
from backstash.hooks import (
    GradientHooks,
    HookWarning,
    NoMatchError,
    NotCapturedError,
    capture,
    edit_gradients,
    find_nonfinite,
    summary,
)  # fmt: skip


def edited_inputs(model: nn.Module) -> GradientHooks:
    return edit_gradients({"": lambda gradient: None}, model, at="inputs")


def test_outputs_by_path_glob_class_and_callable(chain: nn.Sequential) -> None:
    x = torch.randn(5, 4)
    for names in ("2", ["2"], "[2]", [nn.Linear], [chain[2]], [lambda path, module: path == "2"]):
        with capture(chain, names, clone=True) as got:
            out = chain(x)
        assert torch.equal(got["2"].output, out)
        assert not got["2"].output.requires_grad


def test_structures_keep_their_kind(structured: nn.Module) -> None:
    with capture(structured, ["tuple", "dict", "record"], inputs=True) as got:
        structured(torch.ones(2, 3))
    first, none, second = got["tuple"].output
    assert none is None and torch.equal(first / 2 + 1, second)
    assert torch.equal(got["dict"].output["y"], first * 3)
    assert torch.equal(got["dict"].output["inner"]["z"][0], first + 2)
    record = got["record"].output
    assert type(record).__name__ == "Out" and record.note == "kept"
    assert not record.logits.requires_grad and torch.equal(record.logits, first * 3 + second)


def test_keyword_inputs(structured: nn.Module) -> None:
    with capture(structured, ["dict", "record"], inputs=True, outputs=False) as got:
        structured(torch.ones(2, 3))
    assert got["dict"].args == () and set(got["dict"].kwargs) == {"x", "scale"}
    assert got["dict"].input is got["dict"].kwargs["x"]
    assert len(got["record"].args) == 1 and set(got["record"].kwargs) == {"bias"}
    with pytest.raises(NotCapturedError, match="outputs=True"):
        _ = got["record"].output


def test_what_changed_in_place_is_refused(chain: nn.Sequential) -> None:
    with capture(chain, ["0", "1"]) as got:
        chain(torch.randn(5, 4))
    with pytest.raises(InplaceError, match=r"output of '0'.*clone=True"):
        _ = got["0"].output
    assert (got["1"].output >= 0).all()


def test_input_of_an_inplace_module(chain: nn.Sequential) -> None:
    x = torch.randn(5, 4)
    with capture(chain, "1", inputs=True) as got:
        chain(x)
    with pytest.raises(InplaceError, match="input of '1'"):
        _ = got["1"].input
    with capture(chain, "1", inputs=True, clone=True) as got:
        chain(x)
    assert torch.equal(got["1"].input, chain[0](x))


def test_a_clone_is_the_callers_to_change(chain: nn.Sequential) -> None:
    with capture(chain, "0", clone=True) as got:
        chain(torch.randn(5, 4))
    got["0"].output.zero_()
    assert not got["0"].output.any()


def test_residual_sum_in_place(residual: nn.Module) -> None:
    x = torch.randn(2, 4)
    with capture(residual, "fc*", clone=True) as got:
        residual(x)
    hidden = torch.relu(residual.fc1(x))
    assert torch.equal(got["fc2"].output, residual.fc2(hidden))


def test_calls_of_a_reused_module(residual: nn.Module) -> None:
    x = torch.randn(2, 4)
    values = {}
    for calls in ("first", "last", "all"):
        with capture(residual, "relu", calls=calls, clone=True) as got:
            out = residual(x)
        values[calls] = [call.output for call in got["relu"].calls]
    assert len(values["all"]) == 2
    assert torch.equal(values["first"][0], values["all"][0])
    assert torch.equal(values["last"][0], values["all"][1])
    assert torch.equal(values["last"][0], out)
    assert not torch.equal(values["all"][0], values["all"][1])


def test_a_shared_module_has_each_of_its_paths() -> None:
    shared = nn.Linear(3, 3)
    model = nn.ModuleDict({"a": shared, "b": shared})
    with capture(model, "b") as got:
        model["a"](torch.ones(1, 3))
    assert got["a"].output is got["b"].output and list(got) == ["b"]


def test_detach_false_keeps_the_graph(chain: nn.Sequential) -> None:
    with capture(chain, "2", detach=False) as got:
        out = chain(torch.randn(5, 4))
    assert got["2"].output is out
    got["2"].output.sum().backward()
    assert chain[0].weight.grad is not None


def test_device(chain: nn.Sequential) -> None:
    with capture(chain, "2", device="meta") as got:
        chain(torch.randn(5, 4))
    assert got["2"].output.device.type == "meta"


def test_inference_mode(chain: nn.Sequential) -> None:
    with torch.inference_mode(), capture(chain, ["2"], inputs=True) as got:
        out = chain(torch.randn(5, 4))
    assert torch.equal(got["2"].output, out)


def test_nested_captures_see_the_same(chain: nn.Sequential) -> None:
    x = torch.randn(5, 4)
    with capture(chain, "*", clone=True) as outer:
        chain(x)
        with capture(chain, "0", clone=True) as inner:
            out = chain(x)
        with pytest.warns(HookWarning), capture(chain, "0"):
            pass
        chain(x + 1)
    assert torch.equal(inner["0"].output, chain[0](x))
    assert torch.equal(outer["0"].output, chain[0](x + 1))
    assert not torch.equal(outer[""].output, out)


def test_removing_the_outer_first_leaves_the_inner(chain: nn.Sequential) -> None:
    outer, inner = capture(chain, "0"), capture(chain, "2")
    chain(torch.randn(5, 4))
    outer.remove()
    outer.remove()
    inner.clear()
    out = chain(torch.randn(5, 4))
    assert torch.equal(inner["2"].output, out)
    inner.remove()
    with pytest.raises(UsageError, match="was removed"), inner:
        pass


def test_edit_replaces_outputs(chain: nn.Sequential) -> None:
    x = torch.randn(5, 4)
    with capture(chain, "2", edit={"0": torch.zeros_like, "2": lambda y: y + 1}) as got:
        out = chain(x)
    assert torch.equal(out, chain[2].bias.expand(5, 2) + 1)
    assert torch.equal(got["2"].output, out)
    with capture(chain, "2", edit=lambda y: None) as got:
        assert torch.equal(chain(x), got["2"].output)
    with capture(chain, [], edit={nn.ReLU: torch.neg}) as got:
        assert torch.equal(chain(x), chain[2](-torch.relu(chain[0](x))))
    assert len(got) == 0


def test_edits_of_one_module_follow_the_dict(chain: nn.Sequential) -> None:
    with capture(chain, "", edit={"2": lambda y: y * 0 + 3, nn.Linear: lambda y: y + 1}) as got:
        chain(torch.randn(5, 4))
    assert (got[""].output == 4).all()


def test_asking_for_what_is_not_there(chain: nn.Sequential) -> None:
    got = capture(chain, ["0", "2"])
    with pytest.raises(NotCapturedError, match="'0' was not called"):
        _ = got["0"]
    with pytest.raises(KeyError, match=r"'1' is not captured; there are: '0', '2'"):
        _ = got["1"]
    assert list(got) == [] and len(got) == 0
    with pytest.warns(HookWarning, match=r"never fired: 0 \(forward\), 2 \(forward\)"):
        got.remove()
    got.remove()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"outputs": False}, "all False"),
        ({"calls": "every"}, '"last", "first", "all"'),
        ({"calls": "all", "stop": True}, "stop=True"),
        ({"grads": True, "stop": True}, "stop=True"),
    ],
)
def test_contradictions_register_nothing(chain, state_of, arguments, message) -> None:
    before = state_of(chain)
    with pytest.raises(UsageError, match=message):
        capture(chain, "0", **arguments)
    assert state_of(chain) == before


def test_no_names_and_no_edit(chain: nn.Sequential) -> None:
    with pytest.raises(NoMatchError, match="selects nothing"):
        capture(chain, [])


def test_edit_inputs_and_outputs_with_the_input() -> None:
    layer = nn.Linear(3, 3)
    x = torch.randn(2, 3)
    with capture(
        layer, "", inputs=True, edit_inputs=lambda v: v + 1, edit=lambda y, v: y + v
    ) as got:
        out = layer(x)
    assert torch.equal(got[""].input, x + 1)
    assert torch.equal(out, layer(x + 1) + (x + 1))
    with capture(layer, [], edit_inputs={"": lambda v: None}):
        assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


def test_edit_inputs_by_keyword(structured: nn.Module) -> None:
    x = torch.ones(2, 3)
    with capture(structured, "dict", inputs=True, edit_inputs={"dict": torch.zeros_like}) as got:
        structured(x)
    assert not got["dict"].kwargs["x"].any() and got["dict"].kwargs["scale"] == 3.0
    assert not got["dict"].output["y"].any()


def test_what_cannot_be_an_edit(chain: nn.Sequential, state_of) -> None:
    before = state_of(chain)
    with pytest.raises(UsageError, match=r"edit=1: allowed are callable\(value\)"):
        capture(chain, "0", edit=1)
    with pytest.raises(UsageError, match=r"edit_inputs\['0'\]=1 is not callable"):
        capture(chain, [], edit={"2": torch.zeros_like}, edit_inputs={"0": 1})
    with pytest.raises(NoMatchError, match="edit: 'x' matches no module"):
        capture(chain, "0", edit={"x": torch.zeros_like})
    assert state_of(chain) == before


def test_a_recomputation_in_backward_is_no_call() -> None:
    chain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = torch.randn(5, 4, requires_grad=True)
    with capture(chain, "0") as got:
        first = checkpoint(chain, x, use_reentrant=False)
        second = checkpoint(chain, x * 2, use_reentrant=False)
        before = got["0"].output.clone()
        (first + second).sum().backward()
    assert torch.equal(got["0"].output, before)


def test_the_gradient_of_an_output_that_is_the_input_is_that_use_s() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    x = torch.ones(2, 4)
    with capture(net, "1", grads=True) as got:
        h = net[0](x)
        (h * 3 + net[1](h)).sum().backward()
    assert torch.equal(got["1"].grad, torch.ones(2, 4))


def test_what_is_scripted_is_passed_over() -> None:
    net = nn.Sequential(
        nn.Linear(4, 4), torch.jit.script(nn.Sequential(nn.Linear(4, 4))), nn.Tanh()
    )
    x = torch.randn(2, 4)
    with capture(net, "*") as got:
        out = net(x)
    assert set(got) == {"", "0", "2"} and torch.equal(got["2"].output, out)
    with pytest.raises(NoMatchError, match="scripted or traced"):
        capture(net, "1")
    assert summary(net, x).parameters == 40


class Recursive(nn.Module):
    """Calls itself with what it cannot take, and catches that."""

    def forward(self, x: torch.Tensor, depth: int = 1) -> torch.Tensor:
        if depth == 0:
            raise ValueError(depth)
        try:
            return self(x + 100, depth - 1)
        except ValueError:
            return x * 2


def test_a_call_that_raises_is_none_and_leaves_nothing() -> None:
    net, x = Recursive(), torch.zeros(1)
    with capture(net, "", inputs=True) as got:
        for _ in range(2):
            net(x)
        assert got[""].input.item() == 0
        failed = torch.ones(1000)
        gone = weakref.ref(failed.untyped_storage())
        with pytest.raises(ValueError):
            net(failed, 0)
        del failed
        gc.collect()
        assert gone() is None and len(got[""].calls) == 1
        try:
            raise KeyError
        except KeyError:
            net(x + 7)  # an error that is handled already is not the call's
        assert got[""].input.item() == 7


@pytest.mark.parametrize("register", [find_nonfinite, edited_inputs])
def test_hooks_on_inputs_hold_none_of_a_call_that_raised(
    register: Callable[[nn.Module], AbstractContextManager[object]],
) -> None:
    layer = nn.Linear(3, 3)
    with register(layer):
        failed = torch.randn(7, 5, requires_grad=True) * 1
        gone = weakref.ref(failed.untyped_storage())
        with pytest.raises(RuntimeError):
            layer(failed)
        del failed
        layer(torch.ones(1, 3, requires_grad=True)).sum().backward()
        gc.collect()
        assert gone() is None


def test_the_last_call_is_kept_whatever_it_returns() -> None:
    class Changing(nn.Module):
        def forward(self, x: torch.Tensor, pair: bool) -> torch.Tensor | tuple[torch.Tensor, ...]:
            return (x, x + 1) if pair else x

    model = Changing()
    with capture(model, "") as got:
        model(torch.zeros(1), False)
        model(torch.ones(1), True)
    assert [each.item() for each in got[""].output] == [1, 2]


def test_a_call_that_another_pre_hook_refuses_is_none(chain: nn.Sequential) -> None:
    def refuse(module: nn.Module, args: object) -> None:
        raise ValueError("refused")

    chain[0].register_forward_pre_hook(refuse)
    with capture(chain, "0", inputs=True, edit=lambda y: y + 1) as got:
        with pytest.raises(ValueError, match="refused"):
            chain(torch.ones(5, 4))
        assert list(got) == []
        chain[0]._forward_pre_hooks.popitem(last=False)
        chain(torch.ones(5, 4))
    assert list(got) == ["0"]
