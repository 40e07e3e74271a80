"""Function modes and dispatch modes, which act between a program's call and the operation.

Everything here exists in torch 2.11 to 2.15.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from .lookup import optional, required

__all__ = [
    "SilentMode",
    "TorchDispatchMode",  # documented under this private path, and no other: without it, ImportError
    "below_autograd",
    "count_dispatch_modes",
    "count_function_modes",
    "dispatch_modes",
    "dual_level",
    "excluded_at_call",
    "has_kernels",
    "innermost_mode",
    "pause_mode",
    "pop_mode",
    "push_mode",
    "put_back",
    "resume_mode",
    "schema_of",
    "set_grad_enabled",
    "take_off",
    "with_lazy_bits",
    "without_autocast",
    "without_dispatch",
    "without_dispatch_modes",
    "without_function_modes",
    "without_subclass_functions",
]

dispatch_modes: Callable[[], list[Any]] = optional(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack", list
)
"""Returns the active dispatch modes of this thread. If torch lacks the call: an empty list."""

count_dispatch_modes: Callable[[], int] = optional("torch._C._len_torch_dispatch_stack", lambda: 1)
"""Returns their number. If torch lacks the call, 1, so that nothing is done that a mode would see."""

without_function_modes: Callable[[], AbstractContextManager[None]] = required(
    "torch._C.DisableTorchFunction", "looks at a tensor without a mode of the program seeing it"
)
"""A context without ``__torch_function__`` and function modes. If torch lacks it: ``UsageError``."""

without_dispatch: Callable[[], AbstractContextManager[Any]] = optional(
    "torch._C._DisableTorchDispatch", nullcontext
)
"""A context without ``__torch_dispatch__`` of modes and subclasses. If torch lacks it, they are called."""

count_function_modes: Callable[[], int] = optional("torch._C._len_torch_function_stack", lambda: 0)
"""Returns the number of active function modes of this thread. If torch lacks the call, 0."""

_without_dispatch_modes: Callable[[], AbstractContextManager[Any]] = optional(
    "torch.utils._python_dispatch._disable_current_modes", nullcontext
)


push_mode: Callable[[Any], None] = required(
    "torch.utils._python_dispatch._push_mode", "sees which operations a forward runs"
)
"""Makes a dispatch mode the innermost of this thread. If torch lacks it, it raises ``UsageError``."""

pop_mode: Callable[[], Any] = required(
    "torch.utils._python_dispatch._pop_mode", "sees which operations a forward runs"
)
"""Removes and returns the innermost dispatch mode. If torch lacks it, it raises ``UsageError``."""

resume_mode: Callable[[Any], None] = optional("torch._C._push_on_torch_dispatch_stack", push_mode)
"""As :data:`push_mode`, for a mode of this package's: without a Python call."""

pause_mode: Callable[[None], Any] = optional(
    "torch._C._pop_torch_dispatch_stack", lambda _: pop_mode()
)
"""As :data:`pop_mode`, for a mode of this package's: without a Python call. Its argument is ``None``."""

innermost_mode: Callable[[], Any] = optional(
    "torch.utils._python_dispatch._get_current_dispatch_mode", lambda: None
)
"""Returns the innermost dispatch mode of this thread; ``None`` if there is none or torch lacks the call."""


def take_off(mode: TorchDispatchMode) -> int:
    """Remove a mode from this thread, even if modes entered later are still active.

    Returns the number of those modes; -1 if the mode was not active.
    """
    if not any(each is mode for each in dispatch_modes()):
        return -1
    above = []
    while (innermost := pop_mode()) is not mode:
        above.append(innermost)
    for each in reversed(above):
        push_mode(each)
    return len(above)


def put_back(mode: TorchDispatchMode, above: int) -> None:
    """Restore a mode to its place after :func:`take_off` returned ``above``."""
    others = [pop_mode() for _ in range(above)]
    for each in (mode, *reversed(others)):
        push_mode(each)


_REPLAYS = "recomputes what was discarded"

