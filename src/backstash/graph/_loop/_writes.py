"""What a step writes to memory that it did not make: undone after a replay.

A step that is run again does again whatever it does besides computing its state: statistics, ``.grad`` of a
backward inside it, a counter in a tensor. Operations below autograd are seen by a dispatch mode, with the
arguments that they write; what memory held before is kept, and put back when the replay ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..._torch.dispatch import SilentMode, with_lazy_bits
from ..._torch.engine import current_node
from ..._torch.mode_bits import ModeBits
from ..._torch.schemas import STATISTICS, operation_of
from ..._torch.storages import keep_identity, storage_identity, storage_of
from ..._torch.tensors import is_wrapper_subclass

__all__ = ["Writes", "writes_undone"]


class Writes(SilentMode):
    """While it is entered, what is written to memory from outside is noted.

    Args:
        leaves: whose gradients are put back, too, whatever becomes of them.
    """

    def __init__(self, leaves: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own: dict[int, object] = {}  # by a storage's identity: what keeps that from another
        self._written: list[
            tuple[Tensor, Tensor, int]
        ] = []  # with what they held, and their versions
        self._seen: set[Any] = set()  # what is in these
        self._bits = ModeBits()
        # A step may drop a gradient before it accumulates another: see `accumulated`.
        self._grads = {id(leaf): (leaf, leaf.grad) for leaf in leaves}
        self._sparse: dict[int, weakref.ref[Tensor]] = {}

    def __bool__(self) -> bool:
        """Whether anything was written."""
        return bool(self._written or self._grads)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See ``TorchDispatchMode``. A subclass is asked first: its operations come here then."""
        if any(is_wrapper_subclass(each) for each in args if isinstance(each, Tensor)):
            return NotImplemented
        kwargs = kwargs or {}
        operation = operation_of(func)
        self._bits.look()
        node: Any = current_node()
        if type(node).__name__ == "AccumulateGrad":
            leaf = node.variable
            self._grads.setdefault(id(leaf), (leaf, leaf.grad))
        if operation.is_view:
            with with_lazy_bits():
                return func(*args, **kwargs)
        places = operation.writes
        if operation.train_at >= 0 and args[operation.train_at]:
            places = (*places, *STATISTICS)
        for place in places:
            given = kwargs.get(place) if isinstance(place, str) else (*args[place:], None)[0]
            for each in given if isinstance(given, (list, tuple)) else (given,):
                if isinstance(each, Tensor):
                    self._note(each)
        with with_lazy_bits():
            result = func(*args, **kwargs)
            result = self._bits.saw(func, args, kwargs, result, depth=2)
        for each in result if isinstance(result, (list, tuple)) else (result,):
            storage = storage_of(each) if isinstance(each, Tensor) else None
            if isinstance(each, Tensor) and storage is None and not any(each is a for a in args):
                self._sparse[id(each)] = weakref.ref(each)
            # What an operation returns for an argument was made by it only if it was not given it.
            if storage is not None and not any(
                _has(given, storage) for given in (*args, *kwargs.values())
            ):
                self._own.setdefault(storage_identity(storage), keep_identity(storage))
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = storage_of(tensor)
        made = self._sparse.get(id(tensor))
        if (storage is None and made is not None and made() is tensor) or (
            storage is not None and storage_identity(storage) in self._own
        ):
            return
        if storage is None:  # a sparse tensor
            if id(tensor) not in self._seen:
                self._seen.add(id(tensor))
                self._written.append((tensor, tensor.detach().clone(), tensor._version))
            return
        place = (
            storage_identity(storage),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        )
        if place not in self._seen:
            self._seen.add(place)
            self._written.append((tensor, tensor.detach().clone(), tensor._version))

    @property
    def accumulated(self) -> list[Tensor]:
        """The leaves that a backward inside has given gradients to."""
        return [leaf for leaf, _ in self._grads.values()]

    def undo(self) -> None:
        """Put back what was there before. A tensor whose version was told of the write is told of this, too."""
        for leaf, grad in self._grads.values():
            leaf.grad = grad
        with torch.no_grad():
            for tensor, before, version in reversed(self._written):
                target = tensor.data if tensor._version == version else tensor
                if target.shape != before.shape:
                    target.resize_(before.shape)
                target.copy_(before)
        self._grads.clear()
        self._written.clear()
        self._seen.clear()


@contextmanager
def writes_undone(leaves: Iterable[Tensor] = ()) -> Iterator[None]:
    """What is written inside to memory from outside is put back at the end, and the gradients of ``leaves``."""
    writes = Writes(leaves)
    try:
        with writes:
            yield
    finally:
        writes.undo()


def _has(given: Any, storage: torch.UntypedStorage) -> bool:
    if isinstance(given, (list, tuple)):
        return any(_has(each, storage) for each in given)
    own = storage_of(given) if isinstance(given, Tensor) else None
    return own is not None and storage_identity(own) == storage_identity(storage)
