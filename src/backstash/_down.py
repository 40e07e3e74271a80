"""The way down: what stays in place, what goes, and when the memory of what went is let go.

The newest blocks stay in place up to ``keep``. The oldest beyond it *take off*: a worker writes them
straight from the tensor's memory, which stays alive and counts as in flight. They *land* when a thread
that may judge the copy (see ``_lanes``) finds that the write has ended and the version has not changed:
only then is the memory let go. A version that changed in between means that nobody can know which bytes
were written: the block is lost, and backward raises if it ever asks for it. A write that failed leaves
the block where it was.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ._blocks import Block
from ._events import Tape, profiled
from ._host import HostParcel, HostTier
from ._lanes import Lane
from ._parcels import Parcel, Segment
from ._queue import WeakQueue
from ._remains import Grave, ParcelRemains
from ._streams import Copy
from ._workers import Work
from .errors import StashError, StashFullError, StashIOError, StashWarning
from .stores import Slot, Store
from .stores._memory import Pool
from .units import format_bytes

__all__ = ["Down", "sequence_number"]

sequence_number = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]

_SEGMENT_BYTES = 4 << 20
SMALL_BYTES = 512 << 10  # blocks below travel in segments


@dataclass(slots=True, eq=False)
class _Flight:
    """A write that began and has not landed. It does not own the block: a dead one just lands empty."""

    cargo: weakref.ref[Block] | weakref.ref[Segment]
    nbytes: int
    lane: Lane | None  # whose tensor it is; None for bytes that are the stash's own copy
    writing: Work | Copy


class Down:
    """Keeps the ``keep`` and ``inflight`` budgets. The caller holds the stash's lock.

    Args:
        store: where blocks go, or ``None`` when everything stays in place.
        begin: hands a piece of work to a worker.
        freed: is told of bytes that were let go.
        tape: is told of everything, where somebody records.
        keep, inflight: budgets in bytes; ``keep=None`` is no limit.
        on_full: ``"keep"`` or ``"raise"``.
        host: on an accelerator, its host tier, in place of the store. Copies then begin ``inflight``
            bytes before ``keep`` is reached, and memory is let go only beyond it, or where the device
            runs short.
    """

    def __init__(
        self,
        store: Store | None,
        begin: Callable[[Work], None],
        pool: Pool | None,
        grave: Grave,
        freed: Callable[[int], None],
        tape: Tape,
        *,
        keep: int | None,
        inflight: int,
        on_full: str,
        host: HostTier | None = None,
    ) -> None:
        self._store: Store | HostTier | None = store if host is None else host
        self._host = host
        self._begin_work = begin
        self._pool = pool
        self._grave = grave
        self._freed = freed
        self._tape = tape
        self._keep = keep
        self._inflight = inflight
        self._raises = on_full == "raise"
        self._kept = WeakQueue[Block](_is_kept)  # oldest first
        self._flights: deque[_Flight] = deque()  # oldest first
        self._open: weakref.ref[Segment] | None = None  # being filled; dies with its blocks
        self._stuck = WeakQueue[Block](_is_kept)  # there was no room for them; oldest first
        # Bytes used when the store last had no room, and the size of the smallest block that it refused.
        self._full_at: tuple[int, int] | None = None
        self._broken: Callable[[], StashError] | None = (
            None  # after a failed write nothing more goes
        )
        self._short = 0  # bytes that the device lacked when it was last asked
        self.keep_bytes = self.keep_peak_bytes = 0
        self.inflight_bytes = self.inflight_peak_bytes = 0
        self.written_bytes = self.disk_peak_bytes = 0
        self.stall_seconds = 0.0
        self.notes: dict[str, None] = {}

    def admit(self, block: Block, *, at_once: bool, complete: bool) -> None:
        """Take a new block in place; then bring the budgets in order. ``at_once`` skips ``keep``.

        One that may not be ``complete`` waits until the operation that saves it has ended.
        """
        block.kept = block.nbytes
        self.keep_bytes += block.nbytes
        if self._tape.on:
            cause = "backward" if torch._C._current_autograd_node() is not None else ""
            self._tape.tell("save", block.nbytes, block.serial, block.module, cause=cause)
        if complete:
            self.apply(block.lane, block, at_once)
        else:
            block.lane.waiting.append((weakref.ref(block), at_once))
            block.lane.operation = sequence_number()

    def try_again(self) -> None:
        """A step has ended: somebody else may have made room since the store last had none."""
        if self._full_at is not None:
            self._full_at = None
            self._kept.take_before(self._stuck)

    def queue(self, block: Block) -> None:
        """It may go when the budget next asks."""
        self._kept.append(block)

    def forget(self) -> None:
        """No block is alive any more."""
        self._kept.clear()
        self._stuck.clear()

    def apply(self, lane: Lane, block: Block, at_once: bool) -> None:
        """Bring the budgets in order for a block that is complete."""
        self.land(lane)
        if not (at_once and self._send(block, lane)):
            self.queue(block)
            self._press(lane, block)
        # Measured between operations: while one runs, its tensors are the caller's.
        self.keep_peak_bytes = max(self.keep_peak_bytes, self.keep_bytes)
        self.inflight_peak_bytes = max(self.inflight_peak_bytes, self.inflight_bytes)

    def _press(self, lane: Lane, newest: Block) -> None:
        most = self._most(newest.nbytes)
        while most is not None and self.keep_bytes > most and self._kept:
            block = self._kept.popleft()
            if block is None:
                continue
            if not lane.may_land(block.lane) and not self._may_leave_unseen(block):
                # Only its own thread may judge a copy of it, and that one may be waiting for us:
                # move ours instead.
                self._kept.appendleft(block)
                if not newest.kept or not self._send(newest, lane):
                    return
            elif not self._send(block, lane):
                self._stuck.append(block)  # a smaller one may find room

    def _most(self, nbytes: int) -> int | None:
        """How many bytes may stay in place now that ``nbytes`` have come; ``None``: no limit."""
        if self._host is None:
            return self._keep
        if self._host.device.is_capturing():
            return None  # nothing may be asked of the device
        most = None if self._keep is None else max(0, self._keep - self._inflight)
        if most != 0:  # else all goes anyway
            self._short = self._host.shortage(nbytes, self.inflight_bytes)
            if self._short:
                left = max(0, self.keep_bytes - self._short)
                most = left if most is None else min(most, left)
        return most

    def ease(self) -> None:
        """The device ran out of memory: from now on keep half of what was kept, at most."""
        kept = self.keep_peak_bytes if self._keep is None else min(self._keep, self.keep_peak_bytes)
        if self._host is not None and kept:
            self._keep = kept // 2
            self.notes[f"out of device memory: keep is {format_bytes(self._keep)} from then on"] = (
                None
            )

    def _may_leave_unseen(self, block: Block) -> bool:
        """Whether another thread's block may go: it is written, not copied, and need not be waited for."""
        return block.nbytes >= SMALL_BYTES and self._has_room(block.nbytes)

    def _has_room(self, nbytes: int) -> bool:
        return self.inflight_bytes + nbytes <= self._inflight

    def _send(self, block: Block, lane: Lane) -> bool:
        """Move ``block`` down; whether it left. Raises ``StashFullError`` if the caller wants it."""
        store = self._store
        if store is None or self._refuses(store, block.nbytes):
            return False
        if self._host is not None and self._host.device.is_capturing():
            return False
        if block.source.changed:
            self.lose(block)
            return True
        if block.has_moved:
            return True  # stays in place, wherever that is now: what was resized once may be again
        try:
            if isinstance(store, HostTier):
                self._make_room(block.nbytes, lane)
                self._take_off(block, store.begin(block), lane)
            elif block.nbytes < SMALL_BYTES and block.nbytes + 128 <= _SEGMENT_BYTES:
                self._gather(store, block, lane)
            else:
                self._make_room(block.nbytes, lane)
                self._take_off(block, self._begin(store, block), lane)
        except StashFullError as error:
            self._full_at = store.used_bytes, block.nbytes
            self._tell(error)
            return False
        if self._host is None:
            self.disk_peak_bytes = max(self.disk_peak_bytes, store.used_bytes)
        return True

    def _refuses(self, store: Store | HostTier, nbytes: int) -> bool:
        if self._broken is not None:
            if self._raises:
                raise self._broken()
            return True
        if self._full_at is None:
            return False
        used_bytes, least = self._full_at
        if (
            store.used_bytes < used_bytes
        ):  # room came back, for those who were told there was none too
            self._full_at = None
            self._kept.take_before(self._stuck)
            return False
        return nbytes >= least and not self._raises

    def _tell(self, error: StashError) -> None:
        if self._raises:
            raise error
        note = f"left in place: {error}"
        if note not in self.notes:
            is_first = not any(told.startswith("left in place") for told in self.notes)
            self.notes[note] = None
            if is_first:
                warnings.warn(note, StashWarning, stacklevel=5)

    def _reserve(self, store: Store, nbytes: int) -> Slot:
        try:
            return store.reserve(nbytes)
        except StashFullError:
            if not self._reclaim(store):
                raise
            return store.reserve(nbytes)

    def _reclaim(self, store: Store) -> bool:
        """Take back the slots of dead parcels, waiting for the writes that still run into them."""
        found = False
        for left in list(self._grave):
            if type(left) is ParcelRemains and left.store is store and left.slot is not None:
                if left.writing is not None and not left.writing.cancel():
                    self._wait(left.writing)
                slot, left.slot = left.slot, None
                store.release(slot)
                found = True
        return found

    # Large blocks: written from the tensor's own memory.

    def _begin(self, store: Store, block: Block) -> Parcel:
        parcel = Parcel(
            store, self._reserve(store, block.nbytes), block.address % 4096, self._grave
        )
        store.stage(parcel.slot, block.address)
        # The work owns the alias until it is done: the memory outlives the write, whoever dies. And the
        # parcel knows of it before a worker does: else its slot might be given away and written later.
        work = Work(self._writer(block), store, parcel.slot, block.address, block.alias)
        parcel.writing = work
        self._begin_work(work)
        return parcel

    def _take_off(self, block: Block, parcel: Parcel | HostParcel, lane: Lane) -> None:
        assert parcel.writing is not None
        block.parcel = parcel
        self._leave_place(block)
        self._fly(_Flight(weakref.ref(block), block.nbytes, block.lane, parcel.writing))
        if self.inflight_bytes <= self._inflight:
            return
        if self._host is not None and self._inflight and len(self._flights) == 1:
            return  # larger than the window, and alone in it: compute goes on until the next one
        self._wait(parcel.writing)  # it is moved within this call
        self.land(lane, all_that_ended=True)

    # Small blocks: copied into a segment.

    def _gather(self, store: Store, block: Block, lane: Lane) -> None:
        segment = self._open() if self._open is not None else None
        at = segment.place(block.address, block.nbytes) if segment is not None else None
        if segment is None or at is None:
            self._close_segment()
            segment = self._open_segment(store, block.nbytes + 128)
            at = segment.place(block.address, block.nbytes)
            assert at is not None
        self._make_room(block.nbytes, lane)
        ctypes.memmove(segment.address + at, block.address, block.nbytes)
        segment.filled = at + block.nbytes
        segment.flown += block.nbytes
        segment.blocks += 1
        block.parcel, block.offset, block.alias = segment, at, None
        self._leave_place(block)
        self.inflight_bytes += block.nbytes
        self.written_bytes += block.nbytes
        self._tell_of("land", block)
        if self.inflight_bytes > self._inflight:
            self._close_segment()
            self._make_room(0, lane)

    def _open_segment(self, store: Store, at_least: int) -> Segment:
        nbytes = max(min(_SEGMENT_BYTES, self._inflight // 8), at_least)
        nbytes = -(-nbytes // 4096) * 4096
        assert self._pool is not None
        segment = Segment(store, self._reserve(store, nbytes), self._pool.take(nbytes), self._grave)
        self._open = weakref.ref(segment)
        return segment

    def _close_segment(self) -> None:
        """Send the open segment on its way, full or not."""
        segment = self._open() if self._open is not None else None
        self._open = None
        if segment is None:
            return
        work = Work(
            self._writer(None), segment.store, segment.slot, segment.address, segment.buffer
        )
        segment.writing = work
        self._flights.append(_Flight(weakref.ref(segment), segment.flown, None, work))
        segment.flown = 0  # the flight counts them now
        self._begin_work(work)

    # In flight.

    def _leave_place(self, block: Block) -> None:
        self.keep_bytes -= block.kept
        block.kept = 0

    def _fly(self, flight: _Flight) -> None:
        self._flights.append(flight)
        self.written_bytes += flight.nbytes
        self.inflight_bytes += flight.nbytes

    def finish(self, lane: Lane) -> None:
        """Wait for every copy that has begun, and land what this thread may judge."""
        for flight in self._flights:
            if isinstance(flight.writing, Copy):
                flight.writing.wait()
        self.land(lane, all_that_ended=True)

    def limit(self, keep: int | None) -> None:
        """From now on, keep at most so many bytes in place; ``None``: no limit."""
        self._keep = keep

    def restore(self, blocks: list[Block], waiting: set[int], remains: list[Any]) -> None:
        """Make the books anew from what there is: see ``_repair``.

        Args:
            blocks: that are alive, oldest first.
            waiting: the ``id`` of each that waits for its operation's end.
            remains: of all blocks and parcels, the dead ones that are yet to be settled too.
        """
        self._kept, self._stuck = WeakQueue[Block](_is_kept), WeakQueue[Block](_is_kept)
        self._full_at = None
        if self._pool is not None:
            self._pool.restore()
        known = {id(cargo): flight for flight in self._flights if (cargo := flight.cargo())}
        flights = deque(flight for flight in self._flights if flight.cargo() is None)
        segments: dict[int, Segment] = {}
        for block in blocks:
            if type(block.parcel) is Segment:
                segments[id(block.parcel)] = block.parcel
            if block.alias is None or block.parcel is not None:
                block.kept = 0
            elif block.kept and id(block) not in waiting:
                self._kept.append(block)
            if block.alias is not None and block.parcel is not None:
                new = _Flight(weakref.ref(block), block.nbytes, block.lane, block.parcel.writing)
                flights.append(known.get(id(block), new))
        for segment in segments.values():
            self._restore_segment(segment, flights, known.get(id(segment)))
        self._flights = flights
        for flight in flights:
            if isinstance(flight.writing, Work) and not flight.writing.done():
                self._begin_work(flight.writing)
        self.inflight_bytes = sum(flight.nbytes for flight in flights)
        self.inflight_bytes += sum(getattr(left, "flown", 0) for left in remains)
        self.keep_bytes = sum(getattr(left, "kept", 0) for left in remains)

    def _restore_segment(
        self, segment: Segment, flights: deque[_Flight], flight: _Flight | None
    ) -> None:
        is_open = self._open is not None and self._open() is segment
        if segment.buffer is None or is_open:
            return
        work = segment.writing
        if work is None:
            store, slot = segment.store, segment.slot
            work = Work(self._writer(None), store, slot, segment.address, segment.buffer)
            segment.writing = work
        if flight is None and work.error is None:
            flight = _Flight(weakref.ref(segment), segment.flown, None, work)
        if flight is not None:
            flights.append(flight)
            segment.flown = 0

    def _make_room(self, nbytes: int, lane: Lane) -> None:
        """Wait until ``nbytes`` more fit into the window, or nothing in it can be waited for."""
        while self._flights and not self._has_room(nbytes):
            mine = next((f for f in self._flights if _judged_by(lane, f)), None)
            if mine is None:
                return
            self._wait(mine.writing)
            self.land(lane, all_that_ended=True)

    def _wait(self, writing: Work | Copy) -> None:
        if writing.done():
            return
        began = time.perf_counter()
        try:
            with profiled("stall on the way down"):
                writing.exception()
        finally:
            self.stall_seconds += time.perf_counter() - began
            if self._tape.on:
                self._tape.tell("stall", 0, cause="pack", began=began)

    def land(self, lane: Lane, *, all_that_ended: bool = False) -> None:
        """Let go of the memory of every write that has ended, as far as this thread may judge it.

        On an accelerator only as far as ``keep`` asks for it, unless ``all_that_ended``: what is still
        there when backward comes need not be brought back.
        """
        flights = self._flights
        for _ in range(len(flights)):
            flight = flights[0]
            cargo = flight.cargo()
            lingers = not all_that_ended and cargo is not None and not self._is_pressed()
            if (
                lingers
                or not (flight.writing.done() or self._abandoned(flight))
                or not _judged_by(lane, flight)
            ):
                flights.rotate(-1)
                continue
            if cargo is not None:
                self._touch_down(cargo, flight)
            if isinstance(flight.writing, Copy):
                flight.writing.release()
            flights.popleft()
            self.inflight_bytes -= flight.nbytes
            self._freed(flight.nbytes)

    def _is_pressed(self) -> bool:
        if self._host is None:
            return True
        if self._short:
            return True
        return self._keep is not None and self.keep_bytes + self.inflight_bytes > self._keep

    @staticmethod
    def _abandoned(flight: _Flight) -> bool:
        """A dead block's write that has not begun is not worth doing."""
        return flight.cargo() is None and flight.writing.cancel()

    def _touch_down(self, cargo: Block | Segment, flight: _Flight) -> None:
        writing = flight.writing
        failure = None
        if not isinstance(writing, Copy):
            failure = writing.exception()
        if isinstance(cargo, Block) and cargo.has_moved:
            self._return_to_place(cargo)  # whatever was written, or could not be
        elif isinstance(cargo, Segment):
            if failure is None:
                cargo.buffer = None
            else:
                self._break(failure)
        elif failure is not None:
            self._return_to_place(cargo)
            self._break(failure)
        elif cargo.source.changed:
            self.lose(cargo)
        else:
            cargo.alias = None
            # What lands while it is copied is safe from the streams that wait, not from any other.
            cargo.unsure = isinstance(flight.writing, Copy) and not flight.writing.ended()
            self._tell_of("land", cargo)

    def _tell_of(self, kind: Literal["land", "lose", "return"], block: Block) -> None:
        if self._tape.on:
            self._tape.tell(kind, block.nbytes, block.serial, block.module)

    def _writer(self, block: Block | None) -> Callable[..., None]:
        if not self._tape.on:
            return _write
        what = (block.nbytes, block.serial, block.module) if block is not None else None
        return functools.partial(_write_and_tell, self._tape, what)

    def lose(self, block: Block) -> None:
        """Its bytes were changed before a whole copy was known to exist: backward will be told."""
        source = block.source
        block.lost = (
            f"is at version {source.guard._version}; expected version {source.version} instead"
        )
        block.alias = block.parcel = None
        self._leave_place(block)
        self._tell_of("lose", block)

    def _return_to_place(self, block: Block) -> None:
        block.parcel = None
        self.keep_bytes += block.nbytes - block.kept
        block.kept = block.nbytes
        self._tell_of("return", block)

    def _break(self, failure: BaseException) -> None:
        number = getattr(failure, "errno", None) or errno.EIO
        kind = StashFullError if number == errno.ENOSPC else StashIOError
        text = str(failure)
        # Made anew each time: a kept exception would keep the frames that it passed through.
        self._broken = lambda: kind(number, f"{text}; nothing more is sent there")
        if not self._raises:
            self._tell(self._broken())


def _is_kept(block: Block) -> int:
    return block.kept


def _judged_by(lane: Lane, flight: _Flight) -> bool:
    return flight.lane is None or lane.may_land(flight.lane) or flight.cargo() is None


def _write(store: Store, slot: Any, address: int, owner: object) -> None:
    """On a worker: ``owner`` keeps the memory at ``address`` alive until the write has ended."""
    with profiled("write"):
        store.write(slot, address)


def _write_and_tell(
    tape: Tape,
    what: tuple[int, int, str] | None,
    store: Store,
    slot: Slot,
    address: int,
    owner: object,
) -> None:
    began = time.perf_counter()
    _write(store, slot, address, owner)
    tape.tell("write", *(what or (slot.nbytes,)), began=began)
