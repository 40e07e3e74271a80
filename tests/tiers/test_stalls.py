"""How long the computing thread waits on the way down."""

from contextlib import nullcontext

import pytest

from backstash._runtime import transfer as _transfer
from backstash._runtime.trace import EventLog
from backstash._runtime.transfer import Stalls
from backstash._runtime.workers import Work


@pytest.mark.parametrize("is_recorded", [False, True])
def test_each_wait_is_counted_and_an_interrupted_one_too(monkeypatch, is_recorded):
    event_log, emitted = EventLog(tuple), []
    event_log.on = is_recorded
    event_log.emit = lambda *what, **more: emitted.append((what, more))
    spans, clock = [], iter((10.0, 13.0, 20.0, 24.0))
    monkeypatch.setattr(_transfer, "profiled", lambda what: spans.append(what) or nullcontext())
    monkeypatch.setattr(_transfer.time, "perf_counter", lambda: next(clock))
    stalls, over = Stalls(event_log), Work(int)
    over.run()
    stalls.wait(over)
    assert stalls.seconds == 0 and emitted == spans == []
    stalls.wait(work := Work(int))
    assert work.done() and stalls.seconds == 3.0

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stalls.wait(Work(interrupted))
    assert stalls.seconds == 7.0 and spans == ["stall on the way down"] * 2
    expected = [(("stall", 0), {"cause": "pack", "began": at}) for at in (10.0, 20.0)]
    assert emitted == (expected if is_recorded else [])
