"""Remove the stash's hooks for the rest of a context, if the step fits well within the budget.

A hook is a Python call for each tensor that is saved or used. In a step of many small operations that costs
more than the 1 percent by which a step that fits may become slower. The rest of a step is saved without hooks
if the step begins like those before it, and these leave a tenth of the budget free, or the last 16 saved the
same; or if it would fit even if it took twice as much as any step so far. The first blocks are enough to know
when its backward runs. The next step begins by reading the peak of the process. So a step that suddenly saves
more may exceed the budget unseen, and the next few may exceed it while the allocator keeps what that step took.

Only the next ``with stash:`` installs the hooks again. So they are removed only in a context that is known to
have one step: the last context that the same statement entered had one. If this one then has several, all of
them go unseen.
"""

from __future__ import annotations

from .._saved.thread_state import ThreadState
from .._torch.hook_stack import Scope, Site, take_off
from .session import Session

__all__ = ["HooksOff"]


class HooksOff:
    """Removes the hooks of one stash from its threads.

    Args:
        session: the state of the stash.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._single: set[Site] = set()  # statements whose last context had one step

    def entered(self, scope: Scope, site: Site) -> None:
        """Record that a thread has entered a context by the statement at ``site``."""
        scope.site, scope.passes = site, self._session.predictor.passes

    def left(self, scope: Scope) -> None:
        """Record that a thread has left a context, perhaps one that was not passed to :meth:`entered`."""
        begun = self._session.predictor.passes - scope.passes
        if scope.site is None or not begun:
            return
        if begun == 1:
            self._single.add(scope.site)
        else:
            self._single.discard(scope.site)

    def consider(self, thread_state: ThreadState) -> None:
        """Remove the hooks if this step does not need them: a block of this thread was added, and everything
        that follows stays. The caller holds the stash's lock."""
        session, scopes = self._session, thread_state.scopes
        if not scopes or scopes[-1].site not in self._single or session.event_log.on:
            return
        if thread_state.off_pass == session.predictor.passes:
            return  # this may be another step, if the blocks of that one are alive and unused
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
