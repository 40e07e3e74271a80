"""Taking the stash's hooks off for the rest of a step, where twice the step fits within the budget.

A hook is a call of Python for each tensor, when it is saved and when it is used. In a step of many small
operations that is more than the hundredth that a step may take longer which fits. So where nothing that such a
step could still do would exceed the budget, its first blocks are enough to know when its backward runs, and the
rest is saved as PyTorch does it.

The hooks come back with the next ``with stash:``, or module that the stash is attached to, once a block was
used or freed since: that is the next step. In a context around many steps nothing tells but an optimizer. So
there they are taken off only if the thread has left a context, or an optimizer has stepped in it, since the
last step.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

from torch.optim import optimizer as torch_optimizer

from ._saved.thread_state import ThreadState
from ._session import Session
from ._torch.dynamo import not_compiled
from ._torch.hook_stack import current_pair, put_on, take_off

__all__ = ["HooksOff"]


class HooksOff:
    """Takes the hooks of one stash off its threads, and puts them on again.

    Args:
        session: of the stash.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._hears = False

    def consider(self, thread_state: ThreadState) -> None:
        """A block of this thread was admitted, and all that follows stays: take the hooks off, if they are not
        needed in this step. The caller holds the stash's lock."""
        session, scopes = self._session, thread_state.scopes
        if not scopes or session.event_log.on:
            return
        for tiers in session.device_tiers:
            planner = session.planner_at_work(tiers)
            known = planner is not None and planner.follower.fits_twice()
            if not known and (planner is not None or tiers.evictor.resident.peak_bytes):
                return
        self._hear()
        comes_back, thread_state.comes_back = thread_state.comes_back, False
        if not comes_back or not take_off(scopes[-1]):
            return
        thread_state.off_until = session.uses
        thread_state.times_off += 1
        for planner in session.planners.values():
            planner.follower.take_rest_as_known()

    def stays_off(self, thread_state: ThreadState) -> bool:
        """Whether a scope that is entered now is of a step in which they are off, and would be the only one."""
        session = self._session
        return (
            thread_state.off_until == session.uses
            and not session.reclaim_queue
            and not session.event_log.on
            and current_pair() is None
        )

    def _hear(self) -> None:
        """Of optimizers that step."""
        if not self._hears:
            self._hears = True
            heard = functools.partial(_stepped, weakref.ref(self))
            handle = torch_optimizer.register_optimizer_step_post_hook(heard)
            weakref.finalize(self, handle.remove).atexit = False

    def stepped(self) -> None:
        """An optimizer has stepped on this thread: the next step begins."""
        thread = threading.current_thread()
        for thread_state in self._session.thread_states.copy():
            if thread_state.thread() is thread and thread_state.scopes:
                thread_state.comes_back = True
                scope = thread_state.scopes[-1]
                # Where hooks of the program's are active, its contexts would pop these instead.
                if scope.is_off and current_pair() is None:
                    thread_state.off_until = -1
                    put_on(scope)


@not_compiled
def _stepped(hooks_off: weakref.ref[HooksOff], optimizer: Any, args: Any, kwargs: Any) -> None:
    alive = hooks_off()
    if alive is not None:
        alive.stepped()
