"""The interface of a device: copies that overlap computation, and their ordering."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, UntypedStorage

from .._runtime.transfer import Transfer

__all__ = ["Check", "Completion", "Copy", "Device", "MemoryFigures"]


class Completion(ABC):
    """The end of a copy. It owns no memory, so a cleanup may keep it after the copy."""

    __slots__ = ()

    @abstractmethod
    def ended(self) -> bool:
        """Return whether the copy has ended."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the copy has ended. For threads that do not compute, after :meth:`begin`."""

    def begin(self) -> None:
        """Begin the copy, if it waits for others. The caller holds the stash's lock."""
        return None


class Copy(Transfer):
    """A copy that has begun, or that waits to begin with others. It owns the device memory of the copy; if it
    dies before the copy has ended, the device takes that memory over. The caller owns the host memory until
    ``completion`` has ended."""

    ends_in_order = True
    error = None

    memory: Tensor
    """The destination."""
    completion: Completion
    """The end of the copy."""

    @abstractmethod
    def order(self) -> None:
        """Make the current stream wait for the copy. The host does not wait."""

    def ended(self) -> bool:
        """See :meth:`Transfer.ended`."""
        return self.completion.ended()

    def wait(self) -> None:
        """See :meth:`Transfer.wait`."""
        self.completion.wait()

    def exception(self) -> None:
        """Make the current stream wait for the copy. The host does not wait."""
        self.order()

    def cancel(self) -> bool:
        """Return ``False``: a copy that has begun cannot be cancelled."""
        return False


class Check(ABC):
    """A comparison that runs on the device."""

    __slots__ = ()

    @abstractmethod
    def differs(self) -> bool:
        """Return the result. The host waits for it."""


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """The counts of a device's allocator."""

    held_bytes: int
    """Bytes of living tensors."""
    peak_bytes: int
    """The peak of ``held_bytes`` since the program last reset it."""
    ever_bytes: int
    """Bytes of all allocations so far, including freed ones."""
    allocations: int
    """The number of all allocations so far."""


class Device(ABC):
    """The operations that a stash needs from one device."""

    name: str
    """The device's name in messages."""

    is_capturing: Callable[[], bool]
    """Returns whether operations are being captured into a graph, so that no event may be queried."""

    on_time: Callable[[str, Any, Any, int], None] | None = None
    """Set while copies are measured. Called for each copy (``"write"``, ``"read"``) and each wait of a
    computing stream for a copy (``"stall"``) with the kind, the points in time before and after, and the
    bytes.
    """

    @abstractmethod
    def stream(self) -> Any:
        """Return the current stream of this thread. Called at each save."""

    @abstractmethod
    def used(self, tensor: Tensor) -> Any:
        """Record the current stream on ``tensor``, so that the allocator does not reuse its memory before this
        operation has run. Returns the stream."""

    @abstractmethod
    def down(self, source: Tensor, target: Tensor, made_on: Any) -> Copy:
        """Begin to copy ``source`` (bytes on the device) to ``target`` (bytes on the host).

        Args:
            made_on: the stream that wrote ``source``.
        """

    @abstractmethod
    def up(self, source: Tensor, after: Completion | None) -> Copy:
        """Begin to copy host bytes to new device memory, after ``after`` has filled them.

        Raises ``torch.OutOfMemoryError``; nothing has begun then.
        """

    @abstractmethod
    def mark(self, storage: UntypedStorage, made_on: Any, first: int = 0, nbytes: int = -1) -> Any:
        """Return a mark of ``nbytes`` of ``storage`` from ``first``, a multiple of 4, on (-1: all), as they are
        once the stream ``made_on`` has done its work so far; ``None`` if the device has no memory for it or
        cannot make one."""

    @abstractmethod
    def compare(
        self, mark: Any, storage: UntypedStorage, first: int = 0, nbytes: int = -1
    ) -> Check | None:
        """Begin to compare ``mark`` with ``nbytes`` of ``storage`` from ``first`` on (-1: all), as the current
        stream sees them. ``None`` if the device has no memory for it or cannot compare. The host does not
        wait.
        """

    @abstractmethod
    def compare_marks(self, marks: Sequence[tuple[Any, Any]]) -> Check | None:
        """Begin to compare the two marks of each pair. ``None`` if the device has no memory for it or cannot
        compare. The host does not wait."""

    def first_difference(self, checks: Sequence[Check]) -> int:
        """Return the index of the first check that found a difference; -1 if none did. The host waits."""
        return next((at for at, check in enumerate(checks) if check.differs()), -1)

    @abstractmethod
    def pin(self, memory: Tensor) -> str:
        """Page-lock the host ``memory`` for fast copies. Return why that was refused, or ``""``."""

    @abstractmethod
    def pinned(self, nbytes: int) -> Tensor | str:
        """Return ``nbytes`` (a power of two) of page-locked host memory, or why there is none."""

    @abstractmethod
    def unpin(self, memory: Tensor) -> None:
        """Undo :meth:`pin` after every copy has ended. If pinning was refused, only wait."""

    @abstractmethod
    def give_back(self, memory: Tensor) -> None:
        """Free the memory that :meth:`pinned` returned, after every copy has ended."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until every copy has ended."""

    def begin(self) -> None:
        """Begin the copies that wait for others. Does nothing while operations are captured into a graph."""
        return None

    def unfinished_bytes(self) -> int:
        """Return how many bytes of device memory :meth:`sweep` has yet to free."""
        return 0

    def sweep(self) -> None:
        """Free the memory of copies that died before they ended, if they have ended now."""
        return None

    @abstractmethod
    def free_bytes(self) -> int:
        """Return the free bytes of the device, including what the caching allocator holds unused."""

    @abstractmethod
    def memory(self) -> MemoryFigures:
        """Return the counts of the device's allocator."""

    @abstractmethod
    def time_mark(self) -> Any:
        """Return the point in time at which the current stream has done its work so far."""

    @abstractmethod
    def seconds_between(self, since: Any, until: Any) -> float:
        """Return the seconds between two points in time. The host waits for both."""

    def keep_busy(self, seconds: float) -> None:  # noqa: B027
        """Give the current stream about this much work, so that what is given to it next waits for the device
        and not for the host: only then do two points in time show what the device needs."""

    @abstractmethod
    def has_passed(self, mark: Any) -> bool:
        """Return whether a point in time has passed."""

    @abstractmethod
    def failures(self) -> int:
        """Return how many allocations have failed so far."""
