"""Read the tensors that one node holds: saved ones, and those that a Function keeps on ``ctx``.

Only attributes are read. Nothing is unpacked, and no hook is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._torch.checkpoints import frame_behind, notes_of
from ..._torch.node_saves import RECOMPUTED, SavedValue, look, raws_of, saved
from ..._torch.storages import storage_identity

__all__ = ["HeldTensor", "Reader", "sizes_of", "storage_of"]

_MOST_WRAPPERS = 8


@dataclass(slots=True)
class HeldTensor:
    """One tensor that a node holds."""

    name: str
    shape: tuple[str, ...] | None
    dtype: str
    nbytes: int | None
    where: str
    storage: tuple[object, int] | None
    """(an identity that tensors in the same memory share, the bytes of that memory); ``None`` if unknown."""


class Reader:
    """Read nodes one by one, and cache what many of them share."""

    def __init__(self) -> None:
        self._recomputed: dict[int, dict[int, Any]] = {}

    def read(self, node: Any) -> list[HeldTensor]:
        """Return the tensors that ``node`` holds, in the node's own order."""
        records = dict(raws_of(node))
        found = [self._describe(value, records.get(value.name)) for value in saved(node)]
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            found += _on_ctx(node)
        return found

    def _describe(self, value: SavedValue, raw: Any) -> HeldTensor:
        packed = _quietly(raw, "data")
        shape, dtype, nbytes = value.shape, value.dtype, value.nbytes
        if isinstance(getattr(packed, "parts", None), dict) and hasattr(packed, "kind"):
            return _in_parts(value.name, packed)
        if value.where == RECOMPUTED:
            known = self._metadata(raw, packed)
            if known is not None:
                shape, dtype = known.get("shape"), known.get("dtype")
                nbytes = _bytes(shape, dtype)
        name = str(dtype).removeprefix("torch.") if dtype is not None else ""
        plain = nbytes if isinstance(nbytes, int) else None
        return HeldTensor(
            value.name, _strings(shape), name, plain, value.where, _storage_below(packed)
        )

    def _metadata(self, raw: Any, holder: Any) -> dict[str, Any] | None:
        """Return what ``torch.utils.checkpoint`` recorded about a tensor that it did not keep."""
        hook = _quietly(raw, "unpack_hook")
        frame = frame_behind(hook)
        if frame is None:
            return None
        if id(frame) not in self._recomputed:
            self._recomputed[id(frame)] = notes_of(frame)
        found = self._recomputed[id(frame)].get(id(holder))
        return found if isinstance(found, dict) else None


def _quietly(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name, None)
    except RuntimeError:  # freed
        return None


def _on_ctx(node: Any) -> list[HeldTensor]:
    """Return tensors that a Function set as attributes of its ``ctx``, which no hook sees."""
    found = []
    for key, value in list(vars(node).items()):
        several = value if isinstance(value, (list, tuple)) else (value,)
        for index, each in enumerate(several):
            if isinstance(each, Tensor):
                name = f"ctx.{key}" if several is not value else f"ctx.{key}[{index}]"
                shape, dtype = sizes_of(each), str(each.dtype).removeprefix("torch.")
                nbytes = _bytes(_quietly(each, "shape"), each.dtype)
                found.append(HeldTensor(name, shape, dtype, nbytes, "in place", storage_of(each)))
    return found


def _in_parts(name: str, packed: Any) -> HeldTensor:
    """Describe a subclass that was split into parts: its own sizes, and the bytes and places of its parts."""
    looks = [look(part) for part in packed.parts.values()]
    nbytes = [
        _bytes(getattr(each, "shape", None), each.dtype) for each, _ in looks if each is not None
    ]
    known = sum(each for each in nbytes if each is not None) if None not in nbytes else None
    where = " and ".join(dict.fromkeys(where for _, where in looks)) or "hooks"
    dtype = getattr(packed.kind, "__name__", "")
    return HeldTensor(name, sizes_of(packed), dtype, known, where, None)


def _storage_below(packed: Any) -> tuple[object, int] | None:
    """Return the memory that a packed object stands for, through its wrappers."""
    for _ in range(_MOST_WRAPPERS):
        if isinstance(packed, Tensor):
            return storage_of(packed)
        block = getattr(packed, "block", None)
        if block is not None:
            nbytes = getattr(block, "nbytes", None)
            return (id(block), nbytes) if isinstance(nbytes, int) else None
        if isinstance(packed, tuple) and [type(each) for each in packed[1:2]] == [int]:
            packed = packed[0]  # a tensor that a stash left in place, and its version
        else:
            packed = getattr(packed, "packed_inside", None)
    return None


def storage_of(tensor: Tensor) -> tuple[object, int] | None:
    """Return the identity and the bytes of a tensor's memory; ``None`` if it does not have exactly one
    storage."""
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        return None  # a subclass may return any storage as its own
    try:
        storage = tensor.untyped_storage()
        return storage_identity(storage), storage.nbytes()
    except (NotImplementedError, RuntimeError):
        return None


def sizes_of(tensor: Any) -> tuple[str, ...] | None:
    """Return a tensor's sizes as text; some are symbols (``"j1"``). ``None`` if it has no shape."""
    try:
        return _strings(tensor.shape)
    except (AttributeError, RuntimeError):
        return None


def _strings(shape: Any) -> tuple[str, ...] | None:
    return None if shape is None else tuple(str(size) for size in shape)


def _bytes(shape: Any, dtype: Any) -> int | None:
    if shape is None or dtype is None:
        return None
    nbytes = dtype.itemsize
    for size in shape:
        if not isinstance(size, int):
            return None
        nbytes *= size
    return int(nbytes)
