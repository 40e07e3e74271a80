"""Under torch.compile: hooks that are there when it traces work; later ones are not ignored in silence."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from backstash.hooks import (
    Handle,
    HookWarning,
    capture,
    clip_gradients,
    edit_gradients,
    find_nonfinite,
    trace,
    watch_gradients,
)

# What the compiler warns of while it traces a hook; it then runs the hook as it is.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
]
REMEDY = r"runs inside torch.compile, .*call torch\.compiler\.reset\(\) after registering"


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


REGISTER = {
    "capture": lambda m: capture(m, "0"),
    "capture_stop": lambda m: capture(m, "0", stop=True),
    "trace": lambda m: trace(m, to=None),
    "watch_gradients": lambda m: watch_gradients(m, per="module", to=None),
    "edit_gradients": lambda m: edit_gradients({"0": torch.zeros_like}, m),
    "find_nonfinite": lambda m: find_nonfinite(m),
}


@pytest.mark.parametrize("register", REGISTER.values(), ids=REGISTER)
@pytest.mark.parametrize("in_place", [False, True])
def test_on_a_compiled_model_it_warns_of_the_line_that_registers(chain, register, in_place) -> None:
    model = chain if in_place else torch.compile(chain, backend="eager")
    if in_place:
        chain.compile(backend="eager")
    with pytest.warns(HookWarning, match=REMEDY) as caught:
        handle = register(model)
    code = register.__code__
    assert [(each.filename, each.lineno) for each in caught] == [
        (code.co_filename, code.co_firstlineno)
    ]
    with pytest.warns(HookWarning, match="never fired"):
        handle.remove()


def test_a_compiled_block_in_a_model(chain: nn.Sequential) -> None:
    chain[0] = torch.compile(chain[0], backend="eager")
    with pytest.warns(HookWarning, match="0 runs inside"):
        handle = capture(chain, ["0", "2"])
    chain(torch.ones(1, 4))
    handle.remove()
    with capture(chain, "2") as got:
        chain(torch.ones(1, 4))
    assert "2" in got


def test_parameters_hooks_do_not_warn(chain: nn.Sequential) -> None:
    model = torch.compile(chain, backend="eager")
    with clip_gradients(model, value=1e-3):
        model(torch.ones(1, 4)).sum().backward()
    assert all(p.grad.abs().max() <= 1e-3 for p in chain.parameters())


def test_later_hooks_are_ignored_until_the_remedy(chain: nn.Sequential) -> None:
    model = torch.compile(chain, backend="eager")
    model(torch.ones(1, 4))
    with pytest.warns(HookWarning):
        handle = capture(model, "2")
    model(torch.ones(1, 4))
    assert list(handle) == []
    torch.compiler.reset()
    out = model(torch.ones(1, 4))
    assert torch.equal(handle["2"].output, out)
    handle.remove()
    handle.clear()
    model(torch.ones(1, 4))
    assert list(handle) == []


@pytest.mark.parametrize(
    "register",
    [
        lambda m: edit_gradients({"1": lambda g: g * 0.5}, m),
        lambda m: edit_gradients({"1": lambda g: g * 0.5}, m, at="inputs"),
        lambda m: capture(m, "*", inputs=True, grads=True, clone=True),
        lambda m: capture(m, [], edit={"0": lambda y: y * 2}),
        lambda m: clip_gradients(m, norm=0.1),
        lambda m: watch_gradients(m, per="module", to=None),
    ],
)
def test_hooks_before_compiling_work(
    chain: nn.Sequential, register: Callable[[nn.Module], Handle]
) -> None:
    def gradients(model: nn.Module) -> list[torch.Tensor]:
        chain.zero_grad()
        x = torch.linspace(-1, 1, 20).view(5, 4).requires_grad_()
        model(x).sum().backward()
        return [x.grad, *(p.grad.clone() for p in chain.parameters())]

    with register(chain):
        eager = gradients(chain)
    with register(chain):
        compiled = gradients(torch.compile(chain, backend="eager"))
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
