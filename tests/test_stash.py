"""The face: what is called when, what an interrupt leaves, and what is said."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from backstash import Stash
from backstash import stash as module
from backstash.errors import InplaceError, StashIOError, UsageError
from backstash.testing import Failing, MemoryStore, TwinDevice, stash_on


def hooks():
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def packed(stash, tensor):
    """What autograd is to hold for an operation's output."""
    tensor.requires_grad_()
    return stash.pack(tensor.exp())


def test_it_says_what_it_is():
    store = MemoryStore()
    stash = Stash(name="mine", disk=store)
    held = packed(stash, torch.zeros(200, 200))
    assert repr(stash) == f"Stash(name='mine', store={store!r}, blocks=1)"
    del held


# Entering and leaving.


@pytest.mark.parametrize("pushed", [True, False])
@pytest.mark.parametrize("within", [True, False])
def test_an_interrupt_while_entering_leaves_what_was_there(monkeypatch, pushed, within):
    enter, stash = module.enter_scope, Stash()

    def interrupted(*arguments, **options):
        if pushed:
            enter(*arguments, **options)
        raise KeyboardInterrupt

    def enters():
        monkeypatch.setattr(module, "enter_scope", interrupted)
        with pytest.raises(KeyboardInterrupt), stash:
            raise AssertionError("not entered")
        monkeypatch.undo()

    if within:
        with stash:
            before = hooks()
            enters()
            assert hooks() == before is not None
    else:
        enters()
    assert hooks() is None and stash._session.thread_state().scopes == []


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("within", [True, False])
def test_an_interrupt_while_leaving_takes_the_pair_out(monkeypatch, left, within):
    leave, stash = module.leave_scope, Stash()
    interrupts = [KeyboardInterrupt]

    def interrupted(*arguments):
        if left or not interrupts:
            leave(*arguments)
        if interrupts:
            raise interrupts.pop()

    def leaves():
        monkeypatch.setattr(module, "leave_scope", interrupted)
        with pytest.raises(KeyboardInterrupt), stash:
            pass
        monkeypatch.undo()

    if within:
        with stash:
            before = hooks()
            leaves()
            assert hooks() == before is not None
    else:
        leaves()
    assert hooks() is None and stash._session.thread_state().scopes == []


def test_an_interrupt_before_it_is_known_what_is_left(monkeypatch):
    stash, newest = Stash(), module.newest_scope
    stash.__enter__()

    def interrupted(thread_state):
        monkeypatch.setattr(module, "newest_scope", newest)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "newest_scope", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stash.__exit__(None, None, None)
    assert hooks() is None and stash._session.thread_state().scopes == []


def test_leaving_too_often_is_one_error():
    with pytest.raises(UsageError, match="more often than it entered") as caught:
        Stash().__exit__(None, None, None)
    assert caught.value.__context__ is None


def test_only_an_error_of_torch_func_is_explained():
    said = "torch.func.grad doesn't support saved tensor hooks"
    with pytest.raises(UsageError, match="call them outside of those hooks") as caught, Stash():
        raise RuntimeError(said)
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(ValueError, match="doesn't support"), Stash():
        raise ValueError(said)
    with pytest.raises(RuntimeError, match="of another kind"), Stash():
        raise RuntimeError("of another kind")
    stash = Stash()
    with torch.autograd.graph.disable_saved_tensors_hooks(said), stash:
        torch.ones(3, requires_grad=True).exp()
    assert stash.stats().saves == 0
    with torch.autograd.graph.disable_saved_tensors_hooks("for another reason"):
        with pytest.raises(RuntimeError, match="for another reason"), Stash():
            raise AssertionError("not entered")


def test_leaving_brings_the_session_in_order(monkeypatch):
    stash = Stash()
    thread_state, session, asked = stash._session.thread_state(), stash._session, []
    monkeypatch.setattr(
        session, "settle", lambda thread_state, ended: asked.append(("settle", thread_state, ended))
    )
    monkeypatch.setattr(
        session, "complete", lambda thread_state: asked.append(("complete", thread_state))
    )
    monkeypatch.setattr(session, "try_again", lambda: asked.append("try again"))
    with stash:
        pass
    assert asked == [("settle", thread_state, True), ("complete", thread_state), "try again"]


@pytest.mark.parametrize("usable", [False, True])
def test_a_forked_process_moves_tensors_only_where_the_store_supports_it(usable):
    store = MemoryStore()
    store.begins_anew_when_forked = usable
    stash = Stash(disk=store)
    section = stash._session.section
    lock, workers, held = section.lock, stash._workers, packed(stash, torch.zeros(200, 200))
    stash._forked()
    assert section.lock is not lock and stash._workers is not workers
    assert stash.stats().saves == stash.stats().blocks == 0
    assert torch.equal(stash.unpack(held), torch.ones(200, 200))  # exp(0); it had not left
    again = packed(stash, torch.zeros(200, 200))
    assert (type(again) is not tuple) is usable
    reason = "this store cannot be used in a forked process: make a new stash there"
    assert list(stash.stats().left) == ([] if usable else [reason])


def test_keep_changes_under_the_lock(monkeypatch):
    stash, limits = Stash(), []
    monkeypatch.setattr(
        stash._session, "limit", lambda keep: limits.append((keep, stash._session.lock._is_owned()))
    )
    for keep in ("1KiB", "auto", None):
        stash.set_keep(keep)
    assert limits == [(1024, True), ("auto", True), (None, True)]


# The way back.


