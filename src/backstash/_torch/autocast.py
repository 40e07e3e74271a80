"""Whether autocast is on for the operations that a kernel calls: a dispatch mode turns it off there.

A custom operator may call a matrix product, and so do a few operators of PyTorch. Under autocast this product
is computed in lower precision, but not under any dispatch mode (seen in torch 2.13).
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UsageError
from .dispatch import SilentMode, with_lazy_bits
from .lookup import optional
from .schemas import Operation, tensors_of

__all__ = ["Autocast", "call_with_autocast", "nesting"]

_UNKNOWN = (
    "{} calls {}, which torch.autocast does not reach while the forward is recorded, and whether autocast is "
    "on is not known: enter it outside of what is recomputed or planned, or give Stash(recompute=False)"
)

_key: Any = optional("torch._C.DispatchKey", None)
_keys: Any = optional("torch._C.DispatchKeySet", None)
_DEVICES = frozenset(("cpu", "cuda", "hpu", "mps", "xpu"))


def nesting() -> int:
    """Return how many ``torch.autocast`` contexts this thread is in, also of those that disable it."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _key_of(device_type: str) -> Any:
    """Return the dispatch key of a device type's autocast."""
    return getattr(_key, f"Autocast{_name_of(device_type)}")


def _name_of(device_type: str) -> str:
    return device_type.upper() if device_type in _DEVICES else "PrivateUse1"


def _is_cast(func: Any, device_type: str) -> bool:
    """Return whether autocast itself handles the operator. Then it is off for what the operator calls."""
    return bool(func.has_kernel_for_dispatch_key(_key_of(device_type)))


class Autocast:
    """What autocast does where a dispatch mode is entered: inside the mode it cannot be asked.

    Args:
        is_certain: whether no operation is running. During one that autocast handles, it seems to be off.
    """

    def __init__(self, *, is_certain: bool) -> None:
        types = {"cpu", torch.accelerator.current_accelerator() or "cpu"}
        names = {each if isinstance(each, str) else each.type for each in types}
        self.nesting = nesting()
        self.types = frozenset(each for each in names if torch.is_autocast_enabled(each))
        """The types of devices for which it is on."""
        self._is_known = is_certain or bool(self.types) or not self.nesting

    @property
    def is_known(self) -> bool:
        """Whether :attr:`types` is right here, too: no context was entered since."""
        return self._is_known and nesting() == self.nesting


def call_with_autocast(
    autocast: Autocast | None, operation: Operation, args: Any, kwargs: Any
) -> Any:
    """Call an operation whose kernel may call others that autocast handles, in ``__torch_dispatch__``.

    Raises:
        UsageError: it calls some, and whether autocast is on is not known.
    """
    func, versions = operation.func, operation.writes_inside
    device = next((each.device.type for each in tensors_of(args)), "")
    is_known = autocast is not None and autocast.is_known
    is_on = is_known and autocast is not None and device in autocast.types
    # Autocast does not reach what is called by an operation that it handles itself.
    if not device or _is_cast(func, device) or (is_known and not is_on):
        with with_lazy_bits(versions=versions):
            return func(*args, **kwargs)
    if is_on and func.namespace != "aten":
        with with_lazy_bits(versions=versions, keys=[_key_of(device)]):
            return func(*args, **kwargs)
    watched = _Watched()
    with with_lazy_bits(versions=versions):
        result = watched.call(func, device, args, kwargs)
    if watched.found is not None:
        raise UsageError(_UNKNOWN.format(operation.name, watched.found))
    return result


class _Watched(SilentMode):  # type: ignore[no-untyped-call]
    """Look for operations that autocast would handle, in a kernel that it does not reach."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Any = None
        """One of them; ``None`` if there is none."""

    def call(self, func: Any, device_type: str, args: Any, kwargs: Any) -> Any:
        """Call an operator's kernel for a type of device, and look at what it calls."""
        backend = _keys(getattr(_key, _name_of(device_type)))
        with self:
            return func.redispatch(backend, *args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See ``TorchDispatchMode``: these are the operations that the kernel calls."""
        for each in args:
            if isinstance(each, torch.Tensor) and _is_cast(func, each.device.type):
                self.found = func
        with with_lazy_bits():
            return func(*args, **(kwargs or {}))
