"""Streams and events of an accelerator: copies that overlap computation, and their ordering.

Only this module drives a device; ``testing/device`` implements the same on a CPU for tests. The rules:

- A copy *down* (to the host) waits for all work of the stream that made the tensor, and runs on a stream of
  its own. Its source is kept alive until the copy has ended or the current stream waits for it. So memory that
  the current stream reuses is not written before the copy has read it. Small copies begin together: see
  ``copies``.
- A copy *up* (to the device) writes to memory of the current stream, so that the caching allocator may reuse
  it for that stream. The copying stream waits until the memory is free. Each stream that uses the bytes waits
  for the copy.
- The allocator returns freed memory to the pool of the stream that allocated it, and there is no way to query
  which stream that was. Autograd would have held the memory until backward. Since the stash may free it
  earlier, it reports to the allocator (``record_stream``) every stream that has saved a tensor so far, and the
  copying stream if a stream other than the saver's has waited for it. The allocator reuses the memory only
  after all of these streams have passed that point. Reporting the allocating stream itself has no effect, so a
  program with one stream pays nothing.
- If a copy's graph is dropped before the copy has ended, the device memory of the copy goes to a queue. The
  next copy that begins frees the memory of those that have ended by then.
- The computing thread never waits for the device here, except for the result of a comparison. A worker that
  writes the host's bytes to disk waits for the event itself.
- While a graph is captured, no event is queried and no copy begins: either would end the capture.

Sources: PyTorch's notes on CUDA streams and on ``Tensor.record_stream``. Transformer Engine's offloading also
allocates on the compute stream.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, cast

import torch
from torch import Tensor

from .._torch.device_memory import allocator_counts
from .._torch.host_memory import empty_host_cache
from .._torch.streams import capture_query, current_stream
from .base import Check, Completion, Copy, Device, MemoryFigures
from .copies import GROUP_BYTES, CopyDown, CopyUp, GroupEnd, Lane, StreamCopy
from .fingerprint import sums

__all__ = ["Accelerator", "accelerator"]

_NOTHING = nullcontext()
_tried_out: set[torch.device] = set()  # devices that this process has tested, waiting once for each
_FILLED_BYTES = (
    64 << 20
)  # long enough that the host begins several fills while the device makes one
_FILLS, _MOST_FILLS = 8, 256
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


class _Mark:
    """The fingerprint of a storage at an event of a stream."""

    __slots__ = ("digest", "event")

    def __init__(self, digest: Tensor, event: Any) -> None:
        self.digest = digest
        self.event = event


class _Comparison(Check):
    __slots__ = ("_reader", "event", "result")

    def __init__(self, result: Tensor, event: Any, reader: Any) -> None:
        self.result = result
        self.event = event
        self._reader = reader  # a stream that does not compute, and its lock

    def differs(self) -> bool:
        stream, lock = self._reader
        with lock, stream:  # a stream object itself stores which stream was current before
            stream.wait_event(self.event)
            return bool(self.result)


class Accelerator(Device):
    """An accelerator, driven through ``torch.accelerator``.

    Args:
        device: the device, with its index.

    Raises:
        RuntimeError: the device has no streams.
    """

    group_bytes = GROUP_BYTES
    """The bytes at which waiting copies begin."""

    def __init__(self, device: torch.device) -> None:
        self.name = str(device)
        self._device = device
        self._pid = os.getpid()
        self._module: Any = getattr(torch, device.type)
        self.is_capturing = capture_query(self._module)
        self._down, self._up = Lane(torch.Stream(device)), Lane(torch.Stream(device))
        # The stream on which the host reads results of comparisons, one thread at a time.
        self._asking = torch.Stream(device), threading.RLock()
        self._savers: list[Any] = []  # the streams of all operations that have saved a tensor
        # Device memory of copies down whose objects died before they ended, and their events.
        self.unfinished: deque[tuple[Any, Tensor]] = deque()
        # That of copies up, which no one used, and the streams that own it.
        self.dropped: deque[tuple[Any, Tensor, Any]] = deque()
        self._fill_seconds = 0.0  # see keep_busy

    def try_out(self) -> None:
        """Copy some bytes down and up, and run the queries that a stash needs: not every device supports them.

        The host waits. Raises ``RuntimeError``, or another error of a device that lacks something.
        """
        bytes_here = torch.arange(256, dtype=torch.uint8, device="cpu")
        bytes_back = torch.zeros(256, dtype=torch.uint8, device="cpu")
        source = self._empty(256)
        source.copy_(bytes_here)
        down = self.down(source, bytes_back, self.stream())
        up = self.up(bytes_back, down.completion)
        down.wait()
        up.order()
        with warnings.catch_warnings():
            # The allocator of cudaMallocAsync warns, once, if a tensor's own stream is recorded on it.
            warnings.simplefilter("ignore")
            self.used(up.memory)
        for tensor in (bytes_back, up.memory):
            if not torch.equal(tensor.cpu(), bytes_here):
                raise RuntimeError("a copy on another stream returned different bytes")
        self.free_bytes()
        self.failures()

    def stream(self) -> Any:
        """See :meth:`Device.stream`."""
        return current_stream(self._device.index)

    def used(self, tensor: Tensor) -> Any:
        """See :meth:`Device.used`."""
        stream = self.stream()
        if stream not in self._savers:
            self._savers.append(stream)
        if self.is_capturing():
            return stream
        if tensor.is_conj() or tensor.is_neg():
            # PyTorch (seen in 2.13) records the memory of a copy for these, and writes where it has none.
            memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            tensor = memory.set_(tensor.untyped_storage())
        for each in self._savers:  # any of them may read it
            self.record_stream(tensor, each)
        return stream

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """Keep the allocator from reusing the memory of ``tensor`` before ``stream`` has passed this point."""
        tensor.record_stream(stream)

    def sums(self, storage: torch.UntypedStorage, first: int = 0, nbytes: int = -1) -> Tensor:
        """See :func:`~backstash._device.fingerprint.sums`."""
        return sums(storage, first, nbytes)

    def down(self, source: Tensor, target: Tensor, made_on: Any) -> Copy:
        """See :meth:`Device.down`."""
        if self.unfinished or self.dropped:
            self.sweep()
        nbytes = source.numel()
        group = self._group_for(self._down, made_on, nbytes)
        copy = CopyDown(self, group, source, source, target)
        self._add(group, copy, nbytes)
        return copy

    def up(self, source: Tensor, after: Completion | None) -> Copy:
        """See :meth:`Device.up`."""
        if self.unfinished or self.dropped:
            self.sweep()
        stream, nbytes = self.stream(), source.numel()
        memory = self._empty(nbytes)
        group = self._group_for(self._up, stream, nbytes)
        copy = CopyUp(self, group, memory, source, memory)
        copy.after = cast("GroupEnd | None", after)
        self._add(group, copy, nbytes)
        return copy

    def _group_for(self, lane: Lane, owner: Any, nbytes: int) -> GroupEnd:
        """Return the group that a copy of ``nbytes`` may join: the one that waits, or a new one."""
        group = lane.group
        if group is not None and (
            group.event is not None  # an interrupt came before it left the lane
            or group.owner != owner
            or group.nbytes + nbytes > self.group_bytes
        ):
            self.begin_lane(lane)
            group = lane.group
        if group is None:
            group = lane.group = GroupEnd(self, lane, owner)
        return group

    def _add(self, group: GroupEnd, copy: StreamCopy, nbytes: int) -> None:
        group.copies.append(copy)
        group.nbytes += nbytes
        if group.nbytes < self.group_bytes:
            return
        try:
            self.begin_lane(group.lane)
        except Exception:  # the caller gives the memory to others
            group.copies.remove(copy)
            group.nbytes -= nbytes
            group.lane.stream.synchronize()
            raise

    def begin_lane(self, lane: Lane) -> None:
        """Begin the copies that wait in ``lane``. If this raises, they wait again."""
        group, stream = lane.group, lane.stream
        if group is None:
            return
        if group.copies and group.event is None:
            stream.wait_event(group.owner.record_event())
            if lane is self._up:
                self._come_after(lane, group)
            with stream:  # makes the stream current
                for copy in group.copies:
                    if copy.has_moved:
                        copy.was_skipped, copy.source = True, None
                    if (source := copy.source) is not None:
                        with (
                            _NOTHING
                            if self.on_time is None
                            else self.timed(copy.kind, stream, source.numel())
                        ):
                            # Through .data, so that the version of a copy up stays 0.
                            copy.memory.data.copy_(source, non_blocking=True)
                event = stream.record_event()
            for copy in group.copies:
                # Only appends. record_stream, which would release the memory at once, is an operator: a mode
                # that is active where the copy dies would run Python code here, or hide the call from the
                # allocator.
                if lane is self._up:
                    dropped = event, copy.mine, group.owner
                    copy.__del__ = functools.partial(self.dropped.append, dropped)
                else:
                    unfinished = event, copy.mine
                    copy.__del__ = functools.partial(self.unfinished.append, unfinished)
                copy.source = copy.after = None
            lane.begun += 1
            group.number, group.event = lane.begun, event
        lane.group = None
        group.copies = []

    def _come_after(self, lane: Lane, group: GroupEnd) -> None:
        """Make the stream of copies up wait for the copies down that fill their sources. They end in order."""
        last: GroupEnd | None = None
        for copy in group.copies:
            after = copy.after
            if after is not None:
                if after.event is None:
                    after.begin()
                if last is None or after.number > last.number:
                    last = after
        if last is not None and last.number > lane.waited_for and not last.has_ended:
            lane.stream.wait_event(last.event)
            lane.waited_for = last.number

    def begin(self) -> None:
        """See :meth:`Device.begin`."""
        if (self._down.group or self._up.group) and not self.is_capturing():
            self.begin_lane(self._down)
            self.begin_lane(self._up)

    def _empty(self, nbytes: int) -> Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            if not (self.unfinished or self.dropped):
                raise
        self.finish()  # memory of dropped graphs becomes free
        self.sweep()
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def unfinished_bytes(self) -> int:
        """See :meth:`Device.unfinished_bytes`."""
        each = *self.unfinished.copy(), *self.dropped.copy()
        return sum(memory.nbytes for _, memory, *_ in each)

    def sweep(self) -> None:
        """See :meth:`Device.sweep`."""
        if not (self.unfinished or self.dropped) or self.is_capturing():
            return
        # No one needs a dropped copy up, but its memory is free only when it has ended. A host that runs ahead
        # would hold it until then. So the stream that owns the memory waits instead. What it needs next
        # comes after this copy anyway.
        dropped = self.dropped
        while dropped:
            event, _, owner = dropped[0]
            if not event.query():
                owner.wait_event(event)
            dropped.popleft()
        # Copies mostly end in this order, and a host that runs ahead may have hundreds. The caller holds the
        # stash's lock. A copy is removed only after it has ended, since an interrupt may come between.
        unfinished = self.unfinished
        while unfinished and unfinished[0][0].query():
            unfinished.popleft()

    def mark(
        self, storage: torch.UntypedStorage, made_on: Any, first: int = 0, nbytes: int = -1
    ) -> _Mark | None:
        """See :meth:`Device.mark`."""
        try:
            with nullcontext() if made_on == self.stream() else made_on:
                return _Mark(self.sums(storage, first, nbytes), made_on.record_event())
        except RuntimeError:
            return None

    def compare(
        self, mark: Any, storage: torch.UntypedStorage, first: int = 0, nbytes: int = -1
    ) -> Check | None:
        """See :meth:`Device.compare`."""
        stream = self.stream()
        try:
            now = self.sums(storage, first, nbytes)
            stream.wait_event(mark.event)
            self.record_stream(mark.digest, stream)
            result = (now != mark.digest).any()
        except RuntimeError:
            return None
        return _Comparison(result, stream.record_event(), self._asking)

    def first_difference(self, checks: Sequence[Any]) -> int:
        """See :meth:`Device.first_difference`: all checks are read at once."""
        stream, lock = self._asking
        with lock, stream:
            for check in checks:
                stream.wait_event(check.event)
            found: list[bool] = torch.stack([check.result for check in checks]).tolist()
        return found.index(True) if True in found else -1

    def compare_marks(self, marks: Sequence[tuple[_Mark, _Mark]]) -> Check | None:
        """See :meth:`Device.compare_marks`."""
        stream = self.stream()
        try:
            for mark in itertools.chain(*marks):
                stream.wait_event(mark.event)
                self.record_stream(mark.digest, stream)
            before, now = (
                torch.cat([mark.digest for mark in each]) for each in zip(*marks, strict=True)
            )
            result = (now != before).any()
        except RuntimeError:
            return None
        return _Comparison(result, stream.record_event(), self._asking)

    def pin(self, memory: Tensor) -> str:
        """See :meth:`Device.pin`. Registers existing memory: exact in size, aligned to pages."""
        if self._device.type != "cuda":
            return f"{self._device.type} cannot lock memory that exists"
        runtime: Any = self._module.cudart()
        status = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE)
        if not int(status):
            return ""
        self._forget_error()
        return f"cudaHostRegister answers {int(status)}: {runtime.cudaGetErrorString(status)}"

    def pinned(self, nbytes: int) -> Tensor | str:
        """See :meth:`Device.pinned`. Uses PyTorch's allocator, which rounds up to a power of two."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            return str(error).partition("\n")[0]

    def _forget_error(self) -> None:
        """Clear the error of a refused call. Otherwise the program's next kernel would report it."""
        try:
            torch.zeros(1, device=self._device).add_(1)
        except RuntimeError:
            pass

    def unpin(self, memory: Tensor) -> None:
        """See :meth:`Device.unpin`. Waits for copies, since a stash may be dropped while some run."""
        if os.getpid() != self._pid:
            return  # a forked child has no device
        self._synchronize()
        if self._device.type != "cuda":
            return  # nothing was pinned
        status = self._module.cudart().cudaHostUnregister(memory.data_ptr())
        if int(status):  # pinning was refused, or interrupted
            self._forget_error()

    def give_back(self, memory: Tensor) -> None:
        """See :meth:`Device.give_back`. Waits for copies, like :meth:`unpin`."""
        if os.getpid() != self._pid:
            return
        self._synchronize()
        memory.data = torch.empty(0, dtype=torch.uint8, device="cpu")
        empty_host_cache()

    def finish(self) -> None:
        """See :meth:`Device.finish`."""
        self.begin_lane(self._down)
        self.begin_lane(self._up)
        self._synchronize()

    def _synchronize(self) -> None:
        """Wait for the copies that have begun. Needs no lock."""
        for lane in (self._down, self._up):
            lane.stream.synchronize()

    def free_bytes(self) -> int:
        """See :meth:`Device.free_bytes`."""
        asks = getattr(torch.accelerator, "get_memory_info", None) or self._module.mem_get_info
        share = getattr(self._module, "get_per_process_memory_fraction", None)
        free, total = asks(self._device)
        statistics = torch.accelerator.memory_stats(self._device)
        reserved = statistics.get("reserved_bytes.all.current", 0)
        if share is not None:  # the limit that set_per_process_memory_fraction sets
            free = min(free, int(share(self._device) * total) - reserved)
        return int(free + reserved - statistics.get("active_bytes.all.current", 0))

    def memory(self) -> MemoryFigures:
        """See :meth:`Device.memory`."""
        return MemoryFigures(*allocator_counts(self._device))

    @functools.cached_property
    def _has_clock(self) -> bool:
        """Whether its events record times. Otherwise the host waits to take a point in time."""
        try:
            marks = [torch.Event(self._device, enable_timing=True) for _ in range(2)]
            for mark in marks:
                self.stream().record_event(mark)
                mark.synchronize()
            marks[0].elapsed_time(marks[1])
        except (RuntimeError, TypeError, NotImplementedError):
            return False
        return True

    def time_mark(self) -> Any:
        """See :meth:`Device.time_mark`."""
        return self._mark_on(self.stream())

    def _mark_on(self, stream: Any) -> Any:
        if not self._has_clock:
            stream.synchronize()
            return time.perf_counter()
        mark = torch.Event(self._device, enable_timing=True)
        stream.record_event(mark)
        return mark

    def seconds_between(self, since: Any, until: Any) -> float:
        """See :meth:`Device.seconds_between`."""
        if isinstance(since, float):
            return float(until - since)
        for mark in (since, until):
            mark.synchronize()
        return float(since.elapsed_time(until)) / 1e3

    def keep_busy(self, seconds: float) -> None:
        """See :meth:`Device.keep_busy`. Fills memory, which every device can."""
        with suppress(torch.OutOfMemoryError):
            memory = self._empty(_FILLED_BYTES)
            if not self._fill_seconds:
                memory.zero_()
                began = self.time_mark()
                for _ in range(_FILLS):
                    memory.zero_()
                self._fill_seconds = self.seconds_between(began, self.time_mark()) / _FILLS
            for _ in range(min(_MOST_FILLS, int(seconds / max(self._fill_seconds, 1e-6)) + 1)):
                memory.zero_()

    def has_passed(self, mark: Any) -> bool:
        """See :meth:`Device.has_passed`."""
        return isinstance(mark, float) or bool(mark.query())

    @contextmanager
    def _noting(self, kind: str, stream: Any, nbytes: int) -> Iterator[None]:
        report = self.on_time
        before = self._mark_on(stream)
        yield
        if report is not None:
            report(kind, before, self._mark_on(stream), nbytes)

    def timed(self, kind: str, stream: Any, nbytes: int = 0) -> AbstractContextManager[None]:
        """Return a context that reports the work given to ``stream`` to :attr:`Device.on_time`."""
        if self.on_time is None or self.is_capturing():
            return _NOTHING
        return self._noting(kind, stream, nbytes)

    def failures(self) -> int:
        """See :meth:`Device.failures`."""
        return int(torch.accelerator.memory_stats(self._device).get("num_ooms", 0))


def accelerator(device: torch.device) -> Device | str:
    """Return the driver of ``device``, or the reason why there is none."""
    current = torch.accelerator.current_accelerator()
    if current is None or current.type != device.type:
        return f"device {device.type}"
    try:
        driver = Accelerator(device)
        if device not in _tried_out and not driver.is_capturing():
            with suppress(torch.OutOfMemoryError):  # a full device needs a stash all the more
                driver.try_out()
                _tried_out.add(device)
    except (RuntimeError, AttributeError, TypeError, ValueError) as error:
        return f"device {device.type} lacks what a stash needs: {str(error).partition(chr(10))[0]}"
    return driver
