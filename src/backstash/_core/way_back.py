"""The way back up: the tensor that autograd asks for, from wherever its bytes are.

:class:`WayBack` checks the version while the bytes are in place, and loads or recomputes them otherwise. The
errors below are what backward raises when a saved tensor is unavailable: which one, whose, why, and what to do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._saved.entry import Entry, written_unseen
from .._saved.placement import Derivation
from .._text import clean
from .._tiers.device_tiers import DeviceTiers
from .._tiers.packing import decode_separately
from .._torch.engine import task_or_none
from .._torch.versions import inplace_error
from ..errors import InplaceError, StashCorruptError, StashForkedError, StashIOError, UsageError
from .admission import Admission
from .session import Session

__all__ = ["WayBack", "changed"]


class WayBack:
    """Returns the views of saved tensors.

    Args:
        session: the state of the stash.
        admission: the stash's admission.
    """

    def __init__(self, session: Session, admission: Admission) -> None:
        self._session = session
        self._event_log = session.event_log
        self._admission = admission

    def timed_tensor_of(self, entry: Entry) -> Tensor:
        """Like :meth:`tensor_of`, in a measured step: exclude the time from the step's computing."""
        began = self._session.hook_begins(entry.device)
        try:
            return self.tensor_of(entry)
        finally:
            self._session.hook_took("unpack hook", began)

    def tensor_of(self, entry: Entry) -> Tensor:
        """Return the saved view.

        Raises:
            InplaceError: the tensor was modified in place, and its saved value is lost.
            StashIOError: the store cannot read the bytes; a later call may succeed.
        """
        session, block = self._session, entry.block
        if block.cleanup.mark is not session.reclaim_queue.mark or session.section.is_nested():
            return self._tensor_separately(entry)
        tiers = session.device_tiers[block.number]
        if tiers.device is not None and tiers.device.is_capturing():
            return self._tensor_captured(entry)
        thread_state = getattr(session.local, "thread_state", None) or session.thread_state()
        section, prefetcher = session.section, tiers.prefetcher
        with section.lock, section:
            if session.reclaim_queue:
                session.drain()
            for each in session.device_tiers:
                if each.evictor.inflight.writes:
                    each.evictor.inflight.complete(thread_state)
            if session.planners and block.number in session.planners:
                planner = session.planners[block.number]
                if planner.note_used(entry.nbytes):
                    tiers.evictor.shrink(thread_state)
                if planner.modules_wanted is not None:
                    self._admission.set_modules(planner)
            placement, source = block.placement, entry.source
            is_part = source is not block.storage_version
            # As Entry.was_changed, inlined; the memory may also have been freed, perhaps while it was copied.
            if placement.alias is not None or placement.is_unordered or is_part:
                if source.changed:
                    if is_part:
                        raise _lost(entry, source.probe._version)
                    tiers.evictor.resident.lose(block)
                    placement = block.placement
            if placement.lost_at is not None:
                raise _lost(entry, placement.lost_at)
            session.predictor.use(
                block, builds_graph=torch.is_grad_enabled() and task_or_none() != -1
            )
            session.uses += 1
            if self._event_log.on and block.cleanup.packs is None:
                self._event_log.emit("use", entry.nbytes, *block.facts[1:])
            if entry.check is not None:
                if entry.check.differs():
                    raise written_unseen(entry)
                entry.check = None
            if placement.alias is not None:
                view: Tensor | None = entry.view_in_place(placement.alias)
            else:
                view = prefetcher.at_hand(entry)
            if view is not None:
                prefetcher.look_ahead(block)
                return view
            derivation = placement.derivation
            if derivation is None:
                load, mine = prefetcher.load(block)
        try:
            if derivation is not None:
                return self._derive(entry, derivation, tiers)
            return prefetcher.view(entry, load, mine=mine)
        except StashIOError as error:
            raise _unreadable(entry, error) from error

    def _tensor_separately(self, entry: Entry) -> Tensor:
        """Return the saved view without waiting for or changing shared state.

        This serves nested calls, and graphs of the parent process in a fork, as far as they are in memory.
        """
        block = entry.block
        placement = block.placement
        if entry.was_changed:
            raise _lost(entry, entry.source.probe._version)
        if placement.lost_at is not None:
            raise _lost(entry, placement.lost_at)
        check = entry.check
        if check is not None and check.differs():
            raise written_unseen(entry)
        if placement.alias is not None:
            return entry.view_in_place(placement.alias)
        derivation = placement.derivation
        if derivation is not None:
            given = derivation.given(self._tensor_separately)
            tiers = self._session.known_tiers.get(entry.device)
            device = None if tiers is None or isinstance(tiers, str) else tiers.device
            return entry.view_of(*decode_separately(entry, derivation, given, device))
        backing = placement.backing
        assert backing is not None
        is_ours = block.cleanup.mark is self._session.reclaim_queue.mark
        if not is_ours and backing.buffer is None:
            raise _another_process(entry)
        offset, address, nbytes = block.offset, block.address, block.nbytes
        try:
            root, low = backing.read_separately(offset, address, nbytes, entry.device)
        except StashIOError as error:
            raise _unreadable(entry, error) from error
        return entry.view_of(root, low)

    def _derive(self, entry: Entry, derivation: Derivation, tiers: DeviceTiers) -> Tensor:
        """Return the saved view of a block that is packed or discarded."""
        view = tiers.prefetcher.made(entry, derivation, self._used)
        if view is not None:
            return view
        try:
            given = derivation.given(self.tensor_of)
        except StashIOError as error:
            cause = error.__cause__
            raise (cause if isinstance(cause, StashIOError) else error) from None
        try:
            decoded = tiers.packer.decode(entry, derivation, given)
        except torch.OutOfMemoryError:
            tiers.prefetcher.free()
            decoded = tiers.packer.decode(entry, derivation, given)
        return tiers.prefetcher.serve_decoded(entry, *decoded)

    def _used(self, entry: Entry) -> None:
        """Count a use of ``entry``, from which another block was made ahead of need. Called in the section."""
        block = entry.block
        self._session.predictor.use(
            block, builds_graph=torch.is_grad_enabled() and task_or_none() != -1
        )
        self._session.uses += 1
        if self._event_log.on and block.cleanup.packs is None:
            self._event_log.emit("use", entry.nbytes, *block.facts[1:])

    def _tensor_captured(self, entry: Entry) -> Tensor:
        """Return a view of a block in place while a device graph is captured; nothing else is possible then."""
        block = entry.block
        with self._session.section.lock:
            alias = block.placement.alias
            if alias is not None and not entry.source.changed:
                return entry.view_in_place(alias)
        raise UsageError(
            f"the {str(entry.dtype).removeprefix('torch.')} tensor of shape {tuple(entry.shape)} that "
            f"{block.cleanup.module or 'no module'} saved before this capture was moved out of memory, "
            "and replaying the captured graph would not load it: capture forward and backward together"
        )


