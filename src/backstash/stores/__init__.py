"""Places that hold bytes: :class:`Disk`, and what a store of one's own has to be, :class:`Store`."""

from ._base import Slot, Store
from ._disk import Disk

__all__ = ["Disk", "Slot", "Store"]
