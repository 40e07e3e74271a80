"""Which tape records what a thread computes in a context of its stash, and what that can compute again.

A tape is on only where something may be recomputed: the stash's policy answers so, or its plan does, or a step
is measured. It begins with a context, or with the first save of a step inside one, whose own operation it does
not see. It ends with the context, when the outermost module's forward returns in which something was saved, or
when backward begins to use what was saved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from .._core.session import Session
from .._saved.block import Block
from .._saved.entry import Entry
from .._saved.thread_state import ThreadState
from .._saved.view import StridedRegion, reason_to_stay
from .._torch.dispatch import count_dispatch_modes
from .._torch.dynamo import leave_untraced
from .._torch.engine import in_backward
from .._torch.modules import call_frame, mark_outermost_call
from .blocks import MOST_OPERATIONS, InPlace, Replay, slice_of
from .naming import Naming, Removable
from .tape import UNSEEN, Leaver, Outside, Place, State, Tape, copied, is_small

__all__ = ["Recorder"]

_FIRST_CONTEXTS = 2
"""In so many contexts a policy is listened to before it is taken to recompute nothing."""


class Recorder:
    """Of one stash.

    Args:
        session: of the stash.
        asks: whether a policy is asked, which may answer so.
        attach: see :class:`Naming`; ``None``: no module is recomputed but those that are named.
    """

    def __init__(
        self,
        session: Session,
        *,
        asks: bool,
        attach: Callable[[Sequence[nn.Module]], Removable | None] | None = None,
    ) -> None:
        self._session = session
        self.only_modules = False
        """Whether modules were named, so that a plan is to have nothing else recomputed."""
        self._naming: Naming | None = None if attach is None else Naming(attach)
        self._asks = asks
        self._contexts = 0
        self._marked = -1  # the step of the last tape that ends with a module's call
        self._has_asked = False

    def _is_wanted(self) -> bool:
        if self._has_asked or (self._asks and self._contexts < _FIRST_CONTEXTS):
            return True
        if self.only_modules:
            return False
        planners, has_ended = self._session.planners, self._session.predictor.is_used
        return any(each.may_recompute(has_ended=has_ended) for each in planners.values())

    def saw(self, modules: Sequence[nn.Module], path: str, nbytes: int) -> None:
        """See :meth:`Naming.saw`."""
        if self._naming is not None and not self.only_modules:
            self._naming.saw(modules, path, nbytes)

    def set_modules(self, *, on: bool) -> None:
        """Whether the forwards of modules that nobody named may be recomputed, as a plan has it."""
        naming = self._naming
        if naming is None or self.only_modules:
            return
        if on:
            naming.begin()
        else:
            naming.end()

    def entered(self, thread_state: ThreadState, frame: FrameType | None) -> None:
        """This thread enters a context of the stash; ``frame``: of a module's call."""
        self._drop_stale(thread_state)
        if thread_state.tape is None and self._is_wanted():
            self._begin(thread_state, frame)

    def left(self, thread_state: ThreadState) -> None:
        """This thread has left one."""
        tape = thread_state.tape
        if not thread_state.scopes and tape is not None and tape.is_of_context:
            self._contexts += 1
            self.end(thread_state)

    def saves(self, thread_state: ThreadState) -> Tape | None:
        """A tensor is about to be saved: the tape that is on. A step has one of its own."""
        tape: Tape | None = thread_state.tape
        if tape is not None and not tape.is_of_context:
            return tape  # of a module's forward, in which it is off while this runs
        is_old = tape is not None and tape.number != self._session.predictor.next_pass
        if tape is not None and (is_old or not tape.is_recording):
            self.end(thread_state)
            tape = None
        if tape is None and thread_state.scopes and not in_backward() and self._is_wanted():
            if call_frame() is not None or self._marked != self._session.predictor.next_pass:
                self._begin(thread_state, thread_state.scopes[0].frame)
        tape = thread_state.tape
        if tape is not None and tape.frame is None and not tape.is_marked:
            # Backward mostly comes when the model has returned, and no mode may be active then.
            tape.is_marked = mark_outermost_call(functools.partial(Leaver, tape))
            if tape.is_marked:
                self._marked = tape.number
        return tape

    def _begin(self, thread_state: ThreadState, frame: FrameType | None) -> None:
        if count_dispatch_modes():
            return  # a mode of the program's may change what operations compute
        tape = thread_state.tape = Tape(most=MOST_OPERATIONS)
        tape.number, tape.frame = self._session.predictor.next_pass, frame
        tape.enter()

    def _drop_stale(self, thread_state: ThreadState) -> None:
        tape = thread_state.tape
        if tape is not None and not tape.is_recording:
            self.end(thread_state)

    def end(self, thread_state: ThreadState) -> None:
        """Record no more of what this thread computes."""
        tape, thread_state.tape = thread_state.tape, None
        if tape is not None:
            tape.leave()
            tape.end()

    def replay_of(
        self, tensor: Tensor, thread_state: ThreadState, *, unsaved: bool = True
    ) -> tuple[Replay | None, str]:
        """How the storage of ``tensor`` can be computed again; or ``None``, and why it cannot.

        Args:
            tensor: that autograd saves.
            thread_state: of this thread.
            unsaved: whether a parameter may be relied on that no operation saved. Plain PyTorch does not mind
                where it is changed before backward.
        """
        self._has_asked = self._has_asked or self._asks
        tape: Tape | None = thread_state.tape
        if tape is None or (self.only_modules and not self._asks):
            return None, UNSEEN
        base = tensor._base
        made = tensor if base is None else base
        if made.dtype != tensor.dtype or made.is_conj() or made.is_neg() or not _fills(made):
            return None, "it does not fill its storage"
        found, reason = slice_of(tape, made, _Operands(unsaved=unsaved))
        if found is None:
            return None, reason
        state = tape.state_of(made)
        assert state is not None
        replay = Replay(found, made, state)
        memory = {block(): source for block, source in thread_state.latest}
        replay.sources = tuple(
            memory.get(each.block) if type(each) is Entry else None for each in replay.operands
        )
        return replay, ""