def changed(shape: Any, dtype: torch.dtype, module: str, found: int, saved: int) -> InplaceError:
    """Return the error for a saved tensor that was modified in place; plain PyTorch would raise, too."""
    where = clean(module) or (
        "an unknown module (tensors below min_bytes, or kept unmanaged by a budget, have no record; "
        "min_bytes=0 records small ones)"
    )
    remedy = "Change a clone, or change it before it is saved."
    return inplace_error(_named(shape, dtype, where), found, saved, remedy)


def _lost(entry: Entry, found: int) -> InplaceError:
    module, saved = entry.block.cleanup.module or "no module", entry.source.version
    return changed(entry.shape, entry.dtype, module, found, saved)


def _another_process(entry: Entry) -> StashForkedError:
    """Return the error for a forked process's backward: the parent still uses the space of the bytes."""
    name = _named(entry.shape, entry.dtype, clean(entry.block.cleanup.module) or "no module")
    return StashForkedError(
        f"{name} was moved out of memory by the parent process, which still uses that space: run "
        "backward in the parent process, or run forward again in this process"
    )


def _unreadable(entry: Entry, error: StashIOError) -> StashIOError:
    """Return the error for bytes that the store could not read, with ``error``'s type and number."""
    name = _named(entry.shape, entry.dtype, clean(entry.block.cleanup.module) or "no module")
    if isinstance(error, StashCorruptError):
        remedy = (
            "its value is lost: run this step's forward again; other graphs are not affected. If it "
            "happens repeatedly, the disk is damaged"
        )
    else:
        remedy = "nothing was changed: run the same backward again, or run forward again"
    return type(error)(error.errno, f"{error.strerror}. It was {name}: {remedy}.")


def _named(shape: Any, dtype: torch.dtype, module: str) -> str:
    kind = str(dtype).removeprefix("torch.")
    return f"the {kind} tensor of shape {tuple(shape)} that {module} saved"
