"""The stash called by a signal's handler or a finalizer, in the middle of itself, at every line."""

import functools
import gc
import itertools
import os

import pytest
import torch

from backstash import Disk, Stash
from backstash._runtime.workers import Work
from faulty import INPUTS, MIXES, ZEROS, are_right, forward, hooks_left, run_python, wrong_after
from long_tests import mostly_long, takes_long
from nesting import another_step, step_with_a_call_at

POINTS = int(os.environ.get("NESTED_POINTS", 6))  # of each mix and call
CALLS = ("a step", "stats", "close")
ALL_CALLS = [*itertools.product(CALLS, MIXES)]


@functools.cache
def lines_of(mix, directory):
    stash = MIXES[mix](directory)
    caller, found = step_with_a_call_at(-1, stash, "stats")
    assert not found + wrong_after(stash)
    return caller.count


@pytest.mark.parametrize(
    "call, mix",
    mostly_long(ALL_CALLS, *ALL_CALLS[::2]),  # each call, and each mix
)
def test_a_call_in_the_middle_of_another_leaves_both_right(tmp_path_factory, mix, call):
    directory = tmp_path_factory.mktemp("nested")
    most = lines_of(mix, tmp_path_factory.getbasetemp())
    reached = 0
    for part in range(POINTS):
        at = (2 * part + 1) * most // (2 * POINTS) + 7 * part
        stash = MIXES[mix](directory)
        caller, found = step_with_a_call_at(at, stash, call)
        reached += bool(
            caller.where
        )  # how many lines there are depends on what workers have done by then
        is_closed = call == "close" and caller.where
        found += closed_after(stash) if is_closed else wrong_after(stash)
        assert not found, f"{call} at {at}, {caller.where}"
    assert 2 * reached > POINTS


def in_a_move(stash, act):
    Work(act).run()


def in_the_lock(stash, act):
    with stash._session.lock:
        act()


def in_the_store(stash, act):
    with stash._store.lock:
        act()


def steps(stash, held):
    found = []
    another_step(stash, found)
    assert not found


def looks(stash, held):
    assert stash.stats().blocks == stash._session.blocks_alive


def goes_backward(stash, held):
    assert are_right(torch.autograd.grad(held, INPUTS, retain_graph=True))


NESTED_CALLS = {
    "a step": steps,
    "stats": looks,
    "unpack": goes_backward,
    "close": lambda stash, held: stash.close(),
    "leave": lambda stash, held: stash.__exit__(None, None, None),
    "keep": lambda stash, held: stash.set_keep(0),
}


@pytest.mark.parametrize("midst", [in_a_move, in_the_lock, in_the_store])
@pytest.mark.parametrize("call", NESTED_CALLS)
def test_in_the_midst_of_what_others_wait_for_nothing_shared_is_changed(tmp_path, midst, call):
    """Each place where a call asks whether it is nested, for each of the three answers."""
    stash = Stash(disk=Disk(tmp_path, threads=1), min_bytes=64)
    x, data = torch.randn(40_000, requires_grad=True), torch.randn(40_000)
    with stash:
        held = forward()
    stash.__enter__()
    stash.__enter__()
    dropped = forward()
    loss = (x * data).sum()  # whose data wait for the operation to end
    del dropped
    before = shared_state(stash)
    midst(stash, functools.partial(NESTED_CALLS[call], stash, held))
    assert shared_state(stash) == before
    if call != "leave":
        stash.__exit__(None, None, None)
    stash.__exit__(None, None, None)
    assert torch.equal(torch.autograd.grad(loss, x)[0], data)
    assert are_right(torch.autograd.grad(held, INPUTS))
    del loss, held
    stash.close()
    assert not closed_after(stash)


def shared_state(stash):
    """What a nested call must leave as it is."""
    tiers = stash._session.device_tiers[0]
    return (
        list(stash._session.thread_state().waiting),
        stash._session.predictor.passes,
        len(stash._session.reclaim_queue),
        tiers.evictor.inflight.written_bytes,
        tiers.evictor.resident.nbytes,
        tiers.prefetcher.read_bytes,
        tiers.prefetcher.ahead.nbytes,
        [each.is_alive() for each in stash._workers._threads],
    )


def closed_after(stash):
    gc.collect()
    found = ["hooks left"] * hooks_left()
    stats = stash.stats()  # which goes on with what the nested call began
    found += [f"{name}={getattr(stats, name)}" for name in ZEROS if getattr(stats, name)]
    found += ["a thread is left"] * any(each.is_alive() for each in stash._workers._threads)
    if isinstance(stash._store, Disk):
        stash._store.close()
    return found


HANDLER = """
import signal, sys, warnings
from faulty import *
from nesting import *
warnings.simplefilter("ignore")
stash = MIXES[sys.argv[2]](Path(sys.argv[1]))
asked, found = [0], []
def handler(*_):
    asked[0] += 1
    if sys.argv[3] == "stats":
        stash.stats()
    else:
        another_step(stash, found)
        if asked[0] < 60:
            signal.setitimer(signal.ITIMER_REAL, 0.001)
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001 if sys.argv[3] == "stats" else 0)
steps = 0
while asked[0] < (300 if sys.argv[3] == "stats" else 60):
    assert are_right(gradients(stash))
    steps += 1
signal.setitimer(signal.ITIMER_REAL, 0)
assert not found, found
problems = wrong_after(stash)
assert not problems, problems
"""


@pytest.mark.parametrize(
    "mix, call",
    mostly_long(
        itertools.product(("disk", "at once"), ("stats", "a step")),
        ("disk", "a step"),
    ),
)
def test_a_handler_of_a_timer(tmp_path, mix, call):
    result = run_python(HANDLER, tmp_path, mix, call)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr


FINALIZER = """
import sys
from faulty import *
from nesting import *
stash = MIXES[sys.argv[2]](Path(sys.argv[1]))
found, ran = [], [0]
class Trains:
    def __del__(self):
        ran[0] += 1
        another_step(stash, found)
gc.set_threshold(50, 1, 1)
for _ in range(20):
    for _ in range(3):
        cycle = Trains()
        cycle.itself = cycle
    del cycle
    assert are_right(gradients(stash))
gc.collect()
assert ran[0] == 60 and not found, (ran, found)
problems = wrong_after(stash)
assert not problems, problems
"""


@takes_long
@pytest.mark.parametrize("mix", mostly_long(["disk", "at once"], "disk"))
def test_a_finalizer_that_trains(tmp_path, mix):
    result = run_python(FINALIZER, tmp_path, mix)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
