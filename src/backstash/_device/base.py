"""What a stash asks of a device: copies that run beside compute, and what orders them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, UntypedStorage

from .._runtime.transfer import Transfer

__all__ = ["Check", "Completion", "Copy", "Device", "MemoryFigures"]


class Completion(ABC):
    """When a copy has ended. It owns no memory, so that it may outlive the copy in a cleanup."""

    __slots__ = ()

    @abstractmethod
    def ended(self) -> bool:
        """Whether the copy has ended."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until it has ended: for threads that compute nothing."""


class Copy(Transfer):
    """A copy that was begun. It owns the device's end of it, and the device does where it dies before it has
    ended; the host's end is its caller's to own until ``completion`` has ended."""

    ends_in_order = True
    error = None

    memory: Tensor
    """What it fills."""
    completion: Completion
    """When it has ended."""

    @abstractmethod
    def order(self) -> None:
        """Let what the current stream does from now on come after it. The host does not wait."""

    def ended(self) -> bool:
        """See :meth:`Transfer.ended`."""
        return self.completion.ended()

    def wait(self) -> None:
        """See :meth:`Transfer.wait`."""
        self.completion.wait()

    def exception(self) -> None:
        """Order the current stream after it; the host does not wait."""
        self.order()

    def cancel(self) -> bool:
        """A copy that has begun is not called back."""
        return False


class Check(ABC):
    """A comparison that the device makes, when it comes to it."""

    __slots__ = ()

    @abstractmethod
    def differs(self) -> bool:
        """What it came to. The host waits for it."""


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """What the allocator of a device counts, in bytes unless it says otherwise."""

    held_bytes: int
    """Of tensors that are alive."""
    peak_bytes: int
    """The most of these since the program last reset that figure."""
    ever_bytes: int
    """Of all tensors so far, those that are gone included."""
    allocations: int
    """How many these were."""


class Device(ABC):
    """What a stash needs of one device."""

    name: str
    """What messages call it."""

    on_time: Callable[[str, Any, Any, int], None] | None = None
    """While it is measured what copies take, told of each copy (``"write"``, ``"read"``) and each wait of a
    computing stream for one (``"stall"``): the kind, points in time before and after it, and its bytes."""

    @abstractmethod
    def stream(self) -> Any:
        """The stream that is current on this thread, to be asked at each save."""

    @abstractmethod
    def used(self, tensor: Tensor) -> Any:
        """Record the current stream on ``tensor``, so that the allocator cannot reuse its memory before this
        operation ran. Returns that stream."""

    @abstractmethod
    def is_capturing(self) -> bool:
        """Whether what runs now is recorded into a graph, so that no event may be asked."""

    @abstractmethod
    def down(self, source: Tensor, target: Tensor, made_on: Any) -> Copy:
        """Begin to copy ``source`` (bytes on the device) to ``target`` (bytes of the host).

        Args:
            made_on: the stream that the source was made on.
        """

    @abstractmethod
    def up(self, source: Tensor, after: Completion | None) -> Copy:
        """Begin to copy the host's bytes to new memory of the device, after the copy that brings them.

        Raises ``torch.OutOfMemoryError``; nothing has begun then.
        """

    def prepare_marks(self) -> None:  # noqa: B027
        """Have ready what :meth:`mark` needs, which takes its time at first."""

    @abstractmethod
    def mark(self, storage: UntypedStorage, made_on: Any) -> Any:
        """What :meth:`compare` wants to know of the bytes that ``storage`` has after what the stream
        ``made_on`` was given; ``None`` where the device has no room or no means."""

    @abstractmethod
    def compare(
        self, mark: Any, storage: UntypedStorage, first: int = 0, nbytes: int = -1
    ) -> Check | None:
        """Begin to compare with ``mark`` what ``nbytes`` of ``storage`` from ``first`` on are for the current
        stream (-1: all); ``None`` where the device has no room or no means. The host does not wait."""

    @abstractmethod
    def compare_marks(self, marks: Sequence[tuple[Any, Any]]) -> Check | None:
        """Begin to compare the two marks of each pair; ``None`` where the device has no room or no means. The
        host does not wait."""

    @abstractmethod
    def pin(self, memory: Tensor) -> str:
        """Lock the host's ``memory`` for fast copies. Returns why that was refused, or ``""``."""

    @abstractmethod
    def pinned(self, nbytes: int) -> Tensor | str:
        """So much memory of the host that is locked already, or why there is none. ``nbytes`` is a power of
        two."""

    @abstractmethod
    def unpin(self, memory: Tensor) -> None:
        """Undo :meth:`pin`, after every copy has ended; where it was refused, only wait."""

    @abstractmethod
    def give_back(self, memory: Tensor) -> None:
        """Let go of what :meth:`pinned` gave, after every copy has ended."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until every copy that was begun has ended."""

    def unfinished_bytes(self) -> int:
        """Bytes of its memory that :meth:`sweep` has yet to let go of."""
        return 0

    def sweep(self) -> None:
        """Let go of the memory of copies that died before they ended, as far as they have ended."""
        return None

    @abstractmethod
    def free_bytes(self) -> int:
        """The device's memory that is free, what the caching allocator keeps included."""

    @abstractmethod
    def memory(self) -> MemoryFigures:
        """What its allocator counts."""

    @abstractmethod
    def time_mark(self) -> Any:
        """The point in time at which the current stream has done what it was given so far."""

    @abstractmethod
    def seconds_between(self, since: Any, until: Any) -> float:
        """What lies between two points in time. The host waits for both."""

    @abstractmethod
    def has_passed(self, mark: Any) -> bool:
        """Whether a point in time has come."""

    @abstractmethod
    def failures(self) -> int:
        """How often there was no memory for what a program asked for, so far."""
