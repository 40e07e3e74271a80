"""Fake tensors, through PyTorch's ``FakeTensorMode``, and a count of the bytes that they would have."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..errors import UsageError
from .lookup import required
from .storages import storage_identity

__all__ = ["FakeMemory"]


class FakeMemory(TorchDispatchMode):
    """A mode in which tensors have shapes but no memory. It counts the bytes that they would have.

    If the program reads a value, as ``loss.item()`` does, it gets a one; :attr:`asked` records where. Reading
    several values at once, or an operation whose output shape depends on values, raises PyTorch's error.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        make = required("torch._subclasses.fake_tensor.FakeTensorMode", "a fake run")
        self._fake = make(allow_non_fake_inputs=True)
        self._entered = ExitStack()
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.nbytes = 0
        """Bytes of all living storages, except those that were :meth:`left out <leave_out>`."""
        self.most_bytes = 0
        """The peak since it was last set, in bytes."""
        self.asked: dict[str, int] = {}
        """Where values were read, as ``"train.py:12"``, and how often."""

    def __enter__(self) -> Any:
        self._entered.enter_context(self._fake)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._entered.close()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call the operation, and count its results."""
        if function is torch.ops.aten._local_scalar_dense.default:
            where = _caller()
            if where:
                self.asked[where] = self.asked.get(where, 0) + 1
            return _one_of(args[0].dtype)
        found = function(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, Tensor):
                if each.device.type not in _NO_GUARD and not torch.accelerator.is_available():
                    raise UsageError(  # autograd would end the process
                        f"a tensor on {each.device} in a fake run, and no accelerator is here: let the "
                        "program use the CPU, where shapes and bytes are the same"
                    )
                self.note(each)
        return found

    def note(self, tensor: Tensor) -> None:
        """Count the storage of ``tensor`` as long as it is alive."""
        storage = tensor.untyped_storage()
        identity, nbytes = storage_identity(storage), storage.nbytes()
        ref, before = self._alive.get(identity) or (weakref.ref(storage, self._died(identity)), 0)
        if before == _LEFT_OUT:
            return
        self._alive[identity] = ref, nbytes  # its size may have changed
        self.nbytes += nbytes - before
        self.most_bytes = max(self.most_bytes, self.nbytes)

    def leave_out(self, tensor: Tensor) -> None:
        """Stop counting the storage of ``tensor``."""
        storage = tensor.untyped_storage()
        identity = storage_identity(storage)
        ref, before = self._alive.get(identity) or (weakref.ref(storage, self._died(identity)), 0)
        self._alive[identity] = ref, _LEFT_OUT
        self.nbytes -= max(0, before)

    def _died(self, identity: int) -> Callable[[Any], None]:
        def forget(_: Any) -> None:
            known = self._alive.pop(identity, None)
            if known is not None:
                self.nbytes -= max(0, known[1])

        return forget


_LEFT_OUT = -1
_NO_GUARD = ("cpu", "meta")
# Modules between the code that reads a value and the mode.
_BETWEEN = ("torch._tensor", "torch._compile", "torch._dynamo", "torch.utils._python_dispatch")


def _one_of(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1 + 0j if dtype.is_complex else 1


def _caller() -> str:
    """Return the line that reads a value, as ``"train.py:12"``; ``""`` if PyTorch itself reads it."""
    frame: Any = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back
    name = frame.f_globals.get("__name__", "")
    file = os.path.basename(frame.f_code.co_filename)
    return "" if name.partition(".")[0] == "torch" else f"{file}:{frame.f_lineno}"
