"""Processes that are forked while a stash is at work, and interpreters that end while one is."""

import pytest
from faulty import run_python

LOADER = """
import sys, torch
from faulty import *
from torch.utils.data import DataLoader, Dataset
torch.set_num_threads(1)
from backstash.testing import Gated

store = Gated(Disk(sys.argv[1], threads=1))
stash = Stash(disk=store, min_bytes=64)
outside = None

class Data(Dataset):
    def __len__(self): return 6
    def __getitem__(self, index):
        # A worker process: it touches tensors, goes backward, with the parent's stash and its graph too.
        x = torch.full((20_000,), 0.1 * index, requires_grad=True)
        x.exp().sum().backward()
        with stash:
            y = (x.exp() * 2).sum()
        y.backward()
        ok = are_right(torch.autograd.grad(outside, INPUTS, retain_graph=True))
        return x.grad[:3].detach(), ok

with stash:
    outside = forward()
    store.writes.clear()            # writes stand in flight while the workers are forked
    pending = forward()
    loader = DataLoader(Data(), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=60)
    batches = iter(loader)
    store.writes.set()
    for number, (grad, ok) in enumerate(batches):
        assert bool(ok.all()), "a worker read something else"
        index = torch.tensor([2.0 * number, 2.0 * number + 1])
        x = 0.1 * index
        assert torch.allclose(grad[:, 0], 3 * x.exp()), (grad, x)
        assert are_right(gradients(stash))
assert are_right(torch.autograd.grad(pending, INPUTS))
assert are_right(torch.autograd.grad(outside, INPUTS))
del outside, pending, batches, loader
problems = wrong_after(stash)
assert not problems, problems
store.close()
"""


def test_a_data_loader_forks_while_writes_are_in_flight(tmp_path):
    result = run_python(LOADER, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")


BEGIN = """
import atexit
def older():  # than any of backstash, so that it runs after all of them
    if "late" in globals():
        assert are_right(torch.autograd.grad(loss, INPUTS))
        assert are_right(gradients(stash))
atexit.register(older)
import sys, threading, torch
from faulty import *
import warnings
warnings.simplefilter('ignore')  # two threads' blocks may be more than the accelerator's host
stash = MIXES[sys.argv[2]](Path(sys.argv[1]))
"""
# Not tried: a daemon thread that computes when the interpreter ends. Plain PyTorch aborts there too.
ENDINGS = {
    "entered, with a graph, a thread that trains and an atexit handler that goes backward": (
        "def work():\n    for _ in range(5):\n        assert are_right(gradients(stash))\n"
        "thread = threading.Thread(target=work)\nthread.start()\n"
        "with stash:\n    loss = forward()\n"
        "def late():\n    assert are_right(torch.autograd.grad(loss, INPUTS, retain_graph=True))\n"
        "    assert are_right(gradients(stash))\n    print('late')\natexit.register(late)\n"
        "stash.__enter__()\nanother = forward()\n"
    ),
    "sys.exit in backward": (
        "print('late')\nwith stash:\n    loss = forward()\n"
        "INPUTS[0].register_hook(lambda gradient: sys.exit(0))\nloss.backward()\n"
    ),
    "sys.exit in forward": "print('late')\nwith stash:\n    loss = forward()\n    sys.exit(0)\n",
}


@pytest.mark.parametrize(
    "mix, ending",
    [("disk", each) for each in ENDINGS] + [("accelerator", each) for each in list(ENDINGS)[:1]],
)
def test_the_interpreter_ends_cleanly(tmp_path, mix, ending):
    result = run_python(BEGIN + ENDINGS[ending], tmp_path, mix)
    assert (result.returncode, result.stdout, result.stderr) == (0, "late\n", "")
    assert list(tmp_path.iterdir()) == []


THREAD = """
import os, sys, threading, warnings
from faulty import *
warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside a thread: that is what is tried
stash = Stash(disk=sys.argv[1], min_bytes=64)
assert are_right(gradients(stash))
held, forked = threading.Event(), threading.Event()
def holds():
    with stash._session.lock:
        held.set()
        forked.wait()
threading.Thread(target=holds).start()
held.wait()
if os.fork() == 0:
    found = []  # the first thread may have the name of the one that is gone, and with it the lock
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    thread = threading.Thread(target=lambda: found.append(are_right(gradients(stash))), daemon=True)
    thread.start()
    thread.join(20)
    os._exit(0 if found == [True] else 5)
forked.set()
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_new_thread_of_a_forked_process_waits_for_nobody_of_the_old_one(tmp_path):
    result = run_python(THREAD, tmp_path)
    assert (result.stdout, result.stderr) == ("0\n", "")