class _Operands:
    """Gives the operands of a replay, where they are held anyway, or small enough to be copied."""

    def __init__(self, *, unsaved: bool) -> None:
        self._unsaved = unsaved

    def __call__(self, state: State | None, place: Place, outside: Outside | None) -> object | None:
        """See :class:`~backstash._recompute.blocks.Slice`."""
        if state is None:
            return None
        saved = state.saved() if state.saved is not None else None
        if type(saved) is Block:
            return Entry.at(saved, state.device, place)
        if state.is_over:
            saved = None  # its memory has other bytes now
        if outside is not None and outside.is_lost:
            outside = None
        leaf = outside.leaf() if outside is not None and outside.leaf is not None else None
        kept = outside.kept() if outside is not None and outside.kept is not None else saved
        held: InPlace | None = None
        if leaf is not None or kept is not None:
            held = InPlace(leaf if leaf is not None else _flat(kept, state), place or _all_of(kept))
        if held is None or (leaf is not None and (self._unsaved or saved is not None)):
            return held
        small = held.value()
        if outside is not None and small is not None and is_small(small):
            if outside.packed is None:  # a buffer, say, which may be written where it is
                outside.packed = copied(small)
            copy: Tensor = outside.packed[0]
            return copy
        return held if saved is not None else None


def _all_of(storage: Any) -> Place:
    return torch.uint8, (storage.nbytes(),), (1,), 0, False, False


def _flat(storage: Any, state: State) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=state.device).set_(storage)


def _fills(made: Tensor) -> bool:
    """Whether every byte of its storage is an element's, once."""
    if reason_to_stay(made) or made.storage_offset():
        return False
    if made.nbytes != made.untyped_storage().nbytes():
        return False
    return made.is_contiguous() or StridedRegion(made).nbytes == made.nbytes


leave_untraced(__name__)