def test_what_comes_back_in_inference_mode_has_a_version(monkeypatch):
    stash = Stash(disk=MemoryStore(), min_bytes="1KiB")
    large, small, changed = torch.ones(200, 200), torch.ones(2), torch.zeros(3).add_(1)
    held = [packed(stash, each) for each in (large, small)] + [stash.pack(changed)]
    with torch.inference_mode():
        back = [stash.unpack(each) for each in held]
    assert not any(each.is_inference() for each in back)
    assert torch.equal(back[0], large.exp()) and torch.equal(back[2], torch.ones(3))


def test_a_change_in_place_names_whose_the_tensor_is():
    stash = Stash(disk=MemoryStore(), keep=None, min_bytes="1KiB")
    sparse = torch.ones(200, 200).to_sparse()
    for tensor, whose in (
        (torch.ones(2), "an unknown module"),
        (torch.ones(200, 200), "no module"),  # it may move
        (sparse, "no module"),  # it stays
    ):
        held = stash.pack(tensor)
        tensor.mul_(2)
        with pytest.raises(InplaceError, match=rf"that {whose}.* saved is at version 1"):
            stash.unpack(held)


def test_a_change_in_place_within_a_module_names_it():
    linear, tanh = nn.Linear(200, 200), nn.Tanh()
    model = nn.Sequential(linear, tanh)
    with Stash(disk=MemoryStore(), keep=None):
        out = model(torch.ones(200, 200))
    out.mul_(2)
    with pytest.raises(InplaceError, match="that 1 saved"):
        out.sum().backward()


def test_a_store_that_cannot_give_back_is_explained():
    store = Failing(MemoryStore())
    stash = Stash(disk=store)
    held = packed(stash, torch.ones(400, 400))
    stash._workers.close()
    stash.stats()
    store.on_read = StashIOError(5, "broken")
    with pytest.raises(StashIOError, match=r"broken.* tensor of shape \(400, 400\).* no module"):
        stash.unpack(held)


def test_nothing_is_emitted_where_nobody_records(monkeypatch):
    stash = Stash(disk=MemoryStore(), inflight=0)

    def emitted(*_, **__):
        raise AssertionError("emitted although nobody listens")

    monkeypatch.setattr(stash._event_log, "emit", emitted)
    x = torch.ones(200, 200, requires_grad=True)
    with stash:
        loss = x.exp().exp().sum()
    loss.backward()
    assert stash.stats().read_bytes


def test_what_was_changed_in_place_is_not_given_to_a_capture():
    device = TwinDevice()
    stash = stash_on(device, keep=None, host="1MiB", min_bytes=0)
    tensor = torch.ones(100)
    held = stash.pack(tensor)
    device.capturing = True
    taken = []
    section = stash._session.section
    lock = section.lock
    section.lock = Noting(lock, taken)
    assert torch.equal(stash.unpack(held), tensor) and taken
    tensor.mul_(2)
    with pytest.raises(UsageError, match="no module saved before this capture was moved"):
        stash.unpack(held)
    device.capturing = False
    section.lock = lock
    assert not device.faults
    stash.close()


class Noting:
    """A lock that notes when it is taken."""

    def __init__(self, lock, taken):
        self.lock, self.taken, self._is_owned = lock, taken, lock._is_owned

    def __enter__(self):
        self.taken.append(True)
        self.lock.acquire()

    def __exit__(self, *_):
        self.lock.release()


# Looking, and the end.


def test_figures_are_of_what_has_completed_and_died(monkeypatch):
    stash = Stash()
    asked, session = [], stash._session
    monkeypatch.setattr(session, "complete", lambda thread_state: asked.append("complete"))
    monkeypatch.setattr(session, "drain", lambda: asked.append("drain"))
    stash.stats()
    assert asked == ["complete", "drain"]


def test_levels_are_of_all_tiers_and_nothing_of_a_stash_that_is_gone():
    stash = Stash(disk=MemoryStore())
    held = packed(stash, torch.ones(400, 400))
    stash._workers.close()
    stash.stats()
    assert module._levels_of(weakref.ref(stash)) == (0, 0, 0, 640_000, 0)
    gone = weakref.ref(MemoryStore())
    assert gone() is None and module._levels_of(gone) == (0, 0, 0, 0, 0)
    with Stash() as without:
        assert module._levels_of(weakref.ref(without)) == (0, 0, 0, 0, 0)
    del held


def test_a_stash_without_a_store_has_one_thread():
    assert Stash()._workers._most == 1


def test_closing_ends_what_is_there(monkeypatch):
    device = TwinDevice()
    stash = stash_on(device, keep=0, host="1MiB", min_bytes=0)
    held = stash.pack(torch.ones(100, requires_grad=True).exp())
    asked, session = [], stash._session
    complete, tiers = session.complete, session.device_tiers[1]
    monkeypatch.setattr(
        session, "complete", lambda thread_state: (asked.append("complete"), complete(thread_state))
    )
    finish = tiers.evictor.inflight.finish
    monkeypatch.setattr(
        tiers.evictor.inflight,
        "finish",
        lambda thread_state: (asked.append("finish"), finish(thread_state)),
    )
    monkeypatch.setattr(stash._pool, "trim", lambda: asked.append("trim"))
    close = stash._workers.close
    monkeypatch.setattr(stash._workers, "close", lambda: (asked.append("close"), close()))
    stash.close()
    assert asked == ["close", "complete", "trim", "finish"]
    assert torch.equal(stash.unpack(held), torch.ones(100).exp())
    del held


def test_a_nested_call_reports_an_unseen_write_too():
    stash = Stash(disk=MemoryStore())
    held = packed(stash, torch.zeros(200, 200))
    held.check = SimpleNamespace(differs=lambda: True)
    with stash._section.lock, pytest.raises(InplaceError):
        stash.unpack(held)
    held.check.differs = lambda: False
    with stash._section.lock:
        assert torch.equal(stash.unpack(held), torch.ones(200, 200))
    assert held.check is not None, "a nested call changes nothing"
