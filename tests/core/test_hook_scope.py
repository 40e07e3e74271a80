"""Pushing and popping the hook pair by itself: in order, and never left behind."""

import sys

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from backstash._core import hook_scope
from backstash._core.hook_scope import Attachment, abandon, enter_scope, leave_scope, newest_scope
from backstash._saved.thread_state import ThreadState
from backstash.errors import UsageError


def pack(tensor):
    return tensor


def unpack(packed):
    return packed


def stack():
    """The pack hooks that are pushed on this thread, the newest first."""
    pairs = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        pairs.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for pair in reversed(pairs):
        torch._C._autograd._push_saved_tensors_default_hooks(*pair)
    return [pair[0] for pair in pairs]


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    left = stack()
    for _ in left:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    assert left == []


def ended_frame():
    return sys._getframe()


def test_scopes_are_left_in_reverse():
    thread_state = ThreadState()
    assert newest_scope(thread_state) is None
    enter_scope(thread_state, pack, unpack)
    first = newest_scope(thread_state)
    assert stack() == [pack] and thread_state.scopes == [first] and first.frame is None
    enter_scope(thread_state, pack, unpack)
    assert (
        len(thread_state.scopes) == 2
        and newest_scope(thread_state) is thread_state.scopes[1] is not first
    )
    leave_scope(thread_state)
    assert newest_scope(thread_state) is first and stack() == [pack]
    leave_scope(thread_state)
    assert thread_state.scopes == [] == stack()
    with pytest.raises(UsageError, match="more often"):
        leave_scope(thread_state)


@pytest.mark.parametrize("pushed", [True, False])
def test_what_ends_an_entry_leaves_nothing(monkeypatch, pushed):
    enters = saved_tensors_hooks.__enter__

    def interrupted(hooks):
        if pushed:
            enters(hooks)
        raise KeyboardInterrupt

    monkeypatch.setattr(saved_tensors_hooks, "__enter__", interrupted)
    thread_state = ThreadState()
    with pytest.raises(KeyboardInterrupt):
        enter_scope(thread_state, pack, unpack)
    assert thread_state.scopes == [] == stack()


def test_where_hooks_are_disabled_nothing_is_entered():
    thread_state = ThreadState()
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        pytest.raises(RuntimeError, match="not here"),
    ):
        enter_scope(thread_state, pack, unpack)
    assert thread_state.scopes == []


@pytest.mark.parametrize("popped", [True, False])
def test_an_interrupted_leave_leaves_all_the_same(monkeypatch, popped):
    thread_state = ThreadState()
    enter_scope(thread_state, outer := lambda tensor: tensor, unpack)
    enter_scope(thread_state, pack, unpack)
    takes, calls = hook_scope._take_out, []

    def interrupted(scope):
        calls.append(scope)
        if popped or len(calls) > 1:
            takes(scope)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(hook_scope, "_take_out", interrupted)
    with pytest.raises(KeyboardInterrupt):
        leave_scope(thread_state)
    assert len(thread_state.scopes) == 1 and stack() == [outer]
    leave_scope(thread_state)
    assert thread_state.scopes == [] == stack()


def test_out_of_order_the_others_stay_and_are_counted():
    thread_state = ThreadState()
    others = [lambda tensor: tensor for _ in range(2)]
    enter_scope(thread_state, outer := lambda tensor: tensor, unpack)
    enter_scope(thread_state, pack, unpack)
    for other in others:
        torch._C._autograd._push_saved_tensors_default_hooks(other, unpack)
    with pytest.raises(UsageError, match=r"2 saved-tensors context\(s\) entered after it"):
        leave_scope(thread_state)
    assert stack() == [*others[::-1], outer] and len(thread_state.scopes) == 1
    for _ in others:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    leave_scope(thread_state)


def test_a_pair_that_another_has_popped():
    thread_state = ThreadState()
    enter_scope(thread_state, pack, unpack)
    torch._C._autograd._pop_saved_tensors_default_hooks()
    torch._C._autograd._push_saved_tensors_default_hooks(unpack, unpack)
    with pytest.raises(UsageError, match="another saved-tensors context popped"):
        leave_scope(thread_state)
    assert stack() == [unpack] and thread_state.scopes == []
    torch._C._autograd._pop_saved_tensors_default_hooks()


