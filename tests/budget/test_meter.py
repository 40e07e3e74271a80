"""What is measured of a process: samples of its memory, its peak, and what page faults take."""

import mmap
import subprocess
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest

from backstash._budget.meter import ProcessMeter
from backstash._budget.meter import _sample as sample
from counted_memory import MIB


def test_the_cost_of_taking_memory_again_is_that_of_the_step_s_page_faults(monkeypatch):
    faults = [0]
    monkeypatch.setattr("backstash._budget.meter._page_faults", lambda: faults[0])
    meter = ProcessMeter()
    meter.begin_step()
    faults[0] += 8 * MIB // mmap.PAGESIZE
    meter.begin_step()
    assert meter.fault_seconds(8 * MIB) > 0 == meter.fault_seconds(0)
    meter.begin_step()
    assert meter.fault_seconds(8 * MIB) == 0, "nothing was taken: the rest was still there"


def test_both_parts_of_a_sample_are_of_one_moment(monkeypatch):
    """Else what the stash has just given back counts as somebody else's."""
    own, held = iter([30, 20, 20, 20]), iter([130, 120, 0])
    monkeypatch.setattr(ProcessMeter, "now", lambda meter: next(held))
    meter = ProcessMeter(lambda: next(own))
    assert meter.mark()[1:] == (120, 20)
    own, held = iter(range(100)), iter(range(1000, 2000))
    assert len(meter.take().samples) == 1
    own = iter(range(100))
    meter.mark()
    assert next(own) < 10, "it ends where the stash's part changes all the time"


def test_the_peak_of_a_process_is_reported_where_it_rises():
    script = """
import mmap, resource
from backstash._budget.meter import ProcessMeter
MIB = 1 << 20
meter, before = ProcessMeter(), ProcessMeter().now()
nbytes = max(256 * MIB, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)  # of what started it
def touch(nbytes):
    with mmap.mmap(-1, nbytes) as memory:
        for at in range(0, nbytes, mmap.PAGESIZE):
            memory[at] = 1
touch(nbytes)
raised = meter.raised_peak_bytes()
assert -24 * MIB < raised - before - nbytes < 24 * MIB, (before, raised)
assert meter.now() < before + 24 * MIB
touch(nbytes - 96 * MIB)
assert meter.raised_peak_bytes() == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_samples_are_fewer_in_long_steps(monkeypatch):
    now, waits = [1.0], []
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("backstash._budget.meter.time", clock)
    meter, steps = ProcessMeter(lambda: 0), iter([0.0, 0.1, 1.0, 60.0, 0.1])

    class Stop:
        def wait(self, seconds):
            waits.append(seconds)
            now[0] += (step := next(steps, -1.0))
            meter.begin_step()
            return step < 0

    sample(Stop(), weakref.ref(meter))
    assert waits == [0.001, 0.001, 0.001, pytest.approx(0.002), 0.005, 0.001]


def test_nothing_is_kept_of_steps_that_are_not_measured(monkeypatch):
    meter = ProcessMeter(lambda: 0)
    for _ in range(10):
        meter.resume(meter.pause())
        meter.begin_step()
    measured = meter.take()
    assert not measured.events and not measured.samples
    meter.begin_step()
    monkeypatch.setattr(threading.Thread, "start", lambda _: None)  # only marks take samples
    meter.start()
    meter.resume(meter.pause())
    meter.begin_step()
    measured = meter.take()
    assert len(measured.events) == len(measured.samples) == 1


def test_sampling_goes_on_once_what_it_took_was_taken(monkeypatch):
    """A notebook's step may last as long as its reader thinks."""
    monkeypatch.setattr("backstash._budget.meter._MOST_SAMPLES", 2)
    held, waits = [0], []
    monkeypatch.setattr(ProcessMeter, "now", lambda _: held[0])
    meter = ProcessMeter(lambda: 0)

    class Stop:
        def wait(self, seconds):
            waits.append(meter.sampled_peak_bytes())
            if len(waits) == 5:
                meter.forget()  # and takes one
            held[0] += 1
            return len(waits) > 6

    sample(Stop(), weakref.ref(meter))
    assert waits == [0, 1, 2, 2, 2, 5, 5]
