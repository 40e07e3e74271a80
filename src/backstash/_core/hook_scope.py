"""Pushing and popping the hook pair: in order, on the right thread, and never left behind.

autograd keeps a stack of hook pairs for each thread and pops whatever is on top. So each scope is checked
when it is left; one that is not on top is taken out from under the others, and the caller is told.

An attached module's forward can end in a way that runs no forward hook (``KeyboardInterrupt``). Such a
scope is recognised by the call's frame, which is no longer on the stack, and cleared by the next one.
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

__all__ = ["Attachment", "Hook", "abandon", "enter_scope", "leave_scope", "newest_scope"]


def enter_scope(
    thread_state: ThreadState,
    pack: Callable[[Tensor], object],
    unpack: Callable[[Any], Tensor],
    frame: FrameType | None = None,
) -> None:
    """Push a hook pair for this thread; inside a transform of ``torch.func`` that allows none, step aside.

    Raises ``RuntimeError`` where hooks are disabled for another reason.
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
    """The one that this thread will leave next."""
    _clear_stale(thread_state)
    return thread_state.scopes[-1] if thread_state.scopes else None


def leave_scope(thread_state: ThreadState, frame: FrameType | None = None) -> None:
    """Pop the newest pair of this thread.

    Raises:
        UsageError: it was not on top (it is taken out all the same), or is not there at all.
    """
    _clear_stale(thread_state)
    if not thread_state.scopes:
        raise UsageError("this thread left a stash more often than it entered it")
    scope = thread_state.scopes[-1]
    if scope.frame is not frame:
        if frame is not None:  # a module's forward failed before our hook could push anything
            return
        raise UsageError("a stash was left inside the forward of a module it is attached to")
    try:
        _take_out(scope)
        thread_state.scopes.pop()
    except BaseException:  # out of order, or an interrupt: the pair goes all the same
        abandon(thread_state, scope)
        raise


def abandon(thread_state: ThreadState, scope: Scope) -> None:
    """Take ``scope`` out, if it is there, whatever is on top of it."""
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
        with suppress(ValueError):  # a signal's handler may have done it just now
            scopes.remove(newest)
        with suppress(UsageError):  # the caller that left out of order was told already
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
            "another saved-tensors context popped the stash's hooks: contexts were left in the "
            "wrong order; leave them in the reverse of the order they were entered"
        )
    if above:
        raise UsageError(
            f"a stash was left while {len(above)} saved-tensors context(s) entered after it were still "
            "active: leave them in the reverse order (the stash's hooks were taken out, theirs remain)"
        )


class Hook:
    """A module hook; an object, so that a model can be copied and pickled with it.

    A copy of the model shares the stash. In a model that was pickled, and is loaded, the hook does nothing.
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
    """What a hook does in a model that was loaded."""


class _Removable(Protocol):
    def remove(self) -> None: ...


class Attachment:
    """A stash on a module: what its forward saves is held. Returned by :meth:`Stash.attach`.

    ``remove()`` takes it off, and so does leaving it as a context; both may be done twice. The module's
    parameters, buffers and state-dict keys are untouched. Replicas and threads are covered.

    Args:
        owner: what ``repr`` calls the module.
        handles: of the hooks on it.
    """

    def __init__(self, owner: str, handles: Sequence[_Removable]) -> None:
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
        """Give ``module`` two hooks.

        Args:
            module: that gets them.
            enter: called before its forward, with the frame of the call.
            leave: called after it, also where it raised, with the same frame.
        """
        handles = (
            module.register_forward_pre_hook(Hook(enter), prepend=True),
            module.register_forward_hook(Hook(leave), always_call=True),
        )
        return cls(type(module).__name__, handles)

    def remove(self) -> None:
        """Take the stash off the module. What was saved before stays held."""
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
