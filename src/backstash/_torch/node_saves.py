"""Describe what a node saved, without unpacking it.

The description is read from attributes of the node's type in torch 2.11 to 2.15: ``_raw_saved_<name>``,
autograd's own record of a saved tensor, and ``_saved_<name>``, its value. A node without them is not
described.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph as stock

__all__ = ["RECOMPUTED", "SavedValue", "look", "packed_of", "raws_of", "saved"]

_PREFIX = "_raw_saved_"
_VALUE_PREFIX = "_saved_"
_FREED = "freed"
_IN_PLACE = "in place"
RECOMPUTED = "recomputed"
"""The ``where`` of a tensor that ``torch.utils.checkpoint`` will recompute."""
_names: dict[type, tuple[str, ...]] = {}  # of torch's own node types, which are never freed


@dataclass(frozen=True, slots=True)
class SavedValue:
    """One tensor that a node saved for its backward."""

    name: str
    """The operation's name for the tensor: ``"self"``, ``"result"``, ``"tensors[0]"``."""
    shape: tuple[int, ...] | None
    """Its sizes; ``None`` if the packed object does not show them."""
    dtype: torch.dtype | None
    """Its element type; ``None`` if unknown."""
    device: torch.device | None
    """The device it is unpacked to; ``None`` if unknown."""
    nbytes: int | None
    """The bytes of its elements; ``None`` if unknown."""
    where: str
    """``"in place"``; a stash's ``"keep"``, ``"packed"``, ``"host"`` or ``"disk"``; ``"recomputed"`` if a
    stash or ``torch.utils.checkpoint`` freed it and will recompute it; ``"hooks"`` if only its hooks can read
    the packed object; ``"freed"`` after a backward without ``retain_graph``.
    """


def saved(node: stock.Node) -> tuple[SavedValue, ...]:
    """Describe what ``node`` saved, in the node's own order. Nothing is unpacked and no hook is called.

    Args:
        node: a tensor's ``grad_fn``, or a node from :func:`iter_graph`.

    Returns:
        A record for each saved tensor. Empty if the node saved none, or if this torch does not expose the
        packed objects.

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
            found += kept or several  # among others, an empty slot is a saved None
        elif raw is not None and _is_of(raw, lambda name=name: getattr(node, _VALUE_PREFIX + name)):  # type: ignore[misc]
            found.append(_describe(name, raw))
    return tuple(found)


def packed_of(node: stock.Node) -> Iterator[tuple[str, Any]]:
    """Yield each object that ``node`` holds for a saved tensor, with the operation's name for it."""
    for name, raw in raws_of(node):
        try:
            packed = raw.data
        except (AttributeError, RuntimeError):
            continue
        yield name, packed


def raws_of(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield autograd's own record of each tensor that ``node`` saved, with the operation's name for it."""
    for name, raw in _raw(node):
        if isinstance(raw, (tuple, list)):
            yield from ((f"{name}[{at}]", each) for at, each in enumerate(raw))
        else:
            yield name, raw


def _raw(node: Any) -> Iterator[tuple[str, Any]]:
    for attribute in _attributes(type(node), node):
        yield attribute.removeprefix(_PREFIX), _read(node, attribute)


def _attributes(kind: type, node: Any) -> tuple[str, ...]:
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return (f"{_PREFIX}tensors",)
    if kind not in _names:
        _names[kind] = tuple(name for name in dir(node) if name.startswith(_PREFIX))
    return _names[kind]


def _read(node: Any, attribute: str) -> Any:
    try:
        return getattr(node, attribute, None)
    except RuntimeError:  # a list raises this after it was freed
        return None


def _is_of(raw: Any, value: Callable[[], Any] | None = None) -> bool:
    """Return whether there is or was a tensor: an operation may find that it need not save one.

    Without hooks and data, ``unpack`` (or ``value``, for torch 2.11, which has no ``unpack``) returns nothing
    or raises because the tensor was freed.
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
    """Return an object with the tensor's shape, dtype and device (or ``None``), and where its bytes are.

    Nothing is unpacked. The library's own packed objects have an attribute ``packed_inside``: a tensor,
    another packed object, or ``None`` if freed. If they have a ``shape`` of their own, it overrides that of
    the object inside.

    Args:
        packed: the result of a pack hook.
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
        return look(packed[0])  # a tensor that a stash kept in place, and its version
    if type(packed).__module__ == "torch.utils.checkpoint":
        return None, RECOMPUTED
    return None, "hooks"