def test_a_pair_that_tracing_hides_is_taken_out():
    thread_state = ThreadState()
    enter_scope(thread_state, pack, unpack)
    before = torch._C._autograd._saved_tensors_hooks_set_tracing(True)
    try:
        leave_scope(thread_state)
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)
    assert thread_state.scopes == [] == stack()


def test_a_wrapper_may_stand_in_for_the_pair():
    thread_state = ThreadState()
    enter_scope(thread_state, pack, unpack)

    def around(tensor):
        return pack(tensor)

    around.__wrapped__ = pack
    torch._C._autograd._pop_saved_tensors_default_hooks()
    torch._C._autograd._push_saved_tensors_default_hooks(around, unpack)
    leave_scope(thread_state)
    assert thread_state.scopes == [] == stack()


def test_a_module_s_scope_is_left_by_its_call_alone():
    thread_state, frame = ThreadState(), sys._getframe()
    enter_scope(thread_state, pack, unpack, frame)
    with pytest.raises(UsageError, match="inside the forward of a module"):
        leave_scope(thread_state)
    leave_scope(thread_state, ended_frame())  # of a call whose hook had pushed nothing
    assert stack() == [pack] and newest_scope(thread_state).frame is frame
    leave_scope(thread_state, frame)
    assert thread_state.scopes == [] == stack()


@pytest.mark.parametrize("then", [enter_scope, newest_scope, leave_scope])
def test_a_call_that_is_no_more_is_cleared_by_the_next(then):
    thread_state = ThreadState()
    enter_scope(thread_state, pack, unpack)
    for _ in range(2):
        enter_scope(thread_state, pack, unpack, ended_frame() if _ else sys._getframe())
    thread_state.scopes[1].frame = ended_frame()
    assert len(stack()) == len(thread_state.scopes) == 3
    if then is enter_scope:
        then(thread_state, pack, unpack)
        leave_scope(thread_state)
    elif then is newest_scope:
        assert then(thread_state) is thread_state.scopes[0]
    else:
        then(thread_state)
        enter_scope(thread_state, pack, unpack)
    assert len(stack()) == len(thread_state.scopes) == 1
    leave_scope(thread_state)


def test_a_call_that_is_no_more_and_whose_pair_is_gone_is_nobody_s_fault():
    thread_state = ThreadState()
    enter_scope(thread_state, pack, unpack, ended_frame())
    torch._C._autograd._pop_saved_tensors_default_hooks()
    assert newest_scope(thread_state) is None


def test_abandoning_a_scope_raises_nothing():
    thread_state = ThreadState()
    enter_scope(thread_state, pack, unpack)
    scope = newest_scope(thread_state)
    torch._C._autograd._push_saved_tensors_default_hooks(unpack, unpack)
    abandon(thread_state, scope)
    assert stack() == [unpack] and thread_state.scopes == []
    abandon(thread_state, scope)
    torch._C._autograd._pop_saved_tensors_default_hooks()


class Notes:
    """What an attachment calls before and after a forward, and with which frame."""

    def __init__(self):
        self.steps, self.frames = [], []

    def enter(self, frame):
        self.steps.append("enter")
        self.frames.append(frame)

    def leave(self, frame):
        self.steps.append("leave")
        self.frames.append(frame)


def test_an_attachment_is_around_all_other_hooks_and_leaves_after_an_error():
    notes, module = Notes(), torch.nn.ReLU()
    module.register_forward_pre_hook(lambda *_: notes.steps.append("another"))
    attachment = Attachment.of(module, notes.enter, notes.leave)
    with attachment as entered:
        assert entered is attachment
        module(torch.zeros(1))
        assert notes.steps == ["enter", "another", "leave"]
        with pytest.raises(TypeError):
            module(None)
        assert notes.steps[3:] == ["enter", "another", "leave"]
    module(torch.zeros(1))
    assert notes.steps[6:] == ["another"]
    attachment.remove()


def test_an_attachment_hands_on_the_frame_of_the_call():
    notes, module = Notes(), torch.nn.ReLU()
    with Attachment.of(module, notes.enter, notes.leave):
        module(torch.zeros(1))
        module(torch.zeros(1))
    first, left, second, left_again = notes.frames
    assert first is left is not second is left_again
    assert first.f_locals["self"] is second.f_locals["self"] is module


def test_no_compiler_looks_into_a_hook():
    assert hook_scope.Hook.__call__._torchdynamo_disable is True
