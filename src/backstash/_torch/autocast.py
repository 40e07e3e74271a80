"""Whether autocast is on for the operations that a kernel calls: a dispatch mode turns it off there.

A custom operator may call a matrix product, and so do a few operators of PyTorch. Under autocast this product
is computed in lower precision, but not under any dispatch mode (seen in torch 2.13).
"""

from __future__ import annotations

from typing import Any

import torch

from .dispatch import SilentMode, with_lazy_bits
from .lookup import optional

__all__ = ["Autocast", "Watched", "is_cast", "key_of", "nesting"]

_key: Any = optional("torch._C.DispatchKey", None)
_keys: Any = optional("torch._C.DispatchKeySet", None)
_DEVICES = frozenset(("cpu", "cuda", "hpu", "mps", "xpu"))


def nesting() -> int:
    """Return how many ``torch.autocast`` contexts this thread is in, also of those that disable it."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def key_of(device_type: str) -> Any:
    """Return the dispatch key of a device type's autocast."""
    return getattr(_key, f"Autocast{_name_of(device_type)}")


def _name_of(device_type: str) -> str:
    return device_type.upper() if device_type in _DEVICES else "PrivateUse1"


def is_cast(func: Any, device_type: str) -> bool:
    """Return whether autocast itself handles the operator. Then it is off for what the operator calls."""
    return bool(func.has_kernel_for_dispatch_key(key_of(device_type)))


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


class Watched(SilentMode):  # type: ignore[no-untyped-call]
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
            if isinstance(each, torch.Tensor) and is_cast(func, each.device.type):
                self.found = func
        with with_lazy_bits():
            return func(*args, **(kwargs or {}))
