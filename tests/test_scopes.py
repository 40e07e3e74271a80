"""Pushing and popping the hook pair by itself: in order, and never left behind."""

import sys

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from backstash import _scopes
from backstash._lanes import Lane
from backstash._scopes import Attachment, abandon, enter_scope, leave_scope, newest_scope
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
    lane = Lane()
    assert newest_scope(lane) is None
    enter_scope(lane, pack, unpack)
    first = newest_scope(lane)
    assert stack() == [pack] and lane.scopes == [first] and first.frame is None
    enter_scope(lane, pack, unpack)
    assert len(lane.scopes) == 2 and newest_scope(lane) is lane.scopes[1] is not first
    leave_scope(lane)
    assert newest_scope(lane) is first and stack() == [pack]
    leave_scope(lane)
    assert lane.scopes == [] == stack()
    with pytest.raises(UsageError, match="more often"):
        leave_scope(lane)


@pytest.mark.parametrize("pushed", [True, False])
def test_what_ends_an_entry_leaves_nothing(monkeypatch, pushed):
    enters = saved_tensors_hooks.__enter__

    def interrupted(hooks):
        if pushed:
            enters(hooks)
        raise KeyboardInterrupt

    monkeypatch.setattr(saved_tensors_hooks, "__enter__", interrupted)
    lane = Lane()
    with pytest.raises(KeyboardInterrupt):
        enter_scope(lane, pack, unpack)
    assert lane.scopes == [] == stack()


def test_where_hooks_are_disabled_nothing_is_entered():
    lane = Lane()
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        pytest.raises(RuntimeError, match="not here"),
    ):
        enter_scope(lane, pack, unpack)
    assert lane.scopes == []


@pytest.mark.parametrize("popped", [True, False])
def test_an_interrupted_leave_leaves_all_the_same(monkeypatch, popped):
    lane = Lane()
    enter_scope(lane, outer := lambda tensor: tensor, unpack)
    enter_scope(lane, pack, unpack)
    takes, calls = _scopes._take_out, []

    def interrupted(scope):
        calls.append(scope)
        if popped or len(calls) > 1:
            takes(scope)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(_scopes, "_take_out", interrupted)
    with pytest.raises(KeyboardInterrupt):
        leave_scope(lane)
    assert len(lane.scopes) == 1 and stack() == [outer]
    leave_scope(lane)
    assert lane.scopes == [] == stack()


def test_out_of_order_the_others_stay_and_are_counted():
    lane = Lane()
    others = [lambda tensor: tensor for _ in range(2)]
    enter_scope(lane, outer := lambda tensor: tensor, unpack)
    enter_scope(lane, pack, unpack)
    for other in others:
        torch._C._autograd._push_saved_tensors_default_hooks(other, unpack)
    with pytest.raises(UsageError, match=r"2 saved-tensors context\(s\) entered after it"):
        leave_scope(lane)
    assert stack() == [*others[::-1], outer] and len(lane.scopes) == 1
    for _ in others:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    leave_scope(lane)


def test_a_pair_that_another_has_popped():
    lane = Lane()
    enter_scope(lane, pack, unpack)
    torch._C._autograd._pop_saved_tensors_default_hooks()
    torch._C._autograd._push_saved_tensors_default_hooks(unpack, unpack)
    with pytest.raises(UsageError, match="another saved-tensors context popped"):
        leave_scope(lane)
    assert stack() == [unpack] and lane.scopes == []
    torch._C._autograd._pop_saved_tensors_default_hooks()


def test_a_pair_that_tracing_hides_is_taken_out():
    lane = Lane()
    enter_scope(lane, pack, unpack)
    before = torch._C._autograd._saved_tensors_hooks_set_tracing(True)
    try:
        leave_scope(lane)
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)
    assert lane.scopes == [] == stack()


def test_a_wrapper_may_stand_in_for_the_pair():
    lane = Lane()
    enter_scope(lane, pack, unpack)

    def around(tensor):
        return pack(tensor)

    around.__wrapped__ = pack
    torch._C._autograd._pop_saved_tensors_default_hooks()
    torch._C._autograd._push_saved_tensors_default_hooks(around, unpack)
    leave_scope(lane)
    assert lane.scopes == [] == stack()


def test_a_module_s_scope_is_left_by_its_call_alone():
    lane, frame = Lane(), sys._getframe()
    enter_scope(lane, pack, unpack, frame)
    with pytest.raises(UsageError, match="inside the forward of a module"):
        leave_scope(lane)
    leave_scope(lane, ended_frame())  # of a call whose hook had pushed nothing
    assert stack() == [pack] and newest_scope(lane).frame is frame
    leave_scope(lane, frame)
    assert lane.scopes == [] == stack()


@pytest.mark.parametrize("then", [enter_scope, newest_scope, leave_scope])
def test_a_call_that_is_no_more_is_cleared_by_the_next(then):
    lane = Lane()
    enter_scope(lane, pack, unpack)
    for _ in range(2):
        enter_scope(lane, pack, unpack, ended_frame() if _ else sys._getframe())
    lane.scopes[1].frame = ended_frame()
    assert len(stack()) == len(lane.scopes) == 3
    if then is enter_scope:
        then(lane, pack, unpack)
        leave_scope(lane)
    elif then is newest_scope:
        assert then(lane) is lane.scopes[0]
    else:
        then(lane)
        enter_scope(lane, pack, unpack)
    assert len(stack()) == len(lane.scopes) == 1
    leave_scope(lane)


def test_a_call_that_is_no_more_and_whose_pair_is_gone_is_nobody_s_fault():
    lane = Lane()
    enter_scope(lane, pack, unpack, ended_frame())
    torch._C._autograd._pop_saved_tensors_default_hooks()
    assert newest_scope(lane) is None


def test_whoever_abandons_a_scope_is_told_nothing():
    lane = Lane()
    enter_scope(lane, pack, unpack)
    scope = newest_scope(lane)
    torch._C._autograd._push_saved_tensors_default_hooks(unpack, unpack)
    abandon(lane, scope)
    assert stack() == [unpack] and lane.scopes == []
    abandon(lane, scope)
    torch._C._autograd._pop_saved_tensors_default_hooks()


class Told:
    """As much of a stash as an attachment needs."""

    def __init__(self):
        self.steps = []
        self._enter = lambda frame: self.steps.append("enter")
        self._leave = lambda frame: self.steps.append("leave")


def test_an_attachment_is_around_all_other_hooks_and_leaves_after_an_error():
    told, module = Told(), torch.nn.ReLU()
    module.register_forward_pre_hook(lambda *_: told.steps.append("another"))
    attachment = Attachment(told, module)
    with attachment as entered:
        assert entered is attachment
        module(torch.zeros(1))
        assert told.steps == ["enter", "another", "leave"]
        with pytest.raises(TypeError):
            module(None)
        assert told.steps[3:] == ["enter", "another", "leave"]
    module(torch.zeros(1))
    assert told.steps[6:] == ["another"]
    attachment.remove()


def test_no_compiler_looks_into_a_hook():
    assert _scopes._Hook.__call__._torchdynamo_disable is True
