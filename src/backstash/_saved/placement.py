"""Where a block's bytes are: in place, on their way down, below, nowhere, since others give them, or lost.

A block has one *placement* and changes it by one assignment, so an interrupt finds either the old one or the
new one. All counts and queues follow from the placements of the blocks that are alive.

Below, the bytes are in a *backing*: a slot of a store, a buffer of host memory, or part of a segment. They
come back by a *load*. Both are abstract here, since a block must name them; the tiers have the concrete ones.
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
    """A copy to an accelerator that may not have ended."""

    def order(self) -> None:
        """Let what the current stream does from now on come after it."""


class Load(ABC):
    """A backing's bytes on their way back to memory."""

    __slots__ = ()

    memory: Tensor
    """What they are read to, as bytes; to be looked at once :meth:`exception` has answered ``None``."""
    arrival: Arrival | None
    """The copy that each user of the memory has to be ordered after, on an accelerator."""

    @property
    @abstractmethod
    def work(self) -> Work | None:
        """The read that a worker makes, or the thread that waits; ``None`` where the device does all of it."""

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether the memory may be used at once."""

    @abstractmethod
    def exception(self) -> BaseException | None:
        """Wait for the end; the error, if there was one. May raise ``torch.OutOfMemoryError``."""


class Backing(ABC):
    """The place of one or several blocks' bytes below, and the memory they were read back to, while needed."""

    __slots__ = ("__weakref__", "ahead", "blocks", "load", "nbytes", "skew", "wanted")

    cleanup: Cleanup
    """What it leaves when it dies."""
    nbytes: int
    """The bytes of all its blocks."""
    skew: int
    """How many bytes of a load's memory come before its first one."""
    load: Load | None
    """While what was read is wanted."""
    ahead: bool
    """Whether the load was begun before any block was needed."""
    blocks: int
    """How many blocks it carries."""
    wanted: int
    """How many of them have not come for what was read."""

    buffer: Tensor | None = None
    """The bytes in memory, where the backing has them beside its slot."""
    is_shared = False
    """Whether it carries several blocks."""

    @property
    @abstractmethod
    def tier(self) -> str:
        """The tier that has the bytes: ``"host"`` or ``"disk"``."""

    @abstractmethod
    def storage_for(
        self, offset: int, address: int, nbytes: int, memory: Tensor
    ) -> tuple[Tensor, int]:
        """A storage for all views of one block, from ``memory`` as it was read; and where the block begins.

        Args:
            offset: of the block's first byte in this backing.
            address: the block had when it was saved.
            nbytes: of the block.
            memory: of a load, or ``buffer``.
        """

    @abstractmethod
    def read_separately(
        self, offset: int, address: int, nbytes: int, device: torch.device
    ) -> tuple[Tensor, int]:
        """A storage with one block's bytes, and where they begin, made by the caller alone: nothing that is
        shared is waited for or changed. ``device`` is the block's; the rest as for :meth:`storage_for`.

        Raises ``StashIOError`` where the store cannot give them.
        """

    def cut(self, offset: int, address: int, nbytes: int, memory: Tensor) -> tuple[Tensor, int]:
        """As :meth:`storage_for`, which also counts that the block has come."""
        return memory, self.skew

    def free(self) -> None:
        """Drop the memory that was read back; the bytes below stay."""
        self.load = None
        self.ahead = False


class Placement:
    """Where a block is. Abstract: one of the classes below."""

    __slots__ = ()

    alias: Tensor | None = None
    """The tensor's own memory, while the block owns it."""
    backing: Backing | None = None
    """The place below, once its write has begun."""
    transfer: Transfer | None = None
    """The write, until it has completed."""
    is_kept = False
    """Whether it is in place, and not on its way down."""
    is_unordered = False
    """Whether its memory was let go while the copy of it still ran."""
    lost_at: int | None = None
    """The version that was found in place of the saved one."""
    derivation: Derivation | None = None
    """How the bytes are made, where they are not held."""


class Resident(Placement):
    """In place: the block owns an alias of the tensor's memory."""

    __slots__ = ("alias",)
    is_kept = True

    def __init__(self, alias: Tensor) -> None:
        self.alias: Tensor | None = alias


class Writing(Placement):
    """On its way down: still in place, while ``transfer`` copies the bytes to the backing."""

    __slots__ = ("alias", "backing", "transfer")

    def __init__(self, alias: Tensor | None, backing: Backing, transfer: Transfer) -> None:
        self.alias = alias
        self.backing: Backing | None = backing
        self.transfer: Transfer | None = transfer


class Stored(Placement):
    """Below: only the backing has the bytes."""

    __slots__ = ("backing", "is_unordered")

    def __init__(self, backing: Backing | None, *, is_unordered: bool = False) -> None:
        self.backing = backing
        self.is_unordered = is_unordered


class NotAtHandError(Exception):
    """What a block is made from is not in memory, or may go from there."""


class Derivation(ABC):
    """How bytes that are not held are made from others that are: from a smaller payload, or from operands."""

    __slots__ = ()

    where: str
    """What is said of such a block: ``"packed"`` or ``"recomputed"``."""
    dtype: torch.dtype
    """In which the whole storage is made."""
    fingerprint: Any
    """Of the bytes, where those that are made must be compared with them; else ``None``."""
    threads: int | None
    """How many threads PyTorch's operations must have; ``None``: any number gives the same bits."""

    @property
    @abstractmethod
    def entries(self) -> tuple[Any, ...]:
        """Of other blocks, which the bytes are made from."""

    @abstractmethod
    def given(self, unpack: Callable[[Any], Tensor]) -> Any:
        """What the bytes are made from; ``unpack`` gives the tensor of an entry."""

    @abstractmethod
    def given_ahead(self, unpack: Callable[[Any], Tensor]) -> Any:
        """As :meth:`given`, for another thread to use while the program goes on; raises
        :class:`NotAtHandError` where it cannot be had so."""

    def whole(self, given: Any, address: int) -> Tensor | None:
        """The bytes, in memory of their own that is aligned as ``address`` is, from what :meth:`given`
        returned. ``None``: they are to be made by :meth:`make`."""
        return None

    @abstractmethod
    def make(self, given: Any, out: Tensor) -> None:
        """Fill ``out``, which has ``dtype`` and one dimension, from what :meth:`given` returned."""


class Derived(Placement):
    """Not held: the bytes are made from others when they are needed."""

    __slots__ = ("derivation",)

    def __init__(self, derivation: Derivation) -> None:
        self.derivation: Derivation | None = derivation


class Lost(Placement):
    """Modified in place before a whole copy was known to exist: backward raises if it asks for the block."""

    __slots__ = ("lost_at",)

    def __init__(self, lost_at: int) -> None:
        self.lost_at: int | None = lost_at
