"""Where a block's bytes are: in place, being written, in a lower tier, derived from other blocks, or lost.

A block has one *placement* and changes it by a single assignment, so an interrupt finds either the old one or
the new one. All counts and queues can be rebuilt from the placements of the blocks that are alive.

In a lower tier the bytes are in a *backing*: a slot of a store, a host buffer, or a part of a segment. A
*load* brings them back. Both classes are abstract here, since a block must refer to them; the tiers implement
them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from .._runtime.reclaim import Cleanup
from .._runtime.transfer import Transfer
from .._runtime.workers import Work

__all__ = [
    "Arrival",
    "Backing",
    "Derivation",
    "Derived",
    "Load",
    "Lost",
    "NotAtHandError",
    "Placement",
    "Resident",
    "Stored",
    "Writing",
]


class Arrival(Protocol):
    """A copy to an accelerator that may still run."""

    def order(self) -> None:
        """Make the current stream wait for the copy."""


class Load(ABC):
    """A load of a backing's bytes to memory."""

    __slots__ = ()

    memory: Tensor
    """The destination of the bytes, as bytes. Use it only after :meth:`exception` has returned ``None``."""
    arrival: Arrival | None
    """On an accelerator, the copy that each user of the memory must be ordered after."""

    @property
    @abstractmethod
    def work(self) -> Work | None:
        """The read that a worker does or a thread waits for; ``None`` if the device does all of it."""

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether the memory may be used without waiting."""

    @abstractmethod
    def exception(self) -> BaseException | None:
        """Wait for the end and return the error, if there was one. May raise ``torch.OutOfMemoryError``."""


class Backing(ABC):
    """The place of one or several blocks' bytes in a lower tier, and the memory that they were loaded to."""

    __slots__ = ("__weakref__", "ahead", "blocks", "load", "nbytes", "skew", "wanted")

    cleanup: Cleanup
    """What remains to be cleaned up when it dies."""
    nbytes: int
    """The bytes of all its blocks."""
    skew: int
    """How many bytes precede the first block in a load's memory."""
    load: Load | None
    """The load, while some block still needs it."""
    ahead: bool
    """Whether the load began before any block was needed."""
    blocks: int
    """How many blocks it holds."""
    wanted: int
    """How many of its blocks have not taken their bytes from the load yet."""

    buffer: Tensor | None = None
    """The bytes in memory, if the backing holds them in addition to its slot."""
    is_shared = False
    """Whether it holds several blocks."""

    @property
    @abstractmethod
    def tier(self) -> str:
        """The tier that holds the bytes: ``"host"`` or ``"disk"``."""

    @abstractmethod
    def storage_for(
        self, offset: int, address: int, nbytes: int, memory: Tensor
    ) -> tuple[Tensor, int]:
        """Return a storage for all views of one block, and the offset of the block in it.

        Args:
            offset: the offset of the block's first byte in this backing.
            address: the address that the block had when it was saved.
            nbytes: the size of the block, in bytes.
            memory: the memory of a load, or ``buffer``.
        """

    @abstractmethod
    def read_separately(
        self, offset: int, address: int, nbytes: int, device: torch.device
    ) -> tuple[Tensor, int]:
        """Read one block's bytes in the calling thread, to new memory. Return it and the block's offset in it.

        This changes nothing that is shared and does not wait for it. ``device`` is the block's device; the
        other arguments are those of :meth:`storage_for`. Raises ``StashIOError`` if the store cannot read the
        bytes.
        """

    def free(self) -> None:
        """Free the memory of the load. The bytes in the lower tier stay."""
        self.load = None
        self.ahead = False


class Placement:
    """Where a block is. Abstract: see the classes below."""

    __slots__ = ()

    alias: Tensor | None = None
    """A tensor on the block's original memory, while the block owns it."""
    backing: Backing | None = None
    """The place in a lower tier, once the write to it has begun."""
    transfer: Transfer | None = None
    """The write, until it has completed."""
    is_kept = False
    """Whether it is in place and no write has begun."""
    is_unordered = False
    """Whether its memory was freed while the copy from it was still running."""
    lost_at: int | None = None
    """The version that replaced the saved one."""
    derivation: Derivation | None = None
    """How the bytes are computed, if they are not held."""


class Resident(Placement):
    """In place: the block owns an alias of the tensor's memory."""

    __slots__ = ("alias",)
    is_kept = True

    def __init__(self, alias: Tensor) -> None:
        self.alias: Tensor | None = alias


class Writing(Placement):
    """Being written to a lower tier: still in place, while ``transfer`` copies the bytes to the backing."""

    __slots__ = ("alias", "backing", "transfer")

    def __init__(self, alias: Tensor | None, backing: Backing, transfer: Transfer) -> None:
        self.alias = alias
        self.backing: Backing | None = backing
        self.transfer: Transfer | None = transfer


class Stored(Placement):
    """In a lower tier: only the backing has the bytes."""

    __slots__ = ("backing", "is_unordered")

    def __init__(self, backing: Backing | None, *, is_unordered: bool = False) -> None:
        self.backing = backing
        self.is_unordered = is_unordered


class NotAtHandError(Exception):
    """The inputs of a derived block are not in memory, or may be evicted."""


class Derivation(ABC):
    """How bytes that are not held are computed from other blocks: from a smaller payload, or from operands."""

    __slots__ = ()

    where: str
    """The ``where`` of such a block: ``"packed"`` or ``"recomputed"``."""
    dtype: torch.dtype
    """The dtype in which the whole storage is computed."""
    fingerprint: Any
    """A fingerprint that the computed bytes must match, or ``None``."""
    threads: int | None
    """How many threads PyTorch's operations must use; ``None`` if any number gives the same bits."""

    @property
    @abstractmethod
    def entries(self) -> tuple[Any, ...]:
        """The entries, of other blocks, that the bytes are computed from."""

    @abstractmethod
    def given(self, unpack: Callable[[Any], Tensor]) -> Any:
        """Return the inputs of the computation; ``unpack`` returns the tensor of an entry."""

    @abstractmethod
    def given_ahead(self, unpack: Callable[[Any], Tensor]) -> Any:
        """Like :meth:`given`, for use in another thread while the program continues. Raises
        :class:`NotAtHandError` if the inputs are not available for that."""

    def whole(self, given: Any, address: int) -> Tensor | None:
        """Compute the bytes from the result of :meth:`given`, in new memory aligned as ``address`` is. Return
        ``None`` if :meth:`make` has to compute them."""
        return None

    @abstractmethod
    def make(self, given: Any, out: Tensor) -> None:
        """Fill ``out``, a flat tensor of ``dtype``, from the result of :meth:`given`."""


class Derived(Placement):
    """Not held: the bytes are computed from other blocks when they are needed."""

    __slots__ = ("derivation",)

    def __init__(self, derivation: Derivation) -> None:
        self.derivation: Derivation | None = derivation


class Lost(Placement):
    """Modified in place before a whole copy was known to exist. Backward raises if it needs the block."""

    __slots__ = ("lost_at",)

    def __init__(self, lost_at: int) -> None:
        self.lost_at: int | None = lost_at
