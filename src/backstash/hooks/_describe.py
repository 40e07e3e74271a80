"""Tensors in a few words."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from ._tree import tensors_in

__all__ = ["device_of", "dtype_of", "inputs_of", "shapes_of"]

_SHOWN = 4


def shapes_of(value: object) -> str:
    """The shapes in a value: ``(2, 3)``, ``[(2, 3), (4,)]``, ``{logits: (2, 3)}``; ``-`` for none."""
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
    """The shapes of a call's inputs: ``(2, 3), mask=(2,)``."""
    items = [shapes_of(item) for item in args]
    return _joined("", items + [f"{name}={shapes_of(item)}" for name, item in kwargs.items()], "")


def _joined(start: str, items: list[str], end: str) -> str:
    more = [f"… {len(items)} in all"] if len(items) > _SHOWN else []
    return start + ", ".join(items[:_SHOWN] + more) + end


def _first(value: object) -> torch.Tensor | None:
    return next(tensors_in(value), None)


def dtype_of(value: object) -> str:
    """The dtype of the first tensor in a value, without ``torch.``."""
    tensor = _first(value)
    return "-" if tensor is None else str(tensor.dtype).removeprefix("torch.")


def device_of(value: object) -> str:
    """The device of the first tensor in a value."""
    tensor = _first(value)
    return "-" if tensor is None else str(tensor.device)
