"""Blocks: which storage is which, at which version, and where its bytes are.

A *source* is one storage at one version. It owns a weak reference to the storage, which keeps the
storage's identity (not its bytes) from being handed out again while the source is alive: so a table keyed
by that identity cannot confuse two storages. It also has a *guard*: a tensor without memory that shares
the saved tensor's version counter, so that a change in place can be seen after the memory is gone.

A *block* is what moves: a source's whole storage, or a copy of a small part of it. It starts in place,
holding an alias of the memory; on its way down it still holds it; once it has landed only the parcel below
has the bytes.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._remains import BlockRemains, at_death

if TYPE_CHECKING:
    from ._lanes import Lane
    from ._order import Round
    from ._parts import Part
    from ._sides import Side
    from ._streams import Copy

__all__ = [
    "Block",
    "Source",
    "extent_bytes",
    "raw_alias",
    "reason_to_stay",
    "same_counter",
]

_call = operator.methodcaller("__call__")
_NOTHING = torch.empty(0, device="cpu")
_free_weak_ref: Any = torch.UntypedStorage._free_weak_ref
_set_versions: Any = getattr(torch._C._autograd, "_unsafe_set_version_counter", None)


def same_counter(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of equal version share one version counter (a view or ``detach``; not ``.data``).

    Sharing cannot be asked of torch, so it is tried: the first one's counter is raised for a moment and
    put back. Where torch lacks the call the answer is no, which costs a copy and never a wrong value.
    """
    if _set_versions is None:
        return False
    version = one._version
    # One call of C code after another, without a bytecode between them at which Python could go on with
    # another thread: that one would see a change in place that there was not.
    steps = (
        functools.partial(_set_versions, (one,), (version + 1,)),
        functools.partial(getattr, other, "_version"),
        functools.partial(_set_versions, (one,), (version,)),
    )
    _, raised, _ = map(_call, steps)
    return bool(raised == version + 1)


class Source:
    """One storage at one version; its blocks own it."""

    __slots__ = (
        "__del__",
        "__weakref__",
        "block",
        "cdata",
        "copied_bytes",
        "guard",
        "owner",
        "slices",
        "version",
    )
    __del__: Callable[[], None]

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        # What StorageWeakRef does, whose own __del__ is Python: see _remains.
        self.__del__ = functools.partial(_free_weak_ref, storage._weak_ref())
        self.cdata = storage._cdata
        self.version = tensor._version
        self.owner = weakref.ref(_owner_of(tensor))
        self.guard = tensor.detach()
        try:
            self.guard.data = _NOTHING  # drops the memory, keeps the counter
        except RuntimeError:  # an accelerator from outside PyTorch takes only what is of its kind
            self.guard.data = _nothing_like(tensor)
        self.block: weakref.ref[Block] | None = None  # of the whole storage
        self.slices: dict[object, weakref.ref[Block]] | None = None  # copies of parts, by Part.key
        self.copied_bytes = 0  # of small parts so far

    @property
    def changed(self) -> bool:
        """Whether the storage was modified in place since it was saved, as far as autograd can know."""
        return self.guard._version != self.version

    def is_of(self, tensor: Tensor) -> bool:
        """Whether ``tensor``, which has this storage, has the very bytes that were saved."""
        if not tensor._version == self.version == self.guard._version:
            return False
        # A view and its base share their counter: mostly nothing has to be tried.
        return self.owner() is _owner_of(tensor) or same_counter(self.guard, tensor)


