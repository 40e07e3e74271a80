"""Nothing is left behind: by success, by a dropped graph, by an exception, by the stash's own death."""

import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from backstash import Disk, Stash
from backstash.errors import StashClosedError, UsageError
from backstash.testing import Gated

MIB = 1 << 20


def forward(x, length=5):
    for _ in range(length):
        x = x.exp() * 0.5
    return x.sum()


def leaf(mib=1):
    return torch.zeros(mib * MIB // 4, requires_grad=True)


def test_a_dropped_graph_gives_everything_back(tmp_path):
    stash = Stash(keep="1MiB", disk=tmp_path)
    with stash:
        loss = forward(leaf())
    assert stash.stats().blocks == 5
    del loss
    stash._workers.close()
    stats = stash.stats()
    assert (stats.blocks, stats.keep_bytes, stats.inflight_bytes, stats.disk_bytes) == (0, 0, 0, 0)


def test_a_dead_block_s_write_is_not_waited_for_and_its_slot_is_kept_until_it_ends(tmp_path):
    store = Gated(Disk(tmp_path, threads=1))
    stash = Stash(disk=store)
    store.writes.clear()
    with stash:
        loss = forward(leaf(), 4)
    assert store.begun.acquire(timeout=30)
    del loss
    stats = stash.stats()
    assert stats.blocks == 0
    assert stats.disk_bytes == MIB  # the one that is being written; the queued ones were called off
    store.writes.set()
    stash._workers.close()
    assert stash.stats().disk_bytes == 0
    assert not store.begun.acquire(blocking=False)
    store.close()


def test_an_exception_in_forward_leaves_nothing(tmp_path):
    stash = Stash(disk=tmp_path)
    with pytest.raises(ZeroDivisionError), stash:
        kept = forward(leaf())
        1 / 0  # noqa: B018
    assert kept.grad_fn is not None
    del kept
    stash._workers.close()
    assert stash.stats().disk_bytes == 0


def test_the_stash_dies_without_the_garbage_collector_and_takes_its_file_along(tmp_path):
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        stash = Stash(disk=tmp_path)
        with stash:
            loss = forward(leaf())
        loss.backward()
        gone = weakref.ref(stash)
        stash._workers.close()
        del stash, loss
        assert gone() is None
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        gc.enable()


def test_a_graph_outlives_its_stash(tmp_path):
    x = leaf()
    with Stash(disk=tmp_path):
        loss = forward(x)
    gc.collect()
    loss.backward()
    assert torch.equal(x.grad, torch.autograd.grad(forward(x), x)[0])


def test_close_keeps_what_graphs_hold_and_refuses_more(tmp_path):
    x = leaf()
    stash = Stash(disk=tmp_path)
    with stash:
        loss = forward(x)
    stash.close()
    stash.close()
    loss.backward()
    assert torch.equal(x.grad, torch.autograd.grad(forward(x), x)[0])
    with pytest.raises(StashClosedError, match="make a new one"), stash:
        pass


def test_no_block_is_kept_alive_by_the_stash(tmp_path):
    """The memory of a block in place goes with its graph, not with the next call into the stash."""
    stash = Stash(keep=None, disk=tmp_path)
    with stash:
        loss = forward(leaf(), 3)
    node = loss.grad_fn.next_functions[0][0].next_functions[0][0]
    block = weakref.ref(node._raw_saved_result.data.block)
    assert block() is not None
    del node, loss
    assert block() is None


def test_an_operation_s_own_output_is_not_a_cycle(tmp_path):
    for stash in (Stash(), Stash(keep=None, disk=tmp_path), Stash(disk=tmp_path, min_bytes=0)):
        for size in (4, MIB // 4):
            x = torch.zeros(size, requires_grad=True)
            with stash:
                y = x.exp()
            memory = StorageWeakRef(y.untyped_storage())
            del y
            stash._workers.close()
            stash.stats()
            assert memory.expired()


KILLED = """
import os, signal, sys, torch
from backstash import Stash
x = torch.zeros(1 << 20, requires_grad=True)
with Stash(disk=sys.argv[1], inflight=0):
    y = x
    for _ in range(5):
        y = y.exp()
    os.kill(os.getpid(), signal.SIGKILL)
"""

ENDS = """
import sys, torch
from backstash import Stash
x = torch.zeros(1 << 20, requires_grad=True)
stash = Stash(disk=sys.argv[1])
stash.__enter__()
y = x
for _ in range(20):
    y = y.exp()
# and out, with a graph alive, writes on their way and the context entered
"""

LATE = """
import atexit, sys

@atexit.register  # before anybody else: so it is called after all others
def go_backward():
    (grad,) = torch.autograd.grad(loss, x)
    print(torch.equal(grad, plain), stash.stats().read_bytes > 0)

import torch
from backstash import Stash
x = torch.randn(300, 300, requires_grad=True)
(plain,) = torch.autograd.grad(x.exp().sin().sum(), x)
with Stash(disk=sys.argv[1], inflight=0) as stash:
    loss = x.exp().sin().sum()
"""


def run(code, directory):
    return subprocess.run(
        [sys.executable, "-c", code, str(directory)], capture_output=True, text=True, timeout=100
    )


def test_kill_9_leaves_no_file(tmp_path):
    assert run(KILLED, tmp_path).returncode == -9
    assert list(tmp_path.iterdir()) == []


def test_the_interpreter_ends_cleanly_with_graphs_alive(tmp_path):
    result = run(ENDS, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_code_called_at_the_interpreter_s_end_may_still_run_backward(tmp_path):
    result = run(LATE, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "True True\n"
    assert list(tmp_path.iterdir()) == []


def test_contexts_left_in_the_wrong_order_are_reported_and_repaired(tmp_path):
    stash = Stash(disk=tmp_path)
    other = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    stash.__enter__()
    other.__enter__()
    with pytest.raises(UsageError, match="reverse order"):
        stash.__exit__(None, None, None)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False)[0] is other.pack_hook
    other.__exit__()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_leaving_more_often_than_entering_is_reported(tmp_path):
    stash = Stash(disk=tmp_path)
    with pytest.raises(UsageError, match="more often"):
        stash.__exit__(None, None, None)
    stash.__enter__()
    with pytest.raises(UsageError, match="more often"):  # another thread has entered nothing
        failures = []

        def leave():
            try:
                stash.__exit__(None, None, None)
            except UsageError as error:
                failures.append(error)

        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        raise failures[0]
    stash.__exit__(None, None, None)


class Interrupted(torch.nn.Module):
    def forward(self, x):
        raise KeyboardInterrupt


def test_an_interrupted_forward_leaves_no_hook_for_the_next_call(tmp_path):
    stash = Stash(disk=tmp_path)
    module = Interrupted()
    with stash.attach(module):
        with pytest.raises(KeyboardInterrupt):
            module(torch.zeros(3))
    linear = torch.nn.Linear(3, 3)
    with stash.attach(linear):
        linear(torch.zeros(3))
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_a_closed_stash_with_no_graph_alive_has_no_file(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    stash = Stash(disk=tmp_path)
    with stash:
        forward(leaf()).backward()
    stash.close()
    assert len(os.listdir("/proc/self/fd")) == before
    disk = Disk(tmp_path)
    with Stash(disk=disk) as other:
        forward(leaf()).backward()
    other.close()
    disk.reserve(1)  # the caller's own is the caller's to close
    disk.close()
