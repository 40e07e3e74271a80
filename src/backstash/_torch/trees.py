"""Tensors inside tuples, lists, dictionaries and other types that are registered with torch as trees.

Torch has no public module for this. All functions exist in torch 2.11 to 2.15; if one is missing, calling it
raises ``UsageError``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .lookup import required

__all__ = ["tree_flatten", "tree_leaves", "tree_map_only", "tree_unflatten"]

tree_flatten: Callable[[Any], tuple[list[Any], Any]] = required(
    "torch.utils._pytree.tree_flatten", "flattens an object with tensors"
)
"""Returns the leaves of a tree, in order, and its structure."""

tree_unflatten: Callable[[Any, Any], Any] = required(
    "torch.utils._pytree.tree_unflatten", "unflattens an object with tensors"
)
"""``tree_unflatten(leaves, structure)`` returns the tree that ``tree_flatten`` took."""

tree_leaves: Callable[[Any], list[Any]] = required(
    "torch.utils._pytree.tree_leaves", "finds the tensors inside an object"
)
"""Returns the leaves of a tree, in order."""

tree_map_only: Callable[[Any, Callable[[Any], Any], Any], Any] = required(
    "torch.utils._pytree.tree_map_only", "replaces the tensors inside an object"
)
"""``tree_map_only(kind, function, tree)`` applies ``function`` to each leaf of ``kind``."""
