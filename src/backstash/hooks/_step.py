"""Step each parameter's optimizer inside backward, so that the gradients are never all there at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from .._text import clean
from ..errors import UsageError
from ._distributed import is_ddp
from ._handle import Handle
from ._names import select_tensors
from ._registration import Registration
from ._step_guards import ALLOWED, ClipGuard, refuse_leftover, refuse_scaler
from ._stepper import Stepper

__all__ = ["StepInBackward", "step_in_backward"]

Factory = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


class StepInBackward(Handle):
    """What :func:`step_in_backward` returns; it stands where the optimizer stood in the loop."""

    __slots__ = ("_guard", "_stepper")

    def __init__(
        self, registration: Registration, stepper: Stepper, guard: ClipGuard | None
    ) -> None:
        super().__init__(registration)
        self._stepper = stepper
        self._guard = guard

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """The optimizer of each parameter, by the parameter's path."""
        return MappingProxyType(self._stepper.optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, to change a learning rate in: ``group["lr"] = 1e-4``."""
        return [group for o in self._stepper.optimizers.values() for group in o.param_groups]

    def step(self) -> None:
        """Says that one training step ended. The parameters were stepped by backward already.

        Raises:
            UsageError: there was more than one backward since the last ``step()``: that was no
                gradient accumulation, but as many steps. From then on the second backward raises.
        """
        self._stepper.mark()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: backward leaves no gradient. It is here for loops that call it."""

    def state_dict(self) -> dict[str, Any]:
        """The state of every optimizer, by the parameter's path."""
        return {path: o.state_dict() for path, o in self._stepper.optimizers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what :meth:`state_dict` gave.

        Raises:
            UsageError: the paths are not the ones of this handle; nothing is loaded then.
        """
        odd = sorted(state.keys() ^ self._stepper.optimizers.keys())
        if odd:
            raise UsageError(
                f"state: {', '.join(odd[:4])} on one side only; load it into the same model"
            )
        for path, optimizer in self._stepper.optimizers.items():
            optimizer.load_state_dict(state[path])

    def _finish(self, error: BaseException | None) -> bool:
        if self._guard is not None:
            self._guard.remove()
        return False


def step_in_backward(
    optimizer_factory: Factory,
    model: nn.Module,
    *,
    names: str | Iterable[str] | None = None,
    allow: Collection[str] = (),
) -> StepInBackward:
    """Gives each parameter an optimizer that steps as soon as its gradient is complete, and drops the gradient.

    The memory of the gradients is saved: of all of them together only those not yet complete are there.
    The result is that of the same optimizer stepped after backward, if its update looks at one parameter at
    a time, as SGD's and Adam's do.

    Some things cannot be done this way, and are refused where they are seen, unless named in ``allow``:

    - ``"accumulation"`` of gradients over several backwards: each steps. Seen: gradients that are there at the
      start; more than one backward for one call of the handle's ``step()``. A loop that never calls
      ``step()`` cannot be told apart from one that does not accumulate.
    - ``"clipping"`` by the global norm, which needs all gradients: ``clip_grad_norm_`` raises for these
      parameters.
    - a ``"scaler"``: the steps would be taken with scaled gradients. Seen: an enabled ``GradScaler`` in the
      process, at the start and at the first backward.

    DDP is refused always: its average comes after the step. Under FSDP2 it works.

    Args:
        optimizer_factory: ``callable([parameter])`` that returns a ``torch.optim.Optimizer``.
        model: the model.
        names: which parameters, by path or glob. Default: all that require a gradient.
        allow: what is known and wanted: ``"accumulation"``, ``"clipping"``, ``"scaler"``.

    Returns:
        A handle, with ``optimizers``, ``param_groups``, ``state_dict()``, and ``step()``, which checks.

    Raises:
        UsageError: what is refused, above; nothing is registered then.
        NoMatchError: a name matches nothing.

    If backward raises, the parameters whose gradients were complete have been stepped, and others not.
    The idea is PyTorch's tutorial on fusing the optimizer step into backward, and LOMO (arXiv:2306.09782).

    >>> import torch
    >>> from backstash.hooks import step_in_backward
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> before = model.weight.detach().clone()
    >>> with step_in_backward(lambda parameters: torch.optim.SGD(parameters, lr=0.5), model):
    ...     model(torch.ones(1, 2)).sum().backward()
    >>> model.weight.grad is None, torch.equal(model.weight, before - 0.5)
    (True, True)
    """
    odd = [item for item in allow if item not in ALLOWED]
    if odd or isinstance(allow, str):
        raise UsageError(f"allow={allow!r}: allowed is a list of {', '.join(map(repr, ALLOWED))}")
    if is_ddp(model):
        raise UsageError(
            "step_in_backward: DDP averages the gradients after they would have been stepped on; use FSDP2 "
            "(fully_shard), or an optimizer after backward"
        )
    parameters = select_tensors(model, names)
    if "accumulation" not in allow:
        refuse_leftover(parameters.items())
    if "scaler" not in allow:
        refuse_scaler()
    return _attach(optimizer_factory, parameters, allow)


def _attach(
    factory: Factory, parameters: dict[str, torch.Tensor], allow: Collection[str]
) -> StepInBackward:
    stepper = Stepper({path: _made(factory, p, path) for path, p in parameters.items()}, allow)
    registration = Registration("step_in_backward")
    with registration.all_or_none():
        for path, parameter in parameters.items():
            registration.accumulated(path, parameter, stepper.hook(path))
        guard = ClipGuard(parameters.values()) if "clipping" not in allow else None
    return StepInBackward(registration, stepper, guard)


def _made(factory: Factory, parameter: torch.Tensor, path: str) -> torch.optim.Optimizer:
    optimizer = factory([parameter])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"optimizer_factory([{clean(path)}]) returned a {type(optimizer).__name__}; it must return a "
            "torch.optim.Optimizer, such as lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)"
        )
    return optimizer
