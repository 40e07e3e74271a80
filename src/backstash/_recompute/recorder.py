"""Begin and end the tape that records a thread's operations inside a context of its stash.

A tape records only where a block may be recomputed: the stash's policy has asked for it, its plan does, or the
stash is measuring a step. A tape begins when a context is entered, or with the first save of a step inside a
context; it misses the operation that made this save. It ends with the context, when the outermost module in
which something was saved returns, or when backward first uses a saved tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from .._core.hook_scope import Removable
from .._core.session import Session
from .._saved.block import Block
from .._saved.entry import Entry
from .._saved.thread_state import ThreadState
from .._saved.view import StridedRegion, reason_to_stay
from .._torch.dispatch import count_dispatch_modes, dual_level
from .._torch.dynamo import leave_untraced
from .._torch.engine import in_backward
from .._torch.modules import call_frame, mark_outermost_call
from .blocks import MOST_OPERATIONS, InPlace, Replay, slice_of
from .context_tape import ContextTape
from .naming import Naming
from .operations import Outside, Place, State, copied, is_small
from .tape import UNSEEN, Leaver

__all__ = ["Recorder"]

_FIRST_CONTEXTS = 2
"""After this many contexts without a request to recompute, tapes are no longer begun for a policy."""


class Recorder:
    """The tapes of one stash, and the replays that they allow.

    Args:
        session: the stash's session.
        asks: whether the stash has a policy, which may ask to recompute a block.
        attach: see :class:`Naming`; ``None``: only modules that the program names are recomputed.
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
        """Whether the program named modules, so that a plan recomputes nothing else."""
        self._naming: Naming | None = None if attach is None else Naming(attach)
        self._asks = asks
        self._contexts = 0
        self._marked = -1  # step of the last tape that ends when a module returns
        self._has_asked = False

    def _is_wanted(self) -> bool:
        if self._has_asked or (self._asks and self._contexts < _FIRST_CONTEXTS):
            return True
        if self.only_modules:
            return False
        has_ended = self._session.predictor.is_used
        for each in self._session.planners.values():
            if each.may_recompute(has_ended=has_ended):
                return True
        return False

    def saw(self, modules: Sequence[nn.Module], path: str, nbytes: int) -> None:
        """See :meth:`Naming.saw`."""
        if self._naming is not None and not self.only_modules:
            self._naming.saw(modules, path, nbytes)

    def set_modules(self, *, on: bool) -> None:
        """Start or stop recomputing modules that the program did not name, as the plan requires."""
        naming = self._naming
        if naming is None or self.only_modules:
            return
        if on:
            naming.begin()
        else:
            naming.end()

    def entered(self, thread_state: ThreadState, frame: FrameType | None) -> None:
        """Begin a tape if needed: this thread enters a context, or with ``frame`` a module's call."""
        self._drop_stale(thread_state)
        if thread_state.tape is None and self._is_wanted():
            self._begin(thread_state, frame)

    def left(self, thread_state: ThreadState) -> None:
        """End the tape if this thread has left its outermost context."""
        tape = thread_state.tape
        if not thread_state.scopes and tape is not None and tape.is_of_context:
            self._contexts += 1
            self.end(thread_state)

    def saves(self, thread_state: ThreadState) -> ContextTape | None:
        """Return the context's tape for a tensor that is about to be saved. Each step gets its own."""
        tape: ContextTape | None = thread_state.tape
        if tape is not None and not tape.is_of_context:
            return None  # of a module's forward; it is paused while this runs
        is_old = tape is not None and tape.number != self._session.predictor.next_pass
        if tape is not None and (is_old or not tape.is_recording):
            self.end(thread_state)
            tape = None
        if tape is None and thread_state.scopes and not in_backward() and self._is_wanted():
            if call_frame() is not None or self._marked != self._session.predictor.next_pass:
                self._begin(thread_state, thread_state.scopes[0].frame)
        tape = thread_state.tape
        if tape is not None and tape.frame is None and not tape.is_marked:
            # Backward usually runs after the model returns, and no mode may be active then.
            tape.is_marked = mark_outermost_call(functools.partial(Leaver, tape))
            if tape.is_marked:
                self._marked = tape.number
        return tape

    def _begin(self, thread_state: ThreadState, frame: FrameType | None) -> None:
        if count_dispatch_modes() or dual_level() >= 0:
            return  # the program's mode may change what operations compute, and the tape changes some tangents
        tape = thread_state.tape = ContextTape(MOST_OPERATIONS)
        tape.number, tape.frame = self._session.predictor.next_pass, frame
        tape.enter()

    def _drop_stale(self, thread_state: ThreadState) -> None:
        tape = thread_state.tape
        if tape is not None and not tape.is_recording:
            self.end(thread_state)

    def end(self, thread_state: ThreadState) -> None:
        """Stop recording what this thread computes."""
        tape, thread_state.tape = thread_state.tape, None
        if tape is not None:
            tape.leave()
            tape.end()

    def replay_of(
        self, tensor: Tensor, thread_state: ThreadState, *, unsaved: bool = True
    ) -> tuple[Replay | None, str]:
        """Return the replay that computes the storage of ``tensor``; or ``None`` and the reason why none can.

        Args:
            tensor: the tensor that autograd saves.
            thread_state: of this thread.
            unsaved: whether a replay may read a parameter that no operation saved. Plain PyTorch raises no
                error where such a parameter is changed before backward.
        """
        self._has_asked = self._has_asked or self._asks
        tape: ContextTape | None = thread_state.tape
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
    """Return an operand of a replay if something else holds it or it is small enough to copy."""

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
            saved = None  # its memory was overwritten
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
            if outside.copy is None:  # a buffer, say, which may be written in place
                outside.copy = copied(small)[0]
            return outside.copy
        return held if saved is not None else None


def _all_of(storage: Any) -> Place:
    return torch.uint8, (storage.nbytes(),), (1,), 0, False, False


def _flat(storage: Any, state: State) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=state.device).set_(storage)


def _fills(made: Tensor) -> bool:
    """Whether the elements of ``made`` fill its storage without gaps or overlap."""
    if reason_to_stay(made) or made.storage_offset():
        return False
    if made.nbytes != made.untyped_storage().nbytes():
        return False
    return made.is_contiguous() or StridedRegion(made).nbytes == made.nbytes


leave_untraced(__name__)
