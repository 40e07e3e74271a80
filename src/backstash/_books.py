"""The books: what is held and what has died, shared by the way down and the way up."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from ._blocks import Block
from ._down import sequence_number
from ._events import Tape
from ._guard import Guard
from ._lanes import Counts, Lane
from ._order import Order
from ._remains import BlockRemains, Grave, HostRemains, ParcelRemains
from ._repair import repair
from ._sides import Side
from .memory import spare_bytes

__all__ = ["Books"]


class Books:
    """The lock, the budgets and the queue of what died. Everything but ``is_forked`` wants the lock held.

    Whoever writes in them does so within ``with books.lock, books.guard:``.
    """

    def __init__(
        self,
        cpu: Side,
        grave: Grave,
        lock: Any,
        guard: Guard,
        tape: Tape,
        make: Callable[..., Side | str],
        *,
        keep: int | str | None,
    ) -> None:
        self.guard = guard
        guard.mended_by(self._repair)
        self.sides: list[Side] = []
        # Of the sides that are yet to come, too; "auto" follows the memory that is free.
        self._keep = keep
        self._followed = 0  # rounds that had begun when it last did
        self.lanes: list[Lane] = []
        self._ended = Counts()  # of the threads that have ended
        self._side_of: dict[torch.device, Side | str] = {}
        self._make = make
        self.grave = grave
        self.lock = lock
        self.order = Order()
        self._tape = tape
        self.blocks_alive = 0
        self._pid = self._forked_pid = os.getpid()
        self.put(torch.device("cpu"), cpu)

    def _repair(self) -> None:
        repair(self, self.lanes)

    def is_forked(self) -> bool:
        """Whether this is a child process; there the threads are gone, and whoever held the lock."""
        pid = os.getpid()
        if pid != self._forked_pid:
            self._forked_pid = pid
            self.lock = threading.RLock()
            self.guard.forget()
            for side in self.sides:
                side.up.forked(self.lock)
        return pid != self._pid

    def side_of(self, device: torch.device) -> Side | str:
        """The side of a device, or the reason why it has none. Takes the lock itself."""
        side = self._side_of.get(device)
        if side is None:
            with self.lock:
                if device not in self._side_of:
                    made = self._side_of[device] = self._make(device, len(self.sides))
                    if not isinstance(made, str):
                        self._begin(made)
                side = self._side_of[device]
        return side

    def put(self, device: torch.device, side: Side) -> None:
        """From now on, tensors of ``device`` are of ``side``."""
        self._side_of[device] = side
        self._begin(side)

    def _begin(self, side: Side) -> None:
        self.sides.append(side)
        self._limit(side)

    def limit(self, keep: int | str | None) -> None:
        """From now on, keep at most so many bytes in place on each device.

        ``None``: no limit; ``"auto"``: half of what its memory has free when a step begins.
        """
        self._keep = keep
        for side in self.sides:
            self._limit(side)

    def _limit(self, side: Side) -> None:
        side.down.keep.set_limit(0 if isinstance(self._keep, str) else self._keep)
        self._follow(side)

    def land(self, lane: Lane) -> None:
        """See :meth:`Flights.land`."""
        for side in self.sides:
            side.down.flights.land(lane)

    def settle(self, lane: Lane, *, ended: bool = False) -> None:
        """Bring the budgets in order for what waits on ``lane``, if the operation that saved it has ended.

        Raises ``StashFullError`` if the caller wants it; what was not yet looked at waits on.
        """
        while lane.waiting and (ended or lane.operation != sequence_number()):
            waiting, at_once = lane.waiting.popleft()
            block = waiting()
            if block is not None and block.remains.kept:
                block.side.down.apply(lane, block, at_once)

    def new_lane(self) -> Lane:
        """A lane for this thread. Those of threads that have ended are closed, and need not be kept."""
        for lane in [lane for lane in self.lanes if not lane.thread.is_alive()]:
            self.lanes.remove(lane)
            self._ended += lane.counts
            self.adopt(lane)
        lane = Lane()
        self.lanes.append(lane)
        return lane

    def counts(self) -> Counts:
        """What all threads have given to the stash so far."""
        return sum((lane.counts for lane in self.lanes), self._ended)

    def adopt(self, lane: Lane) -> None:
        """Of a thread that has ended: what waits there may go when a budget next asks."""
        for waiting, _ in lane.waiting:
            block = waiting()
            if block is not None:
                block.side.down.keep.queue.append(block)
        lane.waiting.clear()

    def _follow(self, side: Side) -> None:
        """With ``keep="auto"``: half of what its memory has free, with what it keeps already."""
        if self._keep != "auto" or (side.device is not None and side.device.is_capturing()):
            return
        free = side.device.free_bytes() if side.device is not None else spare_bytes()
        side.down.keep.follow(free)

    def ease(self) -> None:
        """See :meth:`Down.ease`."""
        for side in self.sides:
            side.down.ease()

    def try_again(self) -> None:
        """See :meth:`Refusals.try_again`."""
        for side in self.sides:
            side.down.refusals.try_again()

    def add(self, block: Block) -> None:
        """A block that is held from now on."""
        self.order.add(block)
        if self._followed != self.order.rounds:
            self._followed = self.order.rounds
            for side in self.sides:
                self._follow(side)
        self.blocks_alive += 1

    def drain(self) -> None:
        """Settle what died since the last call."""
        grave, running, before = self.grave, 0, self.blocks_alive
        while len(grave) > running:
            left = grave[0]
            if isinstance(left, ParcelRemains) and _is_written_to(left):
                grave.rotate(-1)  # its slot is needed until then
                running += 1
                continue
            self._settle_death(left, self.sides[left.number])
            grave.popleft()
        if before and not self.blocks_alive:
            self._forget()

    def _settle_death(self, left: Any, side: Side) -> None:
        # What is settled is struck out in the same breath, so that nobody who comes after an interrupt, or
        # makes the books anew from all remains there are, counts it twice.
        held, left.held = left.held, 0
        side.up.ahead_bytes -= held
        if isinstance(left, BlockRemains):
            kept, left.kept, serial, left.serial = left.kept, 0, left.serial, -1
            side.down.keep.nbytes -= kept
            self.blocks_alive -= serial >= 0
            if self._tape.on:
                self._tape.tell("free", left.nbytes, serial, left.module)
        elif isinstance(left, HostRemains):
            assert side.host is not None
            side.host.rooms.bury(left)
        else:
            flown, left.flown, slot, left.slot = left.flown, 0, left.slot, None
            side.down.flights.nbytes -= flown
            if slot is not None:
                left.store.release(slot)

    def _forget(self) -> None:
        """No block is alive any more: nothing need be remembered of those that were."""
        self.order.forget()
        for side in self.sides:
            side.down.forget()
            side.up.forget()
            if side.host is not None:
                side.host.spills.forget()


def _is_written_to(left: ParcelRemains) -> bool:
    writing = left.writing
    return writing is not None and not (writing.done() or writing.cancel())
