"""Step each parameter's optimizer inside backward, so that gradients need not all be in memory at once."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from .._text import clean
from .._torch.clipping import norm_clipping, replace_norm_clipping
from ..errors import UsageError
from ._clock import BackwardClock
from ._distributed import is_ddp
from ._handle import Handle
from ._names import select_tensors
from ._registration import Registration

__all__ = ["StepInBackward", "step_in_backward"]


Factory = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def step_in_backward(
    optimizer_factory: Factory,
    model: nn.Module,
    *,
    names: str | Iterable[str] | None = None,
    allow: Collection[str] = (),
) -> StepInBackward:
    """Give each parameter an optimizer that steps once the gradient is complete, and then drops the gradient.

    This saves memory: at any time only the gradients that are not yet complete are held. The result is the
    same as of an optimizer that steps after backward, if its update looks at one parameter at a time, as SGD's
    and Adam's do.

    Three things cannot be done this way. Each raises where it is detected, unless ``allow`` names it:

    - ``"accumulation"`` of gradients over several backwards: each backward steps. Detected are gradients that
      exist at the start, and more than one backward for one call of the handle's ``step()``. Accumulation in
      a loop that never calls ``step()`` is not detected.
    - ``"clipping"`` by the global norm, which needs all gradients at once: ``clip_grad_norm_`` raises for
      these parameters.
    - a ``"scaler"``: the optimizers would step with scaled gradients. Detected is an enabled ``GradScaler`` in
      the process, at the start and at the first backward.

    DDP is always refused, because it averages the gradients after the step. FSDP2 works.

    Args:
        optimizer_factory: ``callable([parameter])`` that returns a ``torch.optim.Optimizer``.
        model: the model.
        names: which parameters, by path or glob. Default: all that require a gradient.
        allow: which of the above to let pass: ``"accumulation"``, ``"clipping"``, ``"scaler"``.

    Returns:
        A :class:`StepInBackward` handle, with ``optimizers``, ``param_groups``, ``state_dict()``, and
        ``step()``, which checks for accumulation.

    Raises:
        UsageError: for DDP, for a case above that is detected at the start, or if the factory returns no
            optimizer; nothing is registered then.
        NoMatchError: a name matches nothing.

    If backward raises, the parameters whose gradients were complete have been stepped, and the others not.
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
    if not callable(optimizer_factory):
        raise UsageError(
            f"step_in_backward({type(optimizer_factory).__name__}, ...): give what makes an optimizer of some "
            "parameters, such as lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)"
        )
    odd = [item for item in allow if item not in _ALLOWED]
    if odd or isinstance(allow, str):
        raise UsageError(f"allow={allow!r}: allowed is a list of {', '.join(map(repr, _ALLOWED))}")
    if is_ddp(model):
        raise UsageError(
            "step_in_backward: DDP averages gradients only after the optimizers have used them; use "
            "FSDP2 (fully_shard), or an optimizer after backward"
        )
    parameters = select_tensors(model, names)
    if "accumulation" not in allow:
        _refuse_leftover(parameters.items())
    if "scaler" not in allow:
        _refuse_scaler()
    optimizers = {path: _made(optimizer_factory, p, path) for path, p in parameters.items()}
    registration = Registration("step_in_backward")
    with registration.all_or_none():
        handle = StepInBackward(registration, optimizers, allow)
        for path, parameter in parameters.items():
            registration.accumulated(path, parameter, handle._hook(path))
        if "clipping" not in allow:
            registration.on_remove(_refuse_clipping(parameters.values()))
    return handle


def _made(factory: Factory, parameter: torch.Tensor, path: str) -> torch.optim.Optimizer:
    optimizer = factory([parameter])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"optimizer_factory([{clean(path)}]) returned a {type(optimizer).__name__}; it must return a "
            "torch.optim.Optimizer, such as lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)"
        )
    return optimizer


