"""Compute derived blocks of the CPU ahead of need: a worker recomputes or decodes them.

This happens only if the worker has a core to itself: PyTorch's own threads use at most half of the cores. The
worker uses the same thread count as the thread that runs backward, since the way elements are divided among
threads decides their last bits. If its fingerprint differs anyway, the thread that needs the block computes it
again. The same happens if an operand was changed meanwhile, so errors are raised where the block is needed, as
without a worker.
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

_MOST_BEGUN = 2  # each holds its inputs


class Making:
    """The computation of one derived block on a worker. The block owns it; a worker only refers to it.

    Args:
        block: the block to compute.
        derivation: how to compute it.
        given: the inputs of ``derivation``.
        root: memory for the bytes, which begin at ``low``.
        low: offset of the block's first byte in ``root``.
        event_log: receives an event, while there is a recording.
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
        """Whether the bytes are complete and match the fingerprint of those that were freed."""
        self.work = Work(_make, weakref.ref(self), event_log, block.facts)

    def make(self, event_log: EventLog, facts: tuple[int, int, str]) -> None:
        """Compute the bytes on any thread that uses as many PyTorch threads as forward did."""
        derivation, began = self._derivation, time.perf_counter()
        if derivation.threads not in (None, torch.get_num_threads()):
            return
        out = self.root[self.low : self.low + self.nbytes]
        with without_function_modes(), without_dispatch(), torch.no_grad():
            derivation.make(self._given, out.view(derivation.dtype))
            known = derivation.fingerprint
            storage = self.root.untyped_storage()
            is_good = known is None or known == fingerprint(storage, self.low, self.nbytes)
        if event_log.on:
            event_log.emit("decode", *facts, cause=derivation.where, began=began)
        self._given = None  # only at the end: after an interrupt the bytes are computed again
        self.is_good = is_good


def _make(ref: weakref.ref[Making], event_log: EventLog, facts: tuple[int, int, str]) -> None:
    making = ref()
    if making is not None:  # its graph is alive
        making.make(event_log, facts)


class MadeAhead:
    """The blocks that are computed ahead of need. The caller holds the stash's lock.

    Args:
        workers: with one thread.
        pool: provides memory.
        ahead: counts the computed bytes.
        server: returns the views of entries.
        event_log: receives events, while there is a recording.
        is_off: whether to compute nothing ahead of need.
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
        """Whether any block is derived from others."""

    def has_time(self) -> bool:
        """Return whether a worker has a core to itself and few computations are queued."""
        if self.is_off or not self._workers.is_open or count_dispatch_modes() > 0:
            return False
        if 2 * torch.get_num_threads() > self._cores:
            return False
        self._begun = [each for each in self._begun if not each.finished]
        return len(self._begun) < _MOST_BEGUN

    def begin(self, block: Block, derivation: Derivation) -> bool:
        """Begin to compute ``block`` if its inputs are in memory. Return ``False`` without space for it."""
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
        """Return the saved view of the computed bytes; ``None`` if they differ or an error is due."""
        self.drop(block)
        if not making.is_good:
            # The bytes differ without an error: this worker computes differently, or the program writes to
            # tensors that it gets back. Computing twice gains nothing, so stop computing ahead of need.
            self.is_off = self.is_off or making.work.error is None
            return None
        if is_changed(derivation):
            return None
        return self._server.take(entry, block, None, making.root, None, making.low)

    def drop(self, block: Block) -> None:
        """Discard the computation of ``block``, if there is one."""
        if block.making is not None:
            block.making = None
            self._ahead.forget_bytes(block.cleanup)

    def _view_for_another(self, entry: Entry) -> Tensor:
        """Return the view of an entry that is in memory, for a computation that uses it."""
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
    """Return whether the bytes are in memory, without waiting for them or comparing them."""
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
    """Return whether an input of the derivation is known to have been modified in place."""
    for entry in derivation.entries:
        placement = entry.block.placement
        if placement.lost_at is not None or entry.was_changed:
            return True
        if placement.derivation is not None and is_changed(placement.derivation):
            return True
    return False


def _cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
