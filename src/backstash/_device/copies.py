"""Copies between an accelerator and the host, which begin in groups.

The copies of each direction run on a stream of their own, a *lane*. Beginning a copy takes an event on the
computing stream, a wait for it, and an event after the copy. For a small copy, that takes the host longer than
the copy takes the device. So a small copy waits in its lane until the waiting copies have 4 MiB together, or
until one of them is needed. Then they all begin, with one event before and one after.

A group owns its copies until it begins, and with them their sources and targets. A group has begun when it has
its event. If an interrupt comes before that, the next call begins its copies again. The stash compares the
version of a source after the event, so it does not use bytes that the second copy may have found changed. A
source whose storage the program has resized meanwhile, which raises no version, is not copied: its block stays
in place.

TransformerEngine and Megatron-Core also use one event for all tensors of a layer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from .base import Completion, Copy

__all__ = [
    "GROUP_BYTES",
    "CopyDown",
    "CopyUp",
    "Driver",
    "GroupEnd",
    "Lane",
    "StreamCopy",
    "nothing",
]

GROUP_BYTES = 4 << 20
"""The bytes at which a group begins at once. A device copies them in 0.1 to 0.4 ms."""

nothing: Any = tuple
"""A C function that does nothing."""


class Driver(Protocol):
    """What a copy needs of its device."""

    is_capturing: Callable[[], bool]
    unfinished: deque[tuple[Any, Tensor]]

    def stream(self) -> Any: ...

    def record_stream(self, tensor: Tensor, stream: Any) -> None: ...

    def timed(self, kind: str, stream: Any, nbytes: int = 0) -> AbstractContextManager[None]: ...

    def begin_lane(self, lane: Lane) -> None: ...


class Lane:
    """One direction of copies. The caller holds the stash's lock.

    Args:
        stream: the stream that copies.
    """

    __slots__ = ("begun", "group", "stream", "waited_for")

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.group: GroupEnd | None = None
        """The group that waits."""
        self.begun = 0
        """The number of groups that have begun."""
        self.waited_for = 0
        """The last group of the other lane that this stream waits for."""


class GroupEnd(Completion):
    """The end of a group of copies: an event of the lane's stream.

    Args:
        device: the device.
        lane: the lane.
        owner: the computing stream that these copies wait for.
    """

    __slots__ = (
        "copies", "device", "event", "has_ended", "lane", "nbytes", "number", "owner", "waited_by",
    )  # fmt: skip

    def __init__(self, device: Driver, lane: Lane, owner: Any) -> None:
        self.device = device
        self.lane = lane
        self.owner = owner
        self.copies: list[StreamCopy] = []
        """Its copies, until they have begun."""
        self.nbytes = 0  # of these
        self.event: Any = None
        """The event, once the copies have begun."""
        self.number = 0  # in its lane, once they have begun
        self.has_ended = False
        """Whether a query has found that it has ended."""
        self.waited_by: Any = None  # the last stream that was made to wait for it

    def ended(self) -> bool:
        if not self.has_ended and self.event is not None and not self.device.is_capturing():
            self.has_ended = self.event.query()
        return self.has_ended

    def wait(self) -> None:
        self.begin()
        self.event.synchronize()

    def begin(self) -> None:
        if self.event is None:
            self.device.begin_lane(self.lane)

    def order(self, stream: Any) -> None:
        """Make ``stream`` wait for the group, unless that is known to be unnecessary."""
        if self.event is None:
            self.begin()
        # Comparing a torch.Stream with None by == or != gives False.
        if not self.has_ended and (self.waited_by is None or self.waited_by != stream):
            with self.device.timed("stall", stream):
                stream.wait_event(self.event)
            if not self.device.is_capturing():  # else only the graph waits
                self.waited_by = stream


class StreamCopy(Copy):
    """A copy of a lane. See the subclasses.

    Args:
        device: the device.
        group: its group.
        mine: the device memory, which is the source or the destination.
        source: the bytes to copy.
        memory: the destination.
    """

    __slots__ = (
        "__del__",
        "_device",
        "_is_safe",
        "_owner",
        "address",
        "after",
        "completion",
        "memory",
        "mine",
        "source",
        "was_skipped",
    )  # fmt: skip
    __del__: Callable[[], Any]  # filled with a C function: see _runtime/reclaim
    completion: GroupEnd
    kind: str
    """The kind of its time: see :attr:`Device.on_time`."""
    has_moved = False
    """Whether the source is no longer what was to be copied."""

    def __init__(
        self, device: Driver, group: GroupEnd, mine: Tensor, source: Tensor, memory: Tensor
    ) -> None:
        self.memory = memory
        self.mine = mine
        self.source: Tensor | None = source  # until it has begun
        self.after: GroupEnd | None = None  # what must have filled the source, until it has begun
        self.completion = group
        self.address = mine.untyped_storage().data_ptr()
        self.was_skipped = False  # see Transfer.was_skipped
        self._device = device
        self._owner = group.owner  # the stream that owns the device memory
        self._is_safe = False  # whether the device memory may be freed
        self.__del__ = nothing  # until it has begun, its group owns it

    def done(self) -> bool:
        return self._is_safe or self.ended()

    def ended(self) -> bool:
        end = self.completion
        if not end.has_ended:
            if end.event is None or self._device.is_capturing():
                return False
            end.has_ended = end.event.query()
            if not end.has_ended:
                return False
        if not self._is_safe:
            self._is_safe, self.__del__ = True, nothing
        return True

    def wait(self) -> None:
        self.completion.wait()
        self._is_safe, self.__del__ = True, nothing

    def order(self) -> None:
        stream = self._device.stream()
        self.completion.order(stream)
        if stream != self._owner:
            self._notify_allocator(stream)
        self._is_safe, self.__del__ = True, nothing

    @abstractmethod
    def _notify_allocator(self, stream: Any) -> None:
        """Report to the allocator which streams must pass before the memory is reused. ``stream``, the current
        one, is not the owner."""


class CopyDown(StreamCopy):
    """A copy from the device to the host."""

    __slots__ = ()
    kind = "write"

    @property
    def has_moved(self) -> bool:  # type: ignore[override]
        """Whether the program has resized the storage of the source, so that it may hold other bytes."""
        storage = self.mine.untyped_storage()
        return storage.data_ptr() != self.address or storage.nbytes() != self.mine.nbytes

    def _notify_allocator(self, stream: Any) -> None:
        if not self.ended():
            self._device.record_stream(self.mine, self.completion.lane.stream)


class CopyUp(StreamCopy):
    """A copy from the host to the device."""

    __slots__ = ()
    kind = "read"

    def _notify_allocator(self, stream: Any) -> None:
        self._device.record_stream(self.mine, stream)  # no matter when the bytes arrived
