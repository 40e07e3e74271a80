"""What stands between a program's call and the operation: function modes and dispatch modes.

All of these are in torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from .lookup import optional, required

__all__ = [
    "SilentMode",
    "TorchDispatchMode",  # documented under this private path, and no other: without it, ImportError
    "below_autograd",
    "count_dispatch_modes",
    "count_function_modes",
    "dispatch_modes",
    "has_kernels",
    "innermost_mode",
    "pop_mode",
    "push_mode",
    "put_back",
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
"""The dispatch modes that are active on this thread. Where torch lacks the call, none is seen."""

count_dispatch_modes: Callable[[], int] = optional("torch._C._len_torch_dispatch_stack", lambda: 1)
"""How many there are. Where torch lacks the call, 1: what a mode would see is not done."""

without_function_modes: Callable[[], AbstractContextManager[None]] = required(
    "torch._C.DisableTorchFunction", "looks at a tensor without a mode of the program seeing it"
)
"""A context in which neither ``__torch_function__`` nor a function mode is called. Where torch lacks it, it
raises ``UsageError``."""

without_dispatch: Callable[[], AbstractContextManager[Any]] = optional(
    "torch._C._DisableTorchDispatch", nullcontext
)
"""A context in which no ``__torch_dispatch__`` is called, of a mode or a subclass. Where torch lacks it, they
are."""

count_function_modes: Callable[[], int] = optional("torch._C._len_torch_function_stack", lambda: 0)
"""How many function modes are active on this thread. Where torch lacks the call, none is counted."""

_without_dispatch_modes: Callable[[], AbstractContextManager[Any]] = optional(
    "torch.utils._python_dispatch._disable_current_modes", nullcontext
)


push_mode: Callable[[Any], None] = required(
    "torch.utils._python_dispatch._push_mode", "sees which operations a forward runs"
)
"""Makes a dispatch mode the innermost of this thread. Where torch lacks it, it raises ``UsageError``."""

pop_mode: Callable[[], Any] = required(
    "torch.utils._python_dispatch._pop_mode", "sees which operations a forward runs"
)
"""Takes the innermost dispatch mode off, and returns it. Where torch lacks it, it raises ``UsageError``."""

innermost_mode: Callable[[], Any] = optional(
    "torch.utils._python_dispatch._get_current_dispatch_mode", lambda: None
)
"""The innermost dispatch mode of this thread; ``None``: it has none, or torch does not tell."""


def take_off(mode: TorchDispatchMode) -> int:
    """Take a mode off this thread, whatever modes were entered since and are active yet.

    Returns how many those are; -1: it was not active.
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
    """Put a mode back to where it was when :func:`take_off` returned ``above``."""
    others = [pop_mode() for _ in range(above)]
    for each in (mode, *reversed(others)):
        push_mode(each)


_REPLAYS = "computes again what was let go"

below_autograd: Callable[[], AbstractContextManager[Any]] = required(
    "torch._C._AutoDispatchBelowAutograd", _REPLAYS
)
"""A context in which operations make no graph, whatever the grad mode is. Where torch lacks it, it raises
``UsageError``."""

without_autocast: Callable[[], AbstractContextManager[Any]] = required(
    "torch._C._DisableAutocast", _REPLAYS
)
"""A context in which no autocast is in force. Where torch lacks it, it raises ``UsageError``."""

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


class SilentMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that PyTorch's compiler compiles as if it were not there, and that higher-order operators
    go through."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Where dynamo asks whether a mode of the program's is active: this is none."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Likewise."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else each call goes through a wrapper; who subclasses this one calls ``leave_untraced``.
        return False


def with_lazy_bits() -> AbstractContextManager[None]:
    """Inside ``__torch_dispatch__``: a context in which kernels see lazy conjugation and negation.

    PyTorch excludes their dispatch keys there. A kernel that conjugates what it has made itself, as that of
    ``linalg.pinv`` does, then reads it unconjugated: its result is wrong under any dispatch mode (seen in
    torch 2.13).
    """
    return _force(_include(), _exclude() - _BITS)


has_kernels: Callable[[str], bool] = optional("torch._C._dispatch_has_kernel", lambda name: False)
"""Whether the dispatcher knows any kernel of the operator of this name. Where torch lacks the call: no."""

set_grad_enabled: Callable[[bool], None] = required("torch._C._set_grad_enabled", _REPLAYS)
"""Sets the grad mode of this thread. Where torch lacks it, it raises ``UsageError``."""


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """A context in which no dispatch mode that is active now is called; subclasses' ``__torch_dispatch__`` is.
    Where torch lacks it, modes are called."""
    # Torch's imports much of its compiler.
    return _without_dispatch_modes() if count_dispatch_modes() else nullcontext()


without_subclass_functions: Callable[[], AbstractContextManager[None]] = required(
    "torch._C.DisableTorchFunctionSubclass", "looks at a tensor without its subclass seeing it"
)
"""A context in which no ``__torch_function__`` of a subclass is called. Where torch lacks it, it raises
``UsageError``."""


def schema_of(operator: Any) -> Any:
    """The schema of a dispatched operator: which arguments it writes. ``None`` where it has none."""
    return getattr(operator, "_schema", None)