class Block:
    """The bytes of one storage, wherever they are now. Every entry that needs them owns it."""

    __slots__ = (
        "__del__",
        "__weakref__",
        "address",
        "alias",
        "arrival",
        "entries",
        "goes_on",
        "index",
        "lane",
        "lost",
        "nbytes",
        "offset",
        "origin",
        "parcel",
        "remains",
        "root",
        "root_low",
        "root_version",
        "round",
        "saved_parts",
        "served",
        "side",
        "source",
        "stream",
        "turn",
        "unsure",
    )
    __del__: Callable[[], None]

    def __init__(self, source: Source, alias: Tensor, side: Side) -> None:
        storage = alias.untyped_storage()
        self.nbytes = storage.nbytes()
        # What the budgets count for it, and what events call it.
        self.remains = BlockRemains(side.grave, side.number, self.nbytes)
        self.__del__ = at_death(side.grave, self.remains)
        self.source = source
        self.origin = source  # whose bytes these are: differs for a copy of a part
        self.alias: Tensor | None = alias  # in place or on its way down; None once it has landed
        self.address = storage.data_ptr()  # while in place; its residue matters ever after
        self.side = side  # whose budgets count it
        self.stream = side.stream()  # that its bytes were made on, on an accelerator
        self.lost = ""  # why its bytes cannot be known, once they cannot
        self.lane: Lane
        self.round: Round
        self.index = 0  # in its round
        self.parcel: Any = None  # what carries it below: a Parcel or a HostParcel
        # What its entries need, as far as that had to be asked; None: all of it.
        self.saved_parts: list[Part] | None = None
        self.goes_on = False  # whether it is to go to disk whatever room the host has
        self.unsure = False  # whether it landed while its copy still ran
        self.arrival: Copy | None = None  # of root, on an accelerator
        self.offset = 0  # of its first byte in the parcel
        self.entries = 0  # how many saves it stands for
        # One read serves every entry once: a turn. Then the memory is let go.
        self.turn = 0
        self.served = 0
        self.root: Tensor | None = None  # bytes read back, as one storage for all views
        self.root_low = 0  # where in root the block's first byte is
        self.root_version = 0

    @property
    def facts(self) -> tuple[int, int, str]:
        """What events say of it: its bytes, its number, and the module that saved it."""
        return self.nbytes, self.remains.serial, self.remains.module

    def serves(self, part: Part) -> bool:
        """Whether its bytes are right for ``part`` too, where nobody knows what else is written.

        While it is in place they are, and stay so. Once it has left, only what had been saved by then is.
        """
        if self.saved_parts is None:
            return True
        for saved in self.saved_parts:
            if saved.covers(part):
                return True
        if self.parcel is not None or self.alias is None:
            return False
        self.saved_parts.append(part)
        return True

    def let_go(self) -> None:
        """Drop the storage that was read back; the parcel still has the bytes."""
        self.root = self.arrival = None

    @property
    def has_moved(self) -> bool:
        """Whether its storage was resized, and so has other memory: that raises no version."""
        alias = self.alias
        return alias is not None and alias.untyped_storage().data_ptr() != self.address

    @property
    def where(self) -> str:
        """The tier that has the bytes: ``"keep"`` until they have landed on ``"disk"``."""
        return "keep" if self.alias is not None or self.parcel is None else self.parcel.tier


def _nothing_like(tensor: Tensor) -> Tensor:
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    empty = torch._neg_view(empty) if tensor.is_neg() else empty
    return empty.conj() if tensor.is_conj() else empty


def _owner_of(tensor: Tensor) -> Tensor:
    base = tensor._base
    return tensor if base is None else base


def raw_alias(tensor: Tensor) -> Tensor:
    """``tensor``'s memory and version counter, without its graph and its conj and neg bits."""
    alias = tensor.detach()
    if alias.is_conj():
        alias = alias.conj()
    return torch._neg_view(alias) if alias.is_neg() else alias


def extent_bytes(tensor: Tensor) -> tuple[int, int]:
    """The first byte of the storage that ``tensor`` needs, and one past the last."""
    itemsize = tensor.element_size()
    low = int(tensor.storage_offset()) * itemsize
    if tensor.is_contiguous():
        return low, low + tensor.nbytes
    last = sum(  # strides are never negative
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return low, low + int(last + 1) * itemsize


def reason_to_stay(tensor: Tensor) -> str:
    """Why a plain ``torch.Tensor``'s bytes cannot be moved and rebuilt exactly; ``""`` when they can."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "a functorch transform's tensor"
    if tensor.layout is not torch.strided:
        return f"layout {str(tensor.layout).removeprefix('torch.')}"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return "a quantized tensor"
    if any(getattr(tensor, "names", ())):  # torch 2.13 has none any more
        return "a named tensor"
    if tensor._is_zerotensor():
        return "a tensor of zeros without memory"
    storage = tensor.untyped_storage()
    if tensor.numel() == 0 or storage.data_ptr() == 0:
        return "no bytes"
    if extent_bytes(tensor)[1] > storage.nbytes():
        return "its storage is smaller than the view"
    if storage.data_ptr() % 16:
        return "its memory is not aligned"
    return ""
