"""Recording: what a stash did, event by event, adds up to what it counted."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from backstash import Stash
from backstash._runtime import trace as _trace
from backstash._runtime.trace import EventLog, Recording
from backstash.testing import Failing, Gated, MemoryStore


def chain(x, steps=6):
    for _ in range(steps):
        x = torch.tanh(x)
    return x.sum()


def of_kind(events, kind):
    return [event for event in events if event.kind == kind]


@pytest.mark.parametrize(
    "tiers, sent", [(200, "land"), (600, "write")], ids=["in segments", "alone"]
)
def test_events_add_up_to_the_stats(tiers, sent):
    x = torch.randn(tiers, tiers, requires_grad=True)
    with Stash(disk=MemoryStore()) as stash, stash.record() as recording:
        loss = chain(x)
        stash._workers.close()  # else a write that nobody needs any more is cancelled
        loss.backward()
        stats = stash.stats()
    events = recording.events
    assert sum(event.nbytes for event in of_kind(events, "save")) == stats.eligible_bytes
    assert sum(event.nbytes for event in of_kind(events, sent)) == stats.written_bytes
    assert sum(event.nbytes for event in of_kind(events, "read")) == stats.read_bytes
    assert len(of_kind(events, "use")) == len(of_kind(events, "free")) == 6
    assert {event.block for event in of_kind(events, "use")} == set(range(6))
    assert of_kind(events, "free")[-1].keep_bytes == stats.keep_bytes == 0
    stalls = of_kind(events, "stall")
    assert sum(event.duration_seconds for event in stalls) == pytest.approx(
        stats.stall_seconds, abs=0.01
    )


def test_each_block_lives_from_its_save_to_its_end():
    x = torch.randn(400, 400, requires_grad=True)
    with Stash(disk=MemoryStore(), keep="1MiB") as stash, stash.record() as recording:
        chain(x).backward()
        stash.stats()
    for block in range(6):
        kinds = [event.kind for event in recording.events if event.block == block]
        assert kinds[0] == "save" and kinds[-1] == "free"
        assert "use" in kinds


def test_the_levels_are_those_of_the_moment():
    x = torch.randn(400, 400, requires_grad=True)
    gated = Gated(MemoryStore())
    gated.writes.clear()
    with Stash(disk=gated) as stash, stash.record() as recording:
        loss = chain(x, steps=2)
        assert recording.take()[-1].inflight_bytes == 640_000
        gated.writes.set()
        stash._workers.close()  # both writes have ended
        loss.backward()
        stash.stats()
    assert recording.events[-1].inflight_bytes == 0
    assert len(of_kind(recording.events, "land")) == 2


def test_modules_are_named_and_nothing_is_recorded_after_the_end():
    model = nn.Sequential(nn.Linear(300, 300), nn.Tanh())
    x = torch.randn(300, 300)
    with Stash(disk=MemoryStore()) as stash:
        with stash.record() as recording:
            loss = model(x).sum()
        loss.backward()
    assert {event.module for event in of_kind(recording.events, "save")} == {"0", "1"}
    assert not of_kind(recording.events, "use")
    recording.remove()
    assert not stash._event_log.on


def test_a_failed_write_and_a_change_in_flight_are_recorded():
    x = torch.randn(400, 400, requires_grad=True)
    failing = Failing(MemoryStore())
    failing.on_write = OSError(5, "broken")
    with Stash(disk=failing) as stash, stash.record() as recording:
        with pytest.warns(UserWarning, match="kept in memory"):
            loss = chain(x, steps=2)
            stash._workers.close()
            stash.stats()
        loss.backward()
    assert of_kind(recording.events, "return")
    gated = Gated(MemoryStore())
    gated.writes.clear()
    with Stash(disk=gated) as stash, stash.record() as recording:
        y = torch.tanh(x)
        y.add_(1)
        gated.writes.set()
        stash._workers.close()
        stash.stats()
    assert [event.nbytes for event in of_kind(recording.events, "lose")] == [640_000]


def test_a_limited_recording_ends_by_itself():
    x = torch.randn(300, 300, requires_grad=True)
    with Stash(disk=MemoryStore()) as stash:
        recording = stash.record(limit=3)
        assert not recording.full
        chain(x).backward()
        assert recording.full and not stash._event_log.on
        assert len(recording.events) == 3


def test_a_save_during_backward_is_recorded_as_such():
    model = nn.Sequential(nn.Linear(300, 300), nn.Tanh())
    x = torch.randn(300, 300, requires_grad=True)
    with Stash(disk=MemoryStore()) as stash, stash.record() as recording:
        first = nn.functional.tanh(x)
        checkpoint(model, first, use_reentrant=True).sum().backward()
    saves = of_kind(recording.events, "save")
    assert [(event.cause, event.module) for event in saves] == [
        ("", ""),
        ("backward", "1"),
    ]


def test_a_profiler_sees_stalls_and_nothing_is_asked_without_one(monkeypatch):
    model = nn.Sequential(nn.Linear(400, 400), nn.Tanh())
    x = torch.randn(400, 400)
    gated = Gated(MemoryStore())
    gated.writes.clear()
    with torch.profiler.profile() as profile, Stash(disk=gated, inflight=0) as stash:
        threading.Timer(0.05, gated.writes.set).start()
        model(x).sum().backward()
        stash.close()
    spans = [event for event in profile.events() if event.name.startswith("backstash: ")]
    assert {event.name for event in spans} >= {
        "backstash: stall on the way down",
        "backstash: stall on the way up 1",
        "backstash: read",
    }
    # On this thread: what it waited for, which it read itself where no worker had begun to.
    load = next(event for event in spans if event.name == "backstash: read")
    assert load.cpu_parent.name == "backstash: stall on the way up 1"
    assert "TanhBackward0" in load.cpu_parent.cpu_parent.name

    def refuse(*_):
        raise AssertionError("asked of torch.profiler though none runs")

    monkeypatch.setattr(torch.autograd.profiler, "record_function", refuse)
    with Stash(disk=MemoryStore()):
        model(x).sum().backward()


def test_what_is_recorded_is_what_happened(monkeypatch):
    now = iter([5.0, 7.0])
    monkeypatch.setattr(_trace.time, "perf_counter", lambda: next(now))
    event_log = EventLog(lambda: (1, 2, 3, 4, 5))
    assert event_log.on is False
    recording = Recording(event_log)
    assert event_log.on is True
    event_log.emit("write", 10)
    event_log.emit("stall", 0, 3, "a.b", cause="pack", began=6.5)
    first, second = recording.events
    here = threading.get_ident()
    assert first == _trace.Event("write", 5.0, 0.0, 10, -1, "", "", here, 1, 2, 3, 4, 5)
    assert second == _trace.Event("stall", 6.5, 0.5, 0, 3, "a.b", "pack", here, 1, 2, 3, 4, 5)


def test_a_recording_takes_no_more_than_its_limit():
    event_log = EventLog(lambda: (0, 0, 0, 0, 0))
    none, one, all_of_it = (
        Recording(event_log, limit=0),
        Recording(event_log, limit=1),
        Recording(event_log),
    )
    for _ in range(2):
        event_log.emit("free", 1)
    assert [len(each.events) for each in (none, one, all_of_it)] == [0, 1, 2]
    one._note_event(tuple(range(13)))  # from another thread, which had asked who listens before
    assert len(one.events) == 1 and event_log.on
    all_of_it.remove()
    assert not event_log.on


def test_a_torch_that_does_not_say_whether_a_profiler_runs_has_none(monkeypatch):
    monkeypatch.delattr(torch.autograd.profiler, "_is_profiler_enabled")
    assert _trace.profiled("read") is _trace._NOTHING
