"""What stepping inside backward would break without a word, and how it is noticed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.utils.clip_grad as clip_grad

from ..errors import UsageError

__all__ = ["ALLOWED", "ClipGuard", "refuse_leftover", "refuse_scaler"]

ALLOWED = ("accumulation", "clipping", "scaler")


def refuse_leftover(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Gradients that are there before the first backward were accumulated: they would be stepped on."""
    held = [path for path, parameter in parameters if parameter.grad is not None]
    if held:
        raise UsageError(
            f"step_in_backward: gradients are there already ({', '.join(held[:3])}); "
            "each backward steps at once, so nothing can be accumulated: call model.zero_grad() first, or "
            'pass allow=["accumulation"] to step on what is there'
        )


def refuse_scaler() -> None:
    """A live ``GradScaler`` scales the loss: the steps would be taken with scaled gradients."""
    kind = torch.amp.GradScaler
    # `type(...)`, for `isinstance` would run the `__class__` of every lazy proxy in the process.
    live = (o for o in gc.get_objects() if issubclass(type(o), kind))
    if any(scaler.is_enabled() for scaler in live):
        raise UsageError(
            "step_in_backward: an enabled GradScaler is alive, and the steps inside backward come before its "
            "unscale_() and its check for infinities; train in bfloat16 without a scaler, or pass "
            'allow=["scaler"] if it belongs to another model'
        )


_NAME = "_clip_grads_with_norm_"
_guards: list[ClipGuard] = []


class ClipGuard:
    """Makes ``clip_grad_norm_`` refuse parameters whose gradients are gone; it would return 0 for them.

    torch has no hook there. Its functions all end in one private function, which gets a check in front of it
    while a guard lives; where torch has no such function, nothing is guarded.
    """

    __slots__ = ("_original", "_parameters")

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = {id(parameter): parameter for parameter in parameters}
        current = getattr(clip_grad, _NAME, None)
        self._original: Callable[..., Any] | None = getattr(current, "guarded", current)
        if self._original is not None:
            _guards.append(self)
            setattr(clip_grad, _NAME, _guarded(self._original))

    def covers(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether one of the parameters is stepped inside backward."""
        return any(id(parameter) in self._parameters for parameter in parameters)

    def remove(self) -> None:
        """Takes the check away; with the last guard, torch's own function is back."""
        if self in _guards:
            _guards.remove(self)
            if not _guards:
                setattr(clip_grad, _NAME, self._original)


def _guarded(original: Callable[..., Any]) -> Callable[..., Any]:
    def check(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if any(guard.covers(listed) for guard in _guards):
            raise UsageError(
                "clip_grad_norm_: step_in_backward has stepped on these gradients and they are gone: "
                "there is nothing to clip; use backstash.hooks.clip_gradients, which clips inside backward "
                '(each tensor by itself), or pass allow=["clipping"]'
            )
        return original(listed, *args, **kwargs)

    check.guarded = original  # type: ignore[attr-defined]
    return check
