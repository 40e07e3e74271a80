"""Taking the stash's hooks off for the rest of a context, where the step fits well within the budget.

A hook is a call of Python for each tensor, when it is saved and when it is used. In a step of many small
operations that is more than the hundredth that a step may take longer which fits. So where a step that begins
like those before it leaves a tenth of the budget free, or any step would fit if it took twice as much, its
first blocks are enough to know when its backward runs, and PyTorch saves the rest without a hook. The next step
begins with a look at the most that the process ever held: one step at most exceeds the budget unseen.

Nothing puts them on again but the next ``with stash:``. So they are taken off only in a context of which it is
known that it has one step: the last one that the same statement entered had one.
"""

from __future__ import annotations

from .._saved.thread_state import ThreadState
from .._torch.hook_stack import Scope, Site, take_off
from .session import Session

__all__ = ["HooksOff"]


class HooksOff:
    """Takes the hooks of one stash off its threads.

    Args:
        session: of the stash.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._single: set[Site] = set()  # statements whose last context had one step

    def entered(self, scope: Scope, site: Site) -> None:
        """A thread has entered a context, by the statement at ``site``."""
        scope.site, scope.passes = site, self._session.predictor.passes

    def left(self, scope: Scope) -> None:
        """A thread has left a context, perhaps one that :meth:`entered` was not told of."""
        begun = self._session.predictor.passes - scope.passes
        if scope.site is None or not begun:
            return
        if begun == 1:
            self._single.add(scope.site)
        else:
            self._single.discard(scope.site)

    def consider(self, thread_state: ThreadState) -> None:
        """A block of this thread was admitted, and all that follows stays: take the hooks off, if they are not
        needed in this step. The caller holds the stash's lock."""
        session, scopes = self._session, thread_state.scopes
        if not scopes or scopes[-1].site not in self._single or session.event_log.on:
            return
        if thread_state.off_pass == session.predictor.passes:
            return  # this may be another step, while the blocks of that one are held and not used
        for tiers in session.device_tiers:
            planner = session.planner_at_work(tiers)
            known = planner is not None and planner.fits_unseen()
            if not known and (planner is not None or tiers.evictor.resident.peak_bytes):
                return
        if not take_off(scopes[-1]):
            return
        thread_state.times_off += 1
        thread_state.off_pass = session.predictor.passes
        for planner in session.planners.values():
            planner.take_rest_as_known()
