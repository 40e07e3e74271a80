"""Derived blocks of the CPU made ahead of need: a worker calls operations again, or decodes, while the thread
that goes backward computes.

The worker is asked only where it has a core to itself: PyTorch's own threads take no more than half of the
cores. It counts as many threads as that thread does, since how elements are divided decides their last bits,
and a block that it made otherwise (its fingerprint tells) is made anew by the thread that needs it. So is one
whose operand was changed meanwhile: errors are raised where the block is needed, as without a worker.
"""

from __future__ import annotations

import os
import time
import weakref
from typing import Any

import torch
from torch import Tensor

from .._device.fingerprint import fingerprint
from .._runtime.trace import EventLog
from .._runtime.workers import Work, Workers
from .._saved.block import Block
from .._saved.entry import Entry
from .._saved.placement import Derivation, NotAtHandError
from .._torch.dispatch import count_dispatch_modes, without_dispatch, without_function_modes
from ..launcher import Job
from ..stores._base import PAGE_BYTES
from ..stores._buffer_pool import BufferPool
from .ahead import AheadSet, ViewServer

__all__ = ["MadeAhead", "Making", "is_changed"]

_MOST_BEGUN = 2  # each holds what it is made from


class Making:
    """The bytes of one derived block on their way. The block owns it; a worker only refers to it.

    Args:
        block: to be made.
        derivation: of it.
        given: what that is given.
        root: memory for the bytes, which begin at ``low``.
        low: see there.
        event_log: is told, where somebody records.
    """

    __slots__ = ("__weakref__", "_derivation", "_given", "is_good", "low", "nbytes", "root", "work")

    def __init__(
        self,
        block: Block,
        derivation: Derivation,
        given: Any,
        root: Tensor,
        low: int,
        event_log: EventLog,
    ) -> None:
        self._derivation = derivation
        self._given = given
        self.nbytes = block.nbytes
        self.root = root
        self.low = low
        self.is_good = False
        """Whether the bytes are there, and are those that were let go."""
        self.work = Work(_make, weakref.ref(self), event_log, block.facts)

    def make(self, event_log: EventLog, facts: tuple[int, int, str]) -> None:
        """Make the bytes, on any thread that counts as many threads as forward's did."""
        derivation, began = self._derivation, time.perf_counter()
        if derivation.threads not in (None, torch.get_num_threads()):
            return
        out = self.root[self.low : self.low + self.nbytes]
        with without_function_modes(), without_dispatch(), torch.no_grad():
            derivation.make(self._given, out.view(derivation.dtype))
            told = derivation.fingerprint
            storage = self.root.untyped_storage()
            is_good = told is None or told == fingerprint(storage, self.low, self.nbytes)
        if event_log.on:
            event_log.emit("decode", *facts, cause=derivation.where, began=began)
        self._given = None  # after the end: who is interrupted makes them anew
        self.is_good = is_good


def _make(ref: weakref.ref[Making], event_log: EventLog, facts: tuple[int, int, str]) -> None:
    making = ref()
    if making is not None:  # its graph lives
        making.make(event_log, facts)


class MadeAhead:
    """The blocks that are made ahead of need. The caller holds the stash's lock.

    Args:
        workers: of one thread.
        pool: gives memory.
        ahead: counts what is made.
        server: gives entries the views of it.
        event_log: is told, where somebody records.
        is_off: never.
    """

    def __init__(
        self,
        workers: Workers,
        pool: BufferPool,
        ahead: AheadSet,
        server: ViewServer,
        event_log: EventLog,
        *,
        is_off: bool,
    ) -> None:
        self._workers = workers
        self._pool = pool
        self._ahead = ahead
        self._server = server
        self._event_log = event_log
        self._begun: list[Work] = []
        self._cores = _cores() // Job.now().local_processes
        self.is_off = is_off
        self.has_derived = False
        """Whether any block is made from others."""

    def has_time(self) -> bool:
        """Whether a worker has a core to itself, and is not at work for long."""
        if self.is_off or not self._workers.is_open or count_dispatch_modes() > 0:
            return False
        if 2 * torch.get_num_threads() > self._cores:
            return False
        self._begun = [each for each in self._begun if not each.finished]
        return len(self._begun) < _MOST_BEGUN

    def begin(self, block: Block, derivation: Derivation) -> bool:
        """Begin to make ``block``, where what it is made from is at hand; whether there was room."""
        if not self._ahead.fits(block.nbytes) or not self._ahead.has_memory(block.nbytes):
            return False
        if not all(map(_is_at_hand, derivation.entries)) or is_changed(derivation):
            return True
        low = block.address % PAGE_BYTES
        try:
            with without_function_modes(), torch.no_grad():
                given = derivation.given_ahead(self._view_for_another)
            root = self._pool.take(low + block.nbytes)
        except NotAtHandError:
            return True
        except MemoryError:
            return False
        making = block.making = Making(block, derivation, given, root, low, self._event_log)
        self._ahead.hold(block)
        self._begun.append(making.work)
        self._workers.begin(making.work)
        return True

    def take(
        self, entry: Entry, block: Block, making: Making, derivation: Derivation
    ) -> Tensor | None:
        """The saved view of what has been made; ``None``: it is not what it was, or raises an error."""
        self.drop(block)
        if not making.is_good:
            # Other bits came of it, with no error: this worker computes otherwise, or a program writes to what
            # is given back to it. Making twice gains nothing, so that no more is made ahead.
            self.is_off = self.is_off or making.work.error is None
            return None
        if is_changed(derivation):
            return None
        return self._server.take(entry, block, None, making.root, None, making.low)

    def drop(self, block: Block) -> None:
        """What was begun of it is not wanted any more."""
        if block.making is not None:
            block.making = None
            self._ahead.forget_bytes(block.cleanup)

    def _view_for_another(self, entry: Entry) -> Tensor:
        """The view of an entry that is at hand, for what is made from it."""
        block = entry.block
        placement, making = block.placement, block.making
        if placement.alias is not None:
            return entry.view_in_place(placement.alias)
        view = self._server.at_hand(entry)
        if view is None and making is not None and placement.derivation is not None:
            view = self.take(entry, block, making, placement.derivation)
        elif view is None and placement.backing is not None and placement.backing.load is not None:
            load = placement.backing.load
            view = self._server.take(entry, block, placement.backing, load.memory, load.arrival)
        if view is None:
            raise NotAtHandError
        return view


def _is_at_hand(entry: Entry) -> bool:
    """Whether the bytes are in memory, without waiting for them or comparing them."""
    block = entry.block
    placement, loaded = block.placement, block.loaded
    if placement.alias is not None:
        return not block.has_moved
    if loaded is not None:
        return loaded.is_good
    if block.making is not None:
        return bool(block.making.is_good)
    backing = placement.backing
    load = backing.load if backing is not None else None
    if block.mark is not None and block.mark.matched:
        return False
    return load is not None and load.is_ready and not load.memory._version


def is_changed(derivation: Derivation) -> bool:
    """Whether what a block is made from is known to have been changed in place."""
    for entry in derivation.entries:
        placement = entry.block.placement
        if placement.lost_at is not None or entry.was_changed:
            return True
        if placement.derivation is not None and is_changed(placement.derivation):
            return True
    return False


def _cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
