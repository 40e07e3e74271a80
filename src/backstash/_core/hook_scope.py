"""Push and pop the stash's hook pair: in order, on the right thread, and never left behind.

Autograd keeps a stack of hook pairs for each thread and pops the top one. So each scope is checked when it is
left. If it is not on top, its pair is removed from below the others, and the caller gets an error.

The forward of an attached module can end without running its forward hook (``KeyboardInterrupt``). Such a
scope is recognized by its call frame, which is no longer on the stack, and is removed by the next scope.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Protocol

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .._saved.thread_state import ThreadState
from .._text import clean, html_text
from .._torch.dynamo import untraced
from .._torch.func_transforms import left_aside, let_transforms_pass, stepped_aside_for
from .._torch.hook_stack import Scope, own_pack, take_out
from .._torch.modules import call_frame, is_running
from ..errors import UsageError

__all__ = [
    "Attachment",
    "Hook",
    "Removable",
    "abandon",
    "enter_scope",
    "leave_scope",
    "newest_scope",
]


def enter_scope(
    thread_state: ThreadState,
    pack: Callable[[Tensor], object],
    unpack: Callable[[Any], Tensor],
    frame: FrameType | None = None,
) -> None:
    """Push a hook pair for this thread, except inside a transform of ``torch.func`` that allows no hooks.

    Raises ``RuntimeError`` if hooks are disabled for another reason.
    """
    _clear_stale(thread_state)
    let_transforms_pass()
    scope = Scope(saved_tensors_hooks(pack, unpack), frame, stepped_aside_for(pack))
    try:
        thread_state.scopes.append(scope)
        if not scope.is_aside:
            scope.hooks.__enter__()
    except BaseException:
        abandon(thread_state, scope)
        raise


def newest_scope(thread_state: ThreadState) -> Scope | None:
    """Return the scope that this thread will leave next."""
    _clear_stale(thread_state)
    return thread_state.scopes[-1] if thread_state.scopes else None


def leave_scope(thread_state: ThreadState, frame: FrameType | None = None) -> None:
    """Pop the newest pair of this thread.

    Raises:
        UsageError: it was not on top (it is removed anyway), or it does not exist.
    """
    _clear_stale(thread_state)
    if not thread_state.scopes:
        raise UsageError("this thread exited a stash more often than it entered it")
    scope = thread_state.scopes[-1]
    if scope.frame is not frame:
        if frame is not None:  # a module's forward failed before the pre-hook could push a pair
            return
        raise UsageError("a stash was exited inside the forward of a module it is attached to")
    try:
        _take_out(scope)
        thread_state.scopes.pop()
    except BaseException:  # out of order, or an interrupt: the pair is removed anyway
        abandon(thread_state, scope)
        raise


def abandon(thread_state: ThreadState, scope: Scope) -> None:
    """Remove ``scope``, if it exists, even if other pairs are on top of it."""
    if scope in thread_state.scopes:
        thread_state.scopes.remove(scope)
    with suppress(UsageError):
        _take_out(scope)


def _clear_stale(thread_state: ThreadState) -> None:
    scopes = thread_state.scopes
    while scopes:
        newest = scopes[-1]
        if newest.frame is None or is_running(newest.frame):
            return
        with suppress(ValueError):  # a signal handler may have removed it just now
            scopes.remove(newest)
        with suppress(UsageError):  # the caller that left out of order already got the error
            _take_out(newest)


def _take_out(scope: Scope) -> None:
    if scope.is_aside:
        return
    pack = scope.hooks.pack_hook
    above = take_out(lambda pair: own_pack(pair) is pack)
    if above is None:
        if scope.is_off or left_aside(pack):
            return
        raise UsageError(
            "another saved-tensors context popped the stash's hooks: contexts were exited in the wrong "
            "order; exit them in the reverse of the order they were entered"
        )
    if above:
        raise UsageError(
            f"a stash was exited while {len(above)} saved-tensors context(s) entered after it were "
            "still active: exit them in the reverse order (the stash's hooks were removed, theirs "
            "remain)"
        )


class Hook:
    """A module hook. It is an object, so that its model can be copied and pickled.

    A copy of the model shares the stash. In a model that was unpickled, the hook does nothing.
    """

    def __init__(self, act: Callable[..., None]) -> None:
        self._act = act

    @untraced
    def __call__(self, *_: object) -> None:
        self._act(call_frame())

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return self

    def __reduce__(self) -> Any:
        return type(self)._inert, ()

    @classmethod
    def _inert(cls) -> Hook:
        return Hook(_do_nothing)


def _do_nothing(*_: object) -> None:
    """Do nothing: the action of a hook in a model that was loaded."""


class Removable(Protocol):
    """A handle of registered hooks."""

    def remove(self) -> None: ...


class Attachment:
    """A stash attached to a module, whose saved tensors it manages. Returned by :meth:`Stash.attach`.

    ``remove()`` detaches the stash, and so does the end of the context; both may happen twice. The module's
    parameters, buffers and state-dict keys are not changed. Replicas and threads are covered.

    Args:
        owner: the name of the module in ``repr``.
        handles: the handles of its hooks.
    """

    def __init__(self, owner: str, handles: Sequence[Removable]) -> None:
        self._is_removed = False
        self._owner = owner
        self._handles = tuple(handles)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        enter: Callable[[FrameType | None], None],
        leave: Callable[[FrameType | None], None],
    ) -> Attachment:
        """Register two hooks on ``module``.

        Args:
            module: the module.
            enter: called before its forward, with the frame of the call.
            leave: called after it, even if it raised, with the same frame.
        """
        handles = (
            module.register_forward_pre_hook(Hook(enter), prepend=True),
            module.register_forward_hook(Hook(leave), always_call=True),
        )
        return cls(type(module).__name__, handles)

    def remove(self) -> None:
        """Detach the stash from the module. Tensors that were saved before stay managed."""
        for handle in self._handles:
            handle.remove()
        self._is_removed = True

    def __repr__(self) -> str:
        state = " (removed)" if self._is_removed else ""
        return f"<stash on a {clean(self._owner)}{state}>"

    def _repr_html_(self) -> str:
        return html_text(repr(self))

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()