class StepInBackward(Handle):
    """The handle that :func:`step_in_backward` returns; it takes the optimizer's place in a training loop."""

    __slots__ = ("_allow", "_clock", "_marked", "_optimizers", "_stepped", "_unchecked")

    def __init__(
        self,
        registration: Registration,
        optimizers: dict[str, torch.optim.Optimizer],
        allow: Collection[str],
    ) -> None:
        super().__init__(registration)
        self._optimizers = optimizers
        self._allow = frozenset(allow)
        self._unchecked = "scaler" not in allow
        self._clock = BackwardClock(on_begin=self._begin, on_end=lambda: None)
        self._marked: int | None = None
        self._stepped: set[str] = set()  # in this backward

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """The optimizer of each parameter, by the parameter's path."""
        return MappingProxyType(self._optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers; set a learning rate by ``group["lr"] = 1e-4`` in each."""
        return [group for o in self._optimizers.values() for group in o.param_groups]

    def step(self) -> None:
        """Mark the end of one training step; backward has stepped the parameters already.

        Raises:
            UsageError: more than one backward ran since the last ``step()``. That did not accumulate
                gradients: each backward was a step. After the first ``step()``, a second backward
                before the next ``step()`` raises as well. Not with ``allow=["accumulation"]``.
        """
        done = self._clock.backwards - (self._marked or 0)
        self._marked = self._clock.backwards
        if done > 1:
            self._refuse_accumulation(done)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing, as backward leaves no gradient; it is here for loops that call it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every optimizer, by the parameter's path."""
        return {path: o.state_dict() for path, o in self._optimizers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned.

        Raises:
            UsageError: the paths differ from the ones of this handle; nothing is loaded then.
        """
        odd = sorted(state.keys() ^ self._optimizers.keys())
        if odd:
            raise UsageError(
                f"state: {', '.join(odd[:4])} on one side only; load it into the same model"
            )
        for path, optimizer in self._optimizers.items():
            optimizer.load_state_dict(state[path])

    def _begin(self) -> None:
        self._stepped.clear()
        # Checked again at the first backward, since training scripts often create their scaler last.
        if self._unchecked:
            _refuse_scaler()
            self._unchecked = False
        if self._marked is not None and self._clock.backwards > self._marked:
            self._refuse_accumulation(self._clock.backwards - self._marked + 1)

    def _refuse_accumulation(self, backwards: int) -> None:
        if "accumulation" in self._allow:
            return
        raise UsageError(
            f"step_in_backward: {backwards} backwards for one step(); each backward steps at once, so "
            f"the gradients were not accumulated but used in {backwards} steps; use a larger batch "
            'with checkpointing, or pass allow=["accumulation"]'
        )

    def _begin_step(self, path: str) -> None:
        if path in self._stepped and "accumulation" not in self._allow:
            raise UsageError(
                f"step_in_backward: the gradient of {clean(path)} came in two parts in one backward, as "
                "where reentrant checkpoints share a parameter, and the first part was a step already: "
                'checkpoint with use_reentrant=False, or pass allow=["accumulation"]'
            )
        self._stepped.add(path)

    def _hook(self, path: str) -> Callable[[torch.Tensor], None]:
        """Make the hook that steps the parameter at ``path``."""
        optimizer = self._optimizers[path]

        def hook(parameter: torch.Tensor) -> None:
            try:
                self._clock.begin()
            except UsageError:
                parameter.grad = None  # no later step may use it
                raise
            self._begin_step(path)
            optimizer.step()
            parameter.grad = None

        return hook


_ALLOWED = ("accumulation", "clipping", "scaler")


def _refuse_leftover(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise if a parameter has a gradient before the first backward, which would be stepped on as well."""
    held = [path for path, parameter in parameters if parameter.grad is not None]
    if held:
        raise UsageError(
            f"step_in_backward: parameters already have gradients ({', '.join(held[:3])}), and each "
            "backward steps at once, so gradients cannot accumulate: call model.zero_grad() first, or "
            'pass allow=["accumulation"] to step on them'
        )


def _refuse_scaler() -> None:
    """Raise if an enabled ``GradScaler`` is alive: the optimizers would step with scaled gradients."""
    kind = torch.amp.GradScaler
    # Not isinstance, which would run the `__class__` of every lazy proxy in the process.
    live = (o for o in gc.get_objects() if issubclass(type(o), kind))
    if any(scaler.is_enabled() for scaler in live):
        raise UsageError(
            "step_in_backward: an enabled GradScaler is alive, and the steps inside backward come before its "
            "unscale_() and its check for infinities; train in bfloat16 without a scaler, or pass "
            'allow=["scaler"] if it belongs to another model'
        )


_refused: list[list[torch.Tensor]] = []


def _refuse_clipping(parameters: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Make ``clip_grad_norm_`` raise for parameters whose gradients are gone. Return what undoes that.

    It would return 0 for them. PyTorch has no hook for this. Its clipping functions all call one private
    function; while any parameters are refused, that function has a check in front of it. Where PyTorch lacks
    the function, nothing is refused.
    """
    mine = list(parameters)
    current = norm_clipping()
    original: Callable[..., Any] | None = getattr(current, "guarded", current)
    if original is not None:
        replace_norm_clipping(_guarded(original))
    _refused.append(mine)

    def undo() -> None:
        _refused[:] = [each for each in _refused if each is not mine]
        if not _refused and original is not None:
            replace_norm_clipping(original)

    return undo


def _guarded(original: Callable[..., Any]) -> Callable[..., Any]:
    def check(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        refused = {id(parameter) for each in _refused for parameter in each}
        if not refused.isdisjoint(map(id, listed)):
            raise UsageError(
                "clip_grad_norm_: step_in_backward has already used and freed these gradients, so "
                "there is nothing to clip; use backstash.hooks.clip_gradients, which clips inside "
                'backward (each tensor separately), or pass allow=["clipping"]'
            )
        return original(listed, *args, **kwargs)

    check.guarded = original  # type: ignore[attr-defined]
    return check
