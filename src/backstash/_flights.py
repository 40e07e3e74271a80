"""The window on the way down: writes that began and have not landed.

What is in flight is written straight from the tensor's memory, which stays alive until then. It *lands*
when a thread that may judge the copy (see ``_lanes``) finds that the write has ended and the version has
not changed: only then is the memory let go. A version that changed in between means that nobody can know
which bytes were written: the block is lost, and backward raises if it ever asks for it. A write that failed
leaves the block where it was.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from ._blocks import Block
from ._events import Tape, profiled
from ._keep import Keep
from ._lanes import Lane
from ._parcels import Segment
from ._refusals import Refusals
from ._remains import ParcelRemains
from ._streams import Copy
from ._workers import Work

__all__ = ["Flights"]


@dataclass(slots=True, eq=False)
class _Flight:
    """A write that began and has not landed. It does not own the block: a dead one just lands empty."""

    cargo: weakref.ref[Block] | weakref.ref[Segment]
    nbytes: int
    lane: Lane | None  # whose tensor it is; None for bytes that are the stash's own copy
    writing: Work | Copy


class Flights:
    """Keeps the ``inflight`` budget. The caller holds the stash's lock.

    Args:
        keep: what is in place, where a block may return to.
        refusals: is told of a write that failed.
        freed: is told of bytes that were let go.
        tape: is told what lands and who waits, where somebody records.
        window_bytes: the budget.
    """

    def __init__(
        self,
        keep: Keep,
        refusals: Refusals,
        freed: Callable[[int], None],
        tape: Tape,
        *,
        window_bytes: int,
    ) -> None:
        self._keep = keep
        self._refusals = refusals
        self._freed = freed
        self._tape = tape
        self.window_bytes = window_bytes
        self._flights: deque[_Flight] = deque()  # oldest first
        self._flying = Counter[Lane | None]()  # how many of them are whose
        self._dead: deque[object] = deque()  # of copies, since all of them were looked at
        self._dies = self._dead.append  # where a block dies no Python may run: see _remains
        # Also what was copied into a segment that nobody writes yet.
        self.nbytes = self.peak_bytes = 0
        self.written_bytes = 0
        self.stall_seconds = 0.0

    @property
    def is_one(self) -> bool:
        """Whether there is a window, and one write alone is in it."""
        return self.window_bytes > 0 and len(self._flights) == 1

    def has_room(self, nbytes: int) -> bool:
        """Whether ``nbytes`` more fit into the window."""
        return self.nbytes + nbytes <= self.window_bytes

    def count(self, nbytes: int) -> None:
        """So many are on their way from now on."""
        self.written_bytes += nbytes
        self.nbytes += nbytes

    def add(self, block: Block, writing: Work | Copy) -> None:
        """The write from a block's own memory has begun."""
        self._flights.append(self._flight_of(block, writing))
        self._flying[block.lane] += 1
        self.count(block.nbytes)

    def _flight_of(self, block: Block, writing: Work | Copy) -> _Flight:
        is_copy = isinstance(writing, Copy)
        cargo = weakref.ref(block, self._dies) if is_copy else weakref.ref(block)
        return _Flight(cargo, block.nbytes, block.lane, writing)

    def add_segment(self, segment: Segment, writing: Work) -> None:
        """The write of a segment, whose bytes are counted, begins."""
        left = segment.remains
        self._flights.append(_Flight(weakref.ref(segment), left.flown, None, writing))
        self._flying[None] += 1
        left.flown = 0  # the flight counts them now

    def make_room(self, nbytes: int, lane: Lane) -> None:
        """Wait until ``nbytes`` more fit into the window, or nothing in it can be waited for."""
        self._empty_to(self.window_bytes - nbytes, lane)

    def let_go(self, nbytes: int, lane: Lane) -> None:
        """Let the memory of so many bytes go now, as far as that can be waited for."""
        self._empty_to(self.nbytes - nbytes, lane)

    def _empty_to(self, nbytes: int, lane: Lane) -> None:
        while self.nbytes > nbytes:
            mine = next((f for f in self._flights if _judged_by(lane, f)), None)
            if mine is None:
                return
            self.wait(mine.writing)
            self.land(lane, all_that_ended=True)

    def wait(self, writing: Work | Copy) -> None:
        """Wait for one write, and count the time."""
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

    def finish(self, lane: Lane) -> None:
        """Wait for every copy that has begun, and land what this thread may judge."""
        for flight in self._flights:
            if isinstance(flight.writing, Copy):
                flight.writing.wait()
        self.land(lane, all_that_ended=True)

    def land(self, lane: Lane, *, all_that_ended: bool = False) -> None:
        """Let go of the memory of every write that has ended, as far as this thread may judge it.

        On an accelerator only as far as ``keep`` asks for it, unless ``all_that_ended``: what is still
        there when backward comes need not be brought back.
        """
        flights, passed = self._flights, deque[_Flight]()
        looks_at_all = 2 * len(self._dead) >= len(flights)
        if looks_at_all:
            self._dead.clear()
        try:
            while flights:
                flight = flights.popleft()
                passed.append(flight)  # until it has landed
                cargo, is_mine = flight.cargo(), _judged_by(lane, flight)
                lingers = (
                    not all_that_ended
                    and cargo is not None
                    and not self._keep.wants_room(self.nbytes)
                )
                if is_mine and not lingers and (flight.writing.done() or _abandoned(flight)):
                    if cargo is not None:
                        self._touch_down(cargo, flight)
                    self._end(passed.pop())
                    continue
                # A device's copies end in order: after one that has not ended, none has. Nor need a thread
                # that has none of its own look at those of others, or anybody at those that stay. Only
                # the dead among them are let go, each time that they may be half of all.
                has_not_ended = is_mine and not lingers
                of_no_concern = not all_that_ended and (lingers or lane not in self._flying)
                if isinstance(flight.writing, Copy) and (
                    has_not_ended or (of_no_concern and not looks_at_all)
                ):
                    break
        finally:
            flights.extendleft(reversed(passed))

    def _end(self, flight: _Flight) -> None:
        if isinstance(flight.writing, Copy):
            flight.writing.release()
        self.nbytes -= flight.nbytes
        self._flying[flight.lane] -= 1
        if not self._flying[flight.lane]:
            del self._flying[flight.lane]
        self._freed(flight.nbytes)

    def _touch_down(self, cargo: Block | Segment, flight: _Flight) -> None:
        writing = flight.writing
        failure = None
        if not isinstance(writing, Copy):
            failure = writing.exception()
        if isinstance(cargo, Block) and cargo.has_moved:
            self._keep.take_back(cargo)  # whatever was written, or could not be
        elif isinstance(cargo, Segment):
            if failure is None:
                cargo.buffer = None
            else:
                self._refusals.broke(failure)
        elif failure is not None:
            self._keep.take_back(cargo)
            self._refusals.broke(failure)
        elif cargo.source.changed:
            self._keep.lose(cargo)
        else:
            cargo.alias = None
            # What lands while it is copied is safe from the streams that wait, not from any other.
            cargo.unsure = isinstance(writing, Copy) and not writing.ended()
            if self._tape.on:
                self._tape.tell("land", *cargo.facts)

    def measure(self) -> None:
        """Between operations: while one runs, its tensors are the caller's."""
        self.peak_bytes = max(self.peak_bytes, self.nbytes)

    def restore(
        self, blocks: list[Block], segments: list[Segment], remains: list[ParcelRemains]
    ) -> list[Work]:
        """Make the books anew from what there is: see ``_repair``.

        Args:
            blocks: that are alive, oldest first.
            segments: that carry some of them; all have a write but the one that is being filled.
            remains: of all parcels, the dead ones that are yet to be settled too.

        Returns the writes that perhaps no worker was given.
        """
        known = {id(cargo): flight for flight in self._flights if (cargo := flight.cargo())}
        flights = deque(flight for flight in self._flights if flight.cargo() is None)
        for block in blocks:
            if block.alias is not None and block.parcel is not None:
                writing = block.parcel.remains.writing
                flights.append(known.get(id(block)) or self._flight_of(block, writing))
        for segment in segments:
            left, flight = segment.remains, known.get(id(segment))
            if segment.buffer is None or left.writing is None:
                continue
            if flight is None and left.writing.error is None:
                flight = _Flight(weakref.ref(segment), left.flown, None, left.writing)
            if flight is not None:
                flights.append(flight)
                left.flown = 0
        self._flights = flights
        self._flying = Counter(flight.lane for flight in flights)
        self.nbytes = sum(flight.nbytes for flight in flights)
        self.nbytes += sum(left.flown for left in remains)
        works = [flight.writing for flight in flights if isinstance(flight.writing, Work)]
        return [work for work in works if not work.done()]


def _abandoned(flight: _Flight) -> bool:
    """A dead block's write that has not begun is not worth doing."""
    return flight.cargo() is None and flight.writing.cancel()


def _judged_by(lane: Lane, flight: _Flight) -> bool:
    return flight.lane is None or lane.may_land(flight.lane) or flight.cargo() is None
