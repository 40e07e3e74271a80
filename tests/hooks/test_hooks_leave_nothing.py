"""Every registration: one handle, all or none, and nothing left behind, whatever happens."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

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
    hooks_on,
    step_in_backward,
    summary,
    trace,
    watch_gradients,
)


def sgd(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


REGISTER: dict[str, Callable[[nn.Module], Handle]] = {
    "capture": lambda m: capture(m, "*", inputs=True, grads=True, clone=True, calls="all"),
    "capture_last": lambda m: capture(m, ["0", "2"]),
    "capture_stop": lambda m: capture(m, "1", stop=True),
    "capture_edit": lambda m: capture(m, [], edit={"*": lambda y: y}),
    "watch": lambda m: watch_gradients(m, every=1, to=None),
    "watch_modules": lambda m: watch_gradients(m, every=1, per="module", to=None),
    "clip_value": lambda m: clip_gradients(m, value=1.0),
    "clip_norm": lambda m: clip_gradients(m, norm=1.0),
    "edit": lambda m: edit_gradients({"0.bias": torch.zeros_like, "1": lambda g: None}, m),
    "edit_inputs": lambda m: edit_gradients({"*": lambda g: g * 2}, m, at="inputs"),
    "trace": lambda m: trace(m, to=None),
    "step": lambda m: step_in_backward(sgd, m),
    "nonfinite": find_nonfinite,
}


class Fails(nn.Module):
    """Raises in forward, or in backward, the exception it was given."""

    def __init__(self, error: BaseException | None = None, *, late: bool = False) -> None:
        super().__init__()
        self.error = error
        self.late = late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.error is not None and not self.late:
            raise self.error
        if self.error is not None:
            x = x * 1
            x.register_hook(self._fail)
        return x * 2

    def _fail(self, gradient: torch.Tensor) -> None:
        raise self.error


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), Fails())


@pytest.fixture(params=REGISTER)
def register(request: pytest.FixtureRequest) -> Callable[[nn.Module], Handle]:
    return REGISTER[request.param]


def train(model: nn.Module) -> None:
    model(torch.ones(2, 4, requires_grad=True)).sum().backward()


def test_a_block_leaves_every_dict_as_it_was(model, register, state_of) -> None:
    foreign = [model[0].register_forward_hook(lambda *a: None, with_kwargs=False)]
    foreign.append(model[0].weight.register_hook(lambda g: None))
    before = state_of(model)
    with register(model) as handle:
        assert state_of(model) != before
        train(model)
    assert state_of(model) == before
    assert handle.removed and len(hooks_on(model)) == 2
    for hook in foreign:
        hook.remove()


def test_remove_twice_and_remove_inside_the_block(model, register, state_of) -> None:
    before = state_of(model)
    with register(model) as handle:
        try:
            train(model)
        except BaseException as error:  # a stop, in the block that would end it
            assert type(error).__name__ == "StopForward"
        handle.remove()
        handle.remove()
        assert state_of(model) == before
    handle.remove()


@pytest.mark.parametrize("name", sorted(REGISTER.keys() - {"capture_stop"}))
def test_an_exception_leaves_the_model_as_it_was(model, state_of, name) -> None:
    for error in (ValueError("no"), KeyboardInterrupt(), SystemExit(3)):
        for late in (False, True):
            model[3] = Fails(error, late=late)
            model.zero_grad()
            before = state_of(model)
            with pytest.raises(type(error)), REGISTER[name](model):
                train(model)
            assert state_of(model) == before


def test_an_exception_before_a_stop(model, state_of) -> None:
    model[3] = Fails(ValueError("no"))
    before = state_of(model)
    with pytest.raises(ValueError, match="no"), capture(model, "3", stop=True):
        train(model)
    assert state_of(model) == before


POINTS = [
    (nn.Module, "register_forward_hook"),
    (nn.Module, "register_forward_pre_hook"),
    (torch.Tensor, "register_hook"),
    (torch.Tensor, "register_post_accumulate_grad_hook"),
]


def failing(real: Callable[..., Any], left: list[int]) -> Callable[..., Any]:
    """``real``, until it was called ``left[0]`` times; then it is interrupted."""

    def register_or_fail(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    return register_or_fail


def test_all_hooks_or_none(model, register, state_of, monkeypatch) -> None:
    before = state_of(model)
    for count in range(100):
        left = [count]
        with monkeypatch.context() as patch:
            for owner, name in POINTS:
                patch.setattr(owner, name, failing(getattr(owner, name), left))
            try:
                handle = register(model)
                break
            except KeyboardInterrupt:
                assert state_of(model) == before
    assert count > 0 and state_of(model) != before
    with pytest.warns(HookWarning):
        handle.remove()
    assert state_of(model) == before


def test_what_never_fired_is_said(model, register, state_of) -> None:
    before = state_of(model)
    with pytest.warns(HookWarning, match="never fired: .*Was the model called"), register(model):
        pass
    assert state_of(model) == before
    handle = register(model)
    with pytest.raises(HookWarning):  # warnings are errors in these tests
        handle.remove()
    assert state_of(model) == before


def test_parameters_without_gradients_are_named(model) -> None:
    model.unused = nn.Linear(2, 2)
    with pytest.warns(HookWarning, match=r"unused\.weight \(accumulated gradient\)"):
        with watch_gradients(model, to=None):
            Fails().forward(model[2](model[1](model[0](torch.ones(2, 4))))).sum().backward()


def test_a_removed_handle_releases_the_model(register) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), Fails())
    with register(model) as handle:
        train(model)
    alive = weakref.ref(model[0])
    del model, handle
    gc.collect()
    assert alive() is None


def test_summary_leaves_the_model_as_it_was(model, state_of) -> None:
    summary(model, torch.ones(2, 4))
    model[3] = Fails(KeyboardInterrupt())
    before = state_of(model)
    with pytest.raises(KeyboardInterrupt):
        summary(model, torch.ones(2, 4))
    assert state_of(model) == before
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
