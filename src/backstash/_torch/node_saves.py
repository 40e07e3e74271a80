"""What a node saved, described without bringing it back.

Read from the attributes that torch 2.11 to 2.15 give to a node's type: ``_raw_saved_<name>``, autograd's own
record of a saved tensor, and ``_saved_<name>``, its value. Of a node without them nothing is described.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph as stock

__all__ = ["RECOMPUTED", "SavedValue", "look", "packed_of", "raw_of", "saved"]

_PREFIX = "_raw_saved_"
_VALUE_PREFIX = "_saved_"
_FREED = "freed"
_IN_PLACE = "in place"
RECOMPUTED = "recomputed"
"""Where a tensor is that ``torch.utils.checkpoint`` will compute again."""
_names: dict[type, tuple[str, ...]] = {}  # of torch's own node types, which live for ever


@dataclass(frozen=True, slots=True)
class SavedValue:
    """One tensor that a node saved for its backward."""

    name: str
    """The operation's name for it: ``"self"``, ``"result"``, ``"tensors[0]"``."""
    shape: tuple[int, ...] | None
    """Its sizes; ``None`` where what the hooks packed does not tell."""
    dtype: torch.dtype | None
    """Its element type, or ``None`` likewise."""
    device: torch.device | None
    """The device it is unpacked to, or ``None`` likewise."""
    nbytes: int | None
    """The bytes of its elements, or ``None`` likewise."""
    where: str
    """``"in place"``; a stash's ``"keep"``, ``"packed"``, ``"host"`` or ``"disk"``; ``"recomputed"`` for what
    a stash or ``torch.utils.checkpoint`` dropped and will compute again; ``"hooks"`` for an object that only
    its hooks can read; ``"freed"`` after a backward without ``retain_graph``."""


def saved(node: stock.Node) -> tuple[SavedValue, ...]:
    """Describe what ``node`` saved, in its own order. Nothing is unpacked and no hook is called.

    Args:
        node: a tensor's ``grad_fn``, or a node from :func:`iter_graph`.

    Returns:
        A record for each saved tensor; empty for a node that saved none, and where this torch does not
        show what is packed.

    >>> x = torch.ones(2, 3, requires_grad=True)
    >>> (found,) = saved(x.exp().grad_fn)
    >>> found.name, found.shape, found.nbytes, found.where
    ('result', (2, 3), 24, 'in place')
    """
    found: list[SavedValue] = []
    for name, raw in _raw(node):
        if isinstance(raw, (tuple, list)):
            several = [
                _describe(f"{name}[{i}]", each) for i, each in enumerate(raw) if _is_of(each)
            ]
            kept = [each for each in several if each.where != _FREED]
            found += kept or several  # beside others, an empty place is a saved None
        elif raw is not None and _is_of(raw, lambda name=name: getattr(node, _VALUE_PREFIX + name)):  # type: ignore[misc]
            found.append(_describe(name, raw))
    return tuple(found)


def packed_of(node: stock.Node) -> Iterator[tuple[str, Any]]:
    """The objects that ``node`` holds for saved tensors, each with the operation's name for it."""
    for name, raw in _raw(node):
        is_several = isinstance(raw, (tuple, list))
        for at, each in enumerate(raw if is_several else (raw,)):
            try:
                packed = each.data
            except (AttributeError, RuntimeError):
                continue
            yield f"{name}[{at}]" if is_several else name, packed


def _raw(node: Any) -> Iterator[tuple[str, Any]]:
    for attribute in _attributes(type(node), node):
        yield attribute.removeprefix(_PREFIX), _read(node, attribute)


def _attributes(kind: type, node: Any) -> tuple[str, ...]:
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return (f"{_PREFIX}tensors",)
    if kind not in _names:
        _names[kind] = tuple(name for name in dir(node) if name.startswith(_PREFIX))
    return _names[kind]


def raw_of(node: Any, name: str) -> Any:
    """autograd's own record of the saved tensor ``name``, or a list of them; ``None``: freed or unknown."""
    return _read(node, _PREFIX + name)


def _read(node: Any, attribute: str) -> Any:
    try:
        return getattr(node, attribute, None)
    except RuntimeError:  # lists say by an error that they were freed
        return None


def _is_of(raw: Any, value: Callable[[], Any] | None = None) -> bool:
    """Whether there is, or was, a tensor: operations leave out what they turn out not to need.

    Without hooks and data, ``unpack`` (or ``value``, where this torch has no ``unpack``, as 2.11) finds
    nothing, or that it was freed.
    """
    try:
        if raw.data is not None or getattr(raw, "unpack_hook", None) is not None:
            return True
        unpack = getattr(raw, "unpack", value)
        return unpack is None or unpack() is not None
    except (AttributeError, RuntimeError):
        return True


def _describe(name: str, raw: Any) -> SavedValue:
    try:
        packed = raw.data
    except (AttributeError, RuntimeError):
        return SavedValue(name, None, None, None, None, "hooks")
    if packed is None:  # a hook may have packed None
        where = "hooks" if getattr(raw, "unpack_hook", None) is not None else _FREED
        return SavedValue(name, None, None, None, None, where)
    described, where = look(packed)
    if described is None:
        return SavedValue(name, None, None, None, None, where)
    try:
        shape, dtype = tuple(described.shape), described.dtype
    except RuntimeError:  # a nested tensor of the strided layout has no sizes
        return SavedValue(name, None, described.dtype, described.device, None, where)
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    return SavedValue(name, shape, dtype, described.device, nbytes, where)


def look(packed: Any) -> tuple[Any, str]:
    """Something with the tensor's shape, dtype and device (or ``None``), and where its bytes are.

    Nothing is unpacked. Objects of ours that autograd holds say by an attribute ``packed_inside`` where to
    look on: at a tensor, at another packed object, or ``None`` for what is freed. Their own ``shape``, where
    they have one, counts more than that of what is inside.

    Args:
        packed: what a pack hook returned.
    """
    if isinstance(packed, Tensor):
        return packed, _IN_PLACE
    if hasattr(packed, "packed_inside"):
        inside = packed.packed_inside
        if inside is None:
            return None, _FREED
        inner, where = look(inside)
        return (packed if getattr(packed, "shape", None) is not None else inner), where
    if hasattr(packed, "where") and hasattr(packed, "shape"):
        return packed, str(packed.where)
    if isinstance(packed, tuple) and [type(each) for each in packed[1:2]] == [int]:
        return look(packed[0])  # what a stash left in place, and its version
    if type(packed).__module__ == "torch.utils.checkpoint":
        return None, RECOMPUTED
    return None, "hooks"
