"""Ctrl-C at any moment: the gradients afterwards are right, nothing is left, nothing hangs, nobody is deaf."""

import _thread
import functools
import operator
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from backstash import Disk, Stash
from backstash._tiers import backing as _backing
from faulty import (
    INPUTS,
    MIXES,
    are_right,
    forward,
    gradients,
    hooks_left,
    run_python,
    wrong_after,
)
from interrupts import Interrupter, step_interrupted_at
from long_tests import mostly_long
from signals import PRESSES

POINTS = 8  # of each mix; scripts/soak_faults.py takes every one


@functools.cache
def points_of(mix, directory):
    stash = MIXES[mix](directory)
    step_interrupted_at(-1, stash)  # see Interrupter
    interrupter, found = step_interrupted_at(-1, stash)
    assert not found + wrong_after(stash)
    return interrupter.count


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("part", range(POINTS))
def test_an_interrupt_leaves_a_stash_that_works(tmp_path_factory, mix, part):
    directory = tmp_path_factory.mktemp("interrupts")
    most = points_of(mix, tmp_path_factory.getbasetemp())
    at = (2 * part + 1) * most // (2 * POINTS) + part  # not always the same phase of a save
    stash = MIXES[mix](directory)
    interrupter, found = step_interrupted_at(at, stash)
    found += wrong_after(stash)
    assert not found, f"interrupted at {at}, {interrupter.where}"


@pytest.mark.skipif(
    sys.version_info[:2] == (3, 13),
    reason="Python 3.13 shows a trace function few of a repair's points: see Interrupter",
)
def test_every_interrupt_of_entering_and_leaving_takes_the_hooks_out(tmp_path):
    stash = Stash(disk=tmp_path)
    at, left = 1, []
    while True:
        with Interrupter(at) as interrupter:
            try:
                with stash:
                    pass
            except KeyboardInterrupt:
                pass
        if hooks_left():
            left.append(interrupter.where)
        if at > interrupter.count:
            break
        at += 1
    assert at > 50
    # Python calls __exit__ once, and where its first instruction is interrupted nobody can help it.
    assert all("__exit__" in where for where in left) and len(left) <= 1
    assert not wrong_after(stash)


class _Pressing(weakref.ref):
    press = _thread.interrupt_main  # of C, not bound, and it does not look itself


def test_an_interrupt_while_a_graph_is_freed_is_not_swallowed(tmp_path):
    """Autograd frees each node from C++; where a ``__del__`` there were Python, it would get the signal."""
    stash = Stash(disk=tmp_path, min_bytes=0)
    y = INPUTS[0]
    with stash:
        for _ in range(4):
            y = y.exp()
    node, blocks = y.grad_fn, []
    while hasattr(node, "_raw_saved_result"):
        blocks.append(node._raw_saved_result.data.block)
        node = node.next_functions[0][0]
    assert len(blocks) == 4
    # As if Ctrl-C were pressed while this block is freed: no Python runs between this and the next one's end.
    ref = _Pressing(blocks[0], operator.methodcaller("press", 2))
    del node, blocks
    with pytest.raises(KeyboardInterrupt):
        del y
        for _ in range(3):
            pass
    assert ref() is None
    assert not wrong_after(stash)


@pytest.mark.parametrize("mix", mostly_long(MIXES, "disk"))
def test_signals_from_outside(tmp_path, mix):
    result = run_python(PRESSES, mix, tmp_path, 1, 0.5)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout + result.stderr


def test_a_write_that_a_worker_was_given_is_known_to_its_backing(tmp_path):
    """Else the slot would be given to another block, and be written to once more."""
    stash = Stash(disk=Disk(tmp_path), min_bytes=64)
    begin = stash._workers.begin

    def begin_and_break(work):
        begin(work)
        raise KeyboardInterrupt

    disk = stash._session.device_tiers[0].tier
    disk.begin_work = begin_and_break
    with pytest.raises(KeyboardInterrupt):
        gradients(stash)
    disk.begin_work = begin
    assert not wrong_after(stash)


