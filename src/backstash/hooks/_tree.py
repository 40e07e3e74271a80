"""Tensors inside what modules take and return: tuples, dicts, dataclasses, and any nesting of them.

``torch.utils._pytree`` is not used: it is private, and it treats a dataclass as a leaf unless its class
was registered. The walk here runs in every hook, so it is kept short.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

__all__ = ["device_of", "dtype_of", "inputs_of", "map_leaves", "shapes_of", "tensors_in"]


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield every tensor in ``value``, in the order in which :func:`map_leaves` visits them."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    for item in _items(value):
        yield from tensors_in(item)


def map_leaves(fn: Callable[[Any], Any], value: Any, *, kind: type = torch.Tensor) -> Any:
    """Return ``value`` with ``fn`` applied to every leaf of class ``kind``.

    A container in which no leaf changes is returned itself, and so is any other object (a cache, a
    string, ``None``). A container that changes is copied, not changed: the copy has the same class and
    extra fields, and ``__init__`` of a dataclass or mapping does not run again.
    """
    if isinstance(value, kind):
        return fn(value)
    old = list(_items(value))
    if not old:
        return value
    new = [map_leaves(fn, item, kind=kind) for item in old]
    return value if all(a is b for a, b in zip(old, new, strict=True)) else _rebuild(value, new)


def _items(value: object) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (tuple, list)):
        yield from value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield getattr(value, field.name, None)


def _rebuild(value: Any, items: list[Any]) -> Any:
    if isinstance(value, Mapping):
        return _rebuild_mapping(value, items)
    if isinstance(value, list):
        new = copy.copy(value)
        new[:] = items
        return new
    if isinstance(value, tuple):
        return _rebuild_tuple(value, items)
    new = copy.copy(value)
    for field, item in zip(dataclasses.fields(value), items, strict=True):
        object.__setattr__(new, field.name, item)
    return new


def _rebuild_tuple(value: tuple[Any, ...], items: list[Any]) -> Any:
    try:
        # A class with a __new__ of its own, such as PackedSequence, may want other arguments.
        new = tuple.__new__(type(value), items)
    except TypeError:  # torch.return_types
        return type(value)(items)
    if hasattr(value, "__dict__"):
        vars(new).update(vars(value))
    return new


def _rebuild_mapping(value: Mapping[Any, Any], items: list[Any]) -> Any:
    pairs = zip(value, items, strict=True)
    if not hasattr(value, "__setitem__"):
        return dict(pairs)
    new: Any = copy.copy(value)
    for key, item in pairs:
        new[key] = item
    return new


_SHOWN = 4


def shapes_of(value: object) -> str:
    """Return the shapes in a value: ``(2, 3)``, ``[(2, 3), (4,)]``, ``{logits: (2, 3)}``; ``-`` for none."""
    if isinstance(value, torch.Tensor):
        return str(tuple(value.shape))
    if isinstance(value, Mapping):
        return _joined("{", [f"{key}: {shapes_of(item)}" for key, item in value.items()], "}")
    if isinstance(value, (tuple, list)):
        return _joined("[", [shapes_of(item) for item in value], "]")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f for f in dataclasses.fields(value) if getattr(value, f.name, None) is not None]
        return _joined("{", [f"{f.name}: {shapes_of(getattr(value, f.name))}" for f in fields], "}")
    return "-" if value is None else type(value).__name__


def inputs_of(args: tuple[object, ...], kwargs: Mapping[str, object]) -> str:
    """Return the shapes of a call's inputs: ``(2, 3), mask=(2,)``."""
    items = [shapes_of(item) for item in args]
    return _joined("", items + [f"{name}={shapes_of(item)}" for name, item in kwargs.items()], "")


def _joined(start: str, items: list[str], end: str) -> str:
    more = [f"… {len(items)} in all"] if len(items) > _SHOWN else []
    return start + ", ".join(items[:_SHOWN] + more) + end


def dtype_of(value: object) -> str:
    """Return the dtype of the first tensor in a value, without ``torch.``."""
    tensor = next(tensors_in(value), None)
    return "-" if tensor is None else str(tensor.dtype).removeprefix("torch.")


def device_of(value: object) -> str:
    """Return the device of the first tensor in a value."""
    tensor = next(tensors_in(value), None)
    return "-" if tensor is None else str(tensor.device)
