"""Stores, which hold bytes: :class:`Disk`, and :class:`Store`, the interface for stores of your own."""

from ._base import Slot, Store
from ._disk import Disk

__all__ = ["Disk", "Slot", "Store"]