@pytest.mark.parametrize("step", ["write_of", "add_segment"])
def test_a_segment_whose_sending_was_interrupted_is_sent_by_the_next(tmp_path, monkeypatch, step):
    stash = Stash(disk=tmp_path, min_bytes=64, inflight="64KiB")
    tiers = stash._session.device_tiers[0]

    def interrupted(*_):
        raise KeyboardInterrupt

    x = torch.linspace(-1, 1, 1024, requires_grad=True)
    y = x * 1
    broken = tiers.tier if step == "write_of" else tiers.evictor.inflight
    monkeypatch.setattr(broken, step, interrupted)
    with pytest.raises(KeyboardInterrupt), stash:
        for _ in range(4):
            y = y.exp()
    monkeypatch.undo()
    assert stash.stats().blocks > 0
    stash._workers.close()
    assert stash.stats().inflight_bytes == 0
    (want,) = torch.autograd.grad(_grown_as(y, x).sum(), x)
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, want)
    del y
    assert not wrong_after(stash)


def _grown_as(y, x):
    """``x`` with as many ``exp`` as ``y`` has, in plain PyTorch."""
    z = x * 1
    while not torch.equal(z, y):
        z = z.exp()
    return z


def held_graph(stash):
    """A graph whose every byte has landed, and of which nothing is in memory."""
    with stash:
        loss = forward()
    with stash:
        pass
    stash.stats()
    return loss


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "broken",
    [
        lambda prefetcher: (_backing, "ctypes", SimpleNamespace(memmove=interrupted)),
        lambda prefetcher: (prefetcher, "_runner", interrupted),
    ],
    ids=["copying out of a segment", "reading"],
)
def test_what_an_interrupt_stopped_is_done_by_the_next(tmp_path, monkeypatch, broken):
    """Else memory that nothing was read or copied to would be taken for what was saved."""
    stash = MIXES["at once"](tmp_path)
    loss = held_graph(stash)
    monkeypatch.setattr(*broken(stash._session.device_tiers[0].prefetcher))
    with pytest.raises(KeyboardInterrupt):
        torch.autograd.grad(loss, INPUTS, retain_graph=True)
    monkeypatch.undo()
    assert are_right(torch.autograd.grad(loss, INPUTS))
    del loss
    assert not wrong_after(stash)


def test_an_interrupted_read_ahead_does_not_hang_the_one_who_waits(tmp_path, monkeypatch):
    stash = MIXES["at once"](tmp_path)
    loss = held_graph(stash)
    prefetcher = stash._session.device_tiers[0].prefetcher
    begin = prefetcher._begin_work

    def interrupted(work):
        prefetcher._begin_work = begin
        raise KeyboardInterrupt

    prefetcher._begin_work = interrupted
    with pytest.raises(KeyboardInterrupt):
        torch.autograd.grad(loss, INPUTS, retain_graph=True)
    assert are_right(torch.autograd.grad(loss, INPUTS))
    del loss
    assert not wrong_after(stash)


def _go_round(times: int) -> None:
    while times:
        times -= 1


@pytest.mark.parametrize("times", [1, 3])
def test_a_loop_that_ends_is_no_point(times: int) -> None:
    """Python looks for signals where a loop goes round, not where it ends: that may be a ``with``'s end."""
    with Interrupter(-1, inside=(__file__,)) as interrupter:
        _go_round(times)
    assert interrupter.count == times - 1


def _either(this: bool) -> None:
    if this:
        return
    return


@pytest.mark.parametrize("this", [True, False])
def test_a_condition_is_a_point_of_python_3_10_where_it_jumps(this: bool) -> None:
    with Interrupter(-1, inside=(__file__,)) as interrupter:
        _either(this)
    assert interrupter.count == (sys.version_info < (3, 11) and not this)
