"""``allow_mutation_on_saved_tensors``: saved tensors keep their values while the program changes them.

The context has to see every save and every write. It sees saves by a *guard* around each hook pair, its own
and those of contexts entered inside it (a torch-function mode finds a new pair before the next operation saves
anything). It sees writes by a dispatch mode, which reads from an operator's schema which arguments the operator
writes: ``out=``, lists of tensors and fused operators included.

A pair that is entered inside works as before. Only when a tensor that it packed is about to change does the
guard take a clone, which backward then gets instead: what the pair holds may change with the tensor.

The idea of cloning before a write is from ``torch.autograd.graph``, whose version knows a saved tensor by
its address and version, and so misses writes through a view that begins elsewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._torch.autocast import kernel_of
from .._torch.dispatch import TorchDispatchMode
from .._torch.hook_stack import Pair, current_pair, own_pack, pop_owned, push, replace_current
from .._torch.schemas import operation_of
from ..errors import UsageError
from ._watch import Saved, WatchTable

__all__ = [
    "Guarded",
    "MutationContext",
    "OutsideContextError",
    "allow_mutation_on_saved_tensors",
    "guard_in_place",
    "guard_new_pair",
    "is_guard",
]

# Operations that save their second argument and then fill it: that write makes the saved value.
_FILL_WHAT_THEY_SAVED = ("aten.rrelu_with_noise.default", "aten.rrelu_with_noise_.default")
_local = threading.local()


class OutsideContextError(UsageError, AssertionError):
    """Backward needs a context that has ended. It is an ``AssertionError`` too, as torch's own error is."""


class MutationContext:
    """The state of :func:`allow_mutation_on_saved_tensors`, which it yields; it can be read only."""

    __slots__ = ("_table",)

    def __init__(self) -> None:
        self._table = WatchTable()

    @property
    def cloned(self) -> dict[Saved, Tensor]:
        """The clones that are alive, by the saved tensor they stand for."""
        return self._table.cloned()

    @property
    def tid_to_weakhandle(self) -> dict[object, Saved]:
        """The saved tensors that are alive, under the name that torch has for them."""
        return self._table.alive()


@contextmanager
def allow_mutation_on_saved_tensors() -> Iterator[MutationContext]:
    """A context in which a tensor that was saved for backward may be changed in place, through any alias.

    It clones a saved tensor just before the tensor changes, and backward gets the value that was saved.
    Forward and backward must both run inside. Contexts around or inside it, a stash or any hook pair, work.

    Yields:
        The state; its ``cloned`` has the clones that are alive, and shrinks as graphs are freed.

    Raises:
        RuntimeError: such a context is active on this thread already; that one is not affected.
        AssertionError: from backward, outside the context in which the graph was recorded.
        InplaceError: from backward, after a change that could not be seen: one on another thread, or by code
            that only calls ``increment_version``.

    >>> with allow_mutation_on_saved_tensors() as context:
    ...     x = torch.ones(3, requires_grad=True)
    ...     y = x.clone()
    ...     loss = (y**2).sum()
    ...     _ = y[1:].zero_()  # y was saved
    ...     clones = len(context.cloned)
    ...     loss.backward()
    >>> x.grad, clones, len(context.cloned)
    (tensor([2., 2., 2.]), 1, 0)
    """
    if getattr(_local, "context", None) is not None:
        raise UsageError(
            "allow_mutation_on_saved_tensors contexts cannot be nested: one is active on this thread; "
            "it already covers what is inside"
        )
    context = MutationContext()
    guard = Guard(context, context._table, current_pair())
    push(guard.pack, guard.unpack)
    _local.context = context
    try:
        with _FindNewPairs(context._table), _CloneBeforeWrite(context._table):
            yield context
    finally:
        _local.context = None
        context._table.close()
        pop_owned(context, "allow_mutation_on_saved_tensors()")


def guard_in_place() -> None:
    """Push a guard for tensors that no pair packs, if the context is active on this thread."""
    context = getattr(_local, "context", None)
    if context is not None:
        guard = Guard(context, context._table, None)
        push(guard.pack, guard.unpack)


def guard_new_pair() -> None:
    """Guard a pair that was just pushed, if the context is active on this thread."""
    context = getattr(_local, "context", None)
    if context is not None:
        _guard_current(context._table)


class Guarded:
    """What autograd holds: the record of the saved tensor, and the packed object of the guarded pair."""

    __slots__ = ("packed", "saved")

    def __init__(self, saved: Saved, packed: Any) -> None:
        self.saved = saved
        self.packed = packed

    @property
    def packed_inside(self) -> Any:
        """The tensor that stayed in place, or the packed object, to describe it without unpacking."""
        return self.packed if self.saved.alias is None else self.saved.alias


class Guard:
    """A pair that watches the tensors it saves. An inner pair packs them; without one they stay in place."""

    __slots__ = ("inner", "left", "owner", "table")

    def __init__(self, owner: object, table: WatchTable, inner: Pair | None) -> None:
        self.owner = owner
        self.table = table
        self.inner = inner

    def pack(self, tensor: Tensor) -> Guarded:
        packed = self.inner.pack(tensor) if self.inner is not None else None
        return Guarded(self.table.add(tensor, hold=self.inner is None), packed)

    def unpack(self, guarded: Guarded) -> Tensor:
        saved = guarded.saved
        if self.inner is not None and not saved.cloned:
            return self.inner.unpack(guarded.packed)
        if self.table.closed:
            raise OutsideContextError(
                "Trying to backward outside of the 'allow_mutation_on_saved_tensors' context in which "
                "the graph was originally recorded: run backward inside the with block of its forward"
            )
        return saved.get()


def is_guard(pair: Pair) -> bool:
    """Return whether a pair is a guard, or replaces a pair that is guarded."""
    if hasattr(pair.pack, "takes_its_own"):  # it gives only some of the saves to the pair it wraps
        return hasattr(pair.pack, "guard")
    return isinstance(getattr(own_pack(pair), "__self__", None), Guard) or hasattr(
        pair.pack, "guard"
    )


def _guard_current(table: WatchTable) -> None:
    pair = current_pair()
    if pair is not None and not is_guard(pair):
        guard = Guard(None, table, pair)

        def pack(tensor: Tensor) -> Guarded:
            return guard.pack(tensor)

        stand_in: Any = pack
        stand_in.guard = guard
        stand_in.__wrapped__ = own_pack(pair)
        replace_current(Pair(pack, guard.unpack))


class _FindNewPairs(TorchFunctionMode):
    """Guards each pair that was entered inside the context before an operation saves through it."""

    def __init__(self, table: WatchTable) -> None:
        super().__init__()
        self.table = table

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        _guard_current(self.table)
        return func(*args, **(kwargs or {}))


class _CloneBeforeWrite(TorchDispatchMode):
    """Clones saved tensors before an operator writes them."""

    def __init__(self, table: WatchTable) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.table = table

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _guard_current(self.table)
        operation = operation_of(func)
        if operation.writes or operation.train_at >= 0:
            noise = args[1] if operation.name in _FILL_WHAT_THEY_SAVED else None
            moves_only = torch.Tag.inplace_view in func.tags
            for tensor in operation.written(args, kwargs):
                if tensor is not noise:
                    self.table.before_write(tensor, moves_only=moves_only)
        if operation.writes_inside or operation.may_autocast:
            with kernel_of(operation, args, kwargs):
                return func(*args, **kwargs)
        return func(*args, **kwargs)