below_autograd: Callable[[], AbstractContextManager[Any]] = required(
    "torch._C._AutoDispatchBelowAutograd", _REPLAYS
)
"""A context in which operations record no graph in any grad mode. If torch lacks it: ``UsageError``."""

without_autocast: Callable[[], AbstractContextManager[Any]] = required(
    "torch._C._DisableAutocast", _REPLAYS
)
"""A context in which autocast is disabled. If torch lacks it, it raises ``UsageError``."""

_exclude: Callable[[], Any] = required("torch._C._dispatch_tls_local_exclude_set", _REPLAYS)
_include: Callable[[], Any] = required("torch._C._dispatch_tls_local_include_set", _REPLAYS)
_force: Callable[[Any, Any], AbstractContextManager[None]] = required(
    "torch._C._ForceDispatchKeyGuard", _REPLAYS
)
_keys: Any = optional("torch._C.DispatchKeySet", None)
_key: Any = optional("torch._C.DispatchKey", None)
_BITS = (
    _keys(_key.Conjugate) | _keys(_key.Negative) | _keys(_key.ZeroTensor)
    if _keys and _key
    else None
)
_BITS_AND_VERSIONS = _BITS | _keys(_key.ADInplaceOrView) if _keys and _key else None


class SilentMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that the compiler ignores, and through which higher-order operators run."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return ``True``, so that dynamo does not count this as an active mode of the program."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return ``True`` for the same reason."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would wrap each call. A module with a subclass of this class calls ``leave_untraced``.
        return False


def with_lazy_bits(
    *, versions: bool = False, keys: Sequence[Any] = ()
) -> AbstractContextManager[None]:
    """Return a context for ``__torch_dispatch__`` in which kernels see lazy conjugation and negation.

    PyTorch excludes their dispatch keys there. A kernel that conjugates its own intermediate result, such as
    the kernel of ``linalg.pinv``, then reads it unconjugated, so its result is wrong under any dispatch mode
    (seen in torch 2.13).

    Args:
        versions: whether the kernel's own in-place operations raise versions, too; see
            :attr:`~.schemas.Operation.writes_inside`.
        keys: further dispatch keys that the kernel's own operations have.
    """
    excluded = _exclude() - (_BITS_AND_VERSIONS if versions else _BITS)
    for each in keys:
        excluded = excluded - _keys(each)
    return _force(_include(), excluded)


def excluded_at_call() -> Any:
    """Return the dispatch keys that were excluded where the program called the operation that runs now, in
    ``__torch_dispatch__``. If a kernel called it: where the program called the outermost operation."""
    with enable_reentrant_dispatch():
        return _exclude()


_forward_ad = optional("torch.autograd.forward_ad", None)
dual_level: Callable[[], int] = functools.partial(getattr, _forward_ad, "_current_level", -1)
"""Returns the level of dual numbers (forward-mode AD) that is entered; -1: none, or torch lacks the module.
Inside, operations get zero tensors without memory, which kernels may read only :func:`with_lazy_bits`."""

has_kernels: Callable[[str], bool] = optional("torch._C._dispatch_has_kernel", lambda name: False)
"""Whether the dispatcher has a kernel for the operator of this name. If torch lacks the call: ``False``."""

set_grad_enabled: Callable[[bool], None] = required("torch._C._set_grad_enabled", _REPLAYS)
"""Sets the grad mode of this thread. If torch lacks it, it raises ``UsageError``."""


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Return a context in which no currently active dispatch mode is called, but ``__torch_dispatch__`` of
    subclasses is. If torch lacks it, modes are called."""
    # Only if needed: torch's context imports much of the compiler.
    return _without_dispatch_modes() if count_dispatch_modes() else nullcontext()


without_subclass_functions: Callable[[], AbstractContextManager[None]] = required(
    "torch._C.DisableTorchFunctionSubclass", "looks at a tensor without its subclass seeing it"
)
"""A context without ``__torch_function__`` of subclasses. If torch lacks it: ``UsageError``."""


def schema_of(operator: Any) -> Any:
    """Return the schema of a dispatched operator (which arguments it writes), or ``None``."""
    return getattr(operator, "_schema", None)
