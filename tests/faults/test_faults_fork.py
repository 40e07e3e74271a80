"""Processes that are forked while a stash is at work, and interpreters that end while one is."""

import itertools

import pytest

from faulty import run_python
from long_tests import mostly_long, takes_long

LOADER = """
import sys, torch
from faulty import *
from torch.utils.data import DataLoader, Dataset
torch.set_num_threads(1)
from backstash.errors import StashForkedError
from backstash.testing import Gated

store = Gated(Disk(sys.argv[1], threads=1))
stash = Stash(disk=store, min_bytes=64, inflight="128MiB")
outside = None

class Data(Dataset):
    def __len__(self): return 6
    def __getitem__(self, index):
        # A worker process: it touches tensors, goes backward, with the parent's stash and its graph too.
        store.writes.set()  # the gate of this process
        x = torch.full((20_000,), 0.1 * index, requires_grad=True)
        x.exp().sum().backward()
        with stash:
            y = (x.exp() * 2).sum()
        y.backward()
        try:  # what has left its place is refused
            ok = are_right(torch.autograd.grad(outside, INPUTS, retain_graph=True))
        except StashForkedError:
            ok = True
        ok = ok and stash.stats().written_bytes > 0  # to the worker's own file
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


@takes_long
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
    mostly_long(
        [("disk", each) for each in ENDINGS]
        + [("accelerator", each) for each in list(ENDINGS)[:1]],
        ("disk", list(ENDINGS)[-1]),
        ("accelerator", next(iter(ENDINGS))),
    ),
)
def test_the_interpreter_ends_cleanly(tmp_path, mix, ending):
    result = run_python(BEGIN + ENDINGS[ending], tmp_path, mix)
    assert (result.returncode, result.stdout, result.stderr) == (0, "late\n", "")
    assert list(tmp_path.iterdir()) == []


# Each step of one process waits for one of the other, by a byte in a pipe.
PROCESSES = """
import os, signal, sys, threading, warnings
from faulty import *
from backstash.errors import StashForkedError
warnings.simplefilter("ignore", DeprecationWarning)  # a fork with a thread: that is what is tried
to_child, to_parent = os.pipe(), os.pipe()
def send_byte(pipe, what=b"."):
    os.write(pipe[1], what)
def receive_byte(pipe):
    return os.read(pipe[0], 1)
def ours():
    return [each for each in map(link, os.listdir("/proc/self/fd")) if each.startswith(sys.argv[1])]
def link(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""
stash = MIXES[sys.argv[2]](Path(sys.argv[1]))
OTHERS = [(each.detach() * 3).requires_grad_() for each in INPUTS]
def another():
    with stash:
        return forward(OTHERS)
WANTED_OTHERS = torch.autograd.grad(forward(OTHERS), OTHERS)
def others_are_right(loss):
    return all(map(same_bits, torch.autograd.grad(loss, OTHERS), WANTED_OTHERS))
def is_right_or_refused(loss):
    try:
        return b"=" if are_right(torch.autograd.grad(loss, INPUTS, retain_graph=True)) else b"!"
    except StashForkedError as error:
        return b"r" if "run backward in the parent process" in str(error) else b"?"
with stash:
    loss = forward()
with stash:
    pass
stash.stats()
"""

GOES_ON = """
def child():
    receive_byte(to_child)  # until the parent has freed what this graph saved, and used the space again
    send_byte(to_parent, is_right_or_refused(loss))
    send_byte(to_parent, b"." if are_right(gradients(stash)) and stash.stats().written_bytes else b"!")
    if os.fork() == 0:  # a child of the child
        send_byte(to_parent, is_right_or_refused(loss) + b"." if are_right(gradients(stash)) else b"!!")
        os._exit(0)
    os.wait()
    send_byte(to_parent, b"." if are_right(gradients(stash)) else b"!")
if sys.argv[3] == "os.fork":
    if os.fork() == 0:
        child()
        os._exit(0)
else:
    import multiprocessing
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
del loss
gc.collect()
for _ in range(2):
    assert are_right(gradients(stash))
held = [another() for _ in range(2)]
send_byte(to_child)
received = [receive_byte(to_parent) for _ in range(5)]
# Refused, or right where its write had not ended before the fork ("=": it is in the child's memory).
assert received[0] == received[2] and received[0] in (b"r", b"="), received
assert received[1] == received[3] == received[4] == b".", received
assert all(map(others_are_right, held))
if sys.argv[3] == "os.fork":
    os.wait()
else:
    process.join()
    assert process.exitcode == 0
del held
problems = wrong_after(stash)
assert not problems, problems
"""


@pytest.mark.parametrize(
    "way, mix",
    mostly_long(
        itertools.product(
            ("os.fork", "multiprocessing"), ("disk", "at once", "packed", "accelerator")
        ),
        ("multiprocessing", "accelerator"),
    ),
)
def test_a_child_is_never_given_what_its_parent_has_put_in_the_same_place(tmp_path, mix, way):
    result = run_python(PROCESSES + GOES_ON, tmp_path, mix, way)
    assert (result.returncode, result.stderr) == (0, "")


SPACE = """
assert ours()
faulthandler.cancel_dump_traceback_later()  # a child waits at its end for a watchdog that it does not have
child = os.fork()
if child == 0:
    send_byte(to_parent, b"." if not ours() else b"!")
    receive_byte(to_child)
    mine = gradients(stash)
    send_byte(to_parent, b"." if are_right(mine) and len(ours()) == 1 else b"!")
    receive_byte(to_child)
    if sys.argv[3] == "os._exit":
        os._exit(0)
    sys.exit(0)  # the interpreter is taken down, with a graph of the parent's alive
assert receive_byte(to_parent) == b"."
send_byte(to_child)
assert are_right(torch.autograd.grad(loss, INPUTS, retain_graph=True))
assert receive_byte(to_parent) == b"."
send_byte(to_child)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
assert are_right(torch.autograd.grad(loss, INPUTS))
del loss
problems = wrong_after(stash)
assert not problems, problems
"""


@pytest.mark.parametrize("end", mostly_long(["os._exit", "sys.exit"], "sys.exit"))
def test_a_child_keeps_no_space_of_its_parent_s_disk(tmp_path, end):
    result = run_python(PROCESSES + SPACE, tmp_path, "disk", end)
    assert (result.returncode, result.stderr) == (0, "")


ENTERED = """
with stash:
    first = forward()
    if os.fork() == 0:
        second = forward()  # by the hooks that the parent has pushed
        send_byte(to_parent, b"." if are_right(torch.autograd.grad(second, INPUTS)) else b"!")
        send_byte(to_parent, b"." if stash.stats().written_bytes else b"!")
        send_byte(to_parent, is_right_or_refused(first))
        stash.close()
        stash.__exit__(None, None, None)
        send_byte(to_parent, b"." if not hooks_left() else b"!")
        os._exit(0)
    received = [receive_byte(to_parent) for _ in range(4)]
assert received in ([b".", b".", b"r", b"."], [b".", b".", b"=", b"."]), received  # "=": not yet on disk
assert are_right(torch.autograd.grad(first, INPUTS)) and are_right(torch.autograd.grad(loss, INPUTS))
os.wait()
del first, loss
problems = wrong_after(stash)
assert not problems, problems
"""


def test_a_child_that_is_forked_inside_the_context_holds_its_own_graph_on_its_own_file(tmp_path):
    result = run_python(PROCESSES + ENTERED, tmp_path, "disk")
    assert (result.returncode, result.stderr) == (0, "")


THREAD = """
import os, sys, threading, warnings
from faulty import *
warnings.simplefilter("ignore", DeprecationWarning)  # a fork with a thread: that is what is tried
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


MOVING = """
import os, signal, threading, warnings
from backstash._runtime.workers import Work
from backstash.errors import StashForkedError
warnings.simplefilter("ignore", DeprecationWarning)  # a fork with a thread: that is what is tried
begun, may_end, asked = threading.Event(), threading.Event(), []
def move():
    begun.set()
    may_end.wait()
work, other = Work(move), Work(asked.append, "made")
threading.Thread(target=work.run).start()
begun.wait()
if os.fork() == 0:
    signal.alarm(20)
    found = [isinstance(each.exception(), StashForkedError) for each in (work, other)]
    again = Work(asked.append, "mine")
    again.run()
    os._exit(0 if found == [True, True] and asked == ["mine"] else 5)
may_end.set()
print(os.waitstatus_to_exitcode(os.wait()[1]), work.exception(), other.exception(), asked)
"""


@takes_long
def test_a_forked_process_waits_for_no_move_that_a_thread_of_the_old_one_made():
    """A signal's handler forks in the middle of a load, and returns in both processes."""
    result = run_python(MOVING)
    assert (result.stdout, result.stderr) == ("0 None None ['made']\n", "")


WAITING = """
import linecache, os, signal, sys, threading, time, warnings
from backstash._runtime import workers
from backstash.errors import StashForkedError
from faulty import *
from nesting import Caller
warnings.simplefilter("ignore", DeprecationWarning)  # a fork with a thread: that is what is tried
children = []
def forks():
    children.append(os.fork())
    if children[-1] == 0:
        signal.alarm(20)
def wait(at):
    "Fork at a line, or by a signal while the lock is waited for; what that line is."
    begun, may_end = threading.Event(), threading.Event()
    def move():
        begun.set()
        may_end.wait()
    work, number = workers.Work(move), len(children)
    threading.Thread(target=work.run, daemon=True).start()
    begun.wait()
    def act():
        forks()
        may_end.set()
    def send():
        while not workers.moving.waits:
            pass
        while len(children) == number:  # one that comes just before the lock is waited for ends no wait
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            time.sleep(0.01)
        may_end.set()
    has_forked = []
    def forks_once(*_):  # another signal may come while it forks
        if not has_forked:
            has_forked.append(True)
            forks()
    signal.signal(signal.SIGUSR1, forks_once)
    if at < 0:
        workers.moving = Waits()
        threading.Thread(target=send, daemon=True).start()
    with Caller(at, act) as caller:
        error = work.exception()
    if children[-1] == 0:
        os._exit(0 if isinstance(error, StashForkedError) else 5)
    assert error is None and len(children) == number + 1
    return caller.where
class Waits:  # of all threads
    def __init__(self):
        self.waits, self.calls = [], 0
def line(where):
    return linecache.getline(workers.__file__, int(where.split(":")[1].split()[0]))
at = 1
while "with self._running" not in line(wait(at)):
    at += 1
wait(-1)
print(at > 6, {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children})
"""


def test_a_process_that_is_forked_while_its_thread_waits_for_a_move_waits_no_more():
    result = run_python(WAITING)
    assert (result.stdout, result.stderr) == ("True {0}\n", "")


DISK = """
import os, signal, sys, warnings
import numpy as np
from faulty import *
from nesting import Caller
from backstash.errors import StashForkedError
warnings.simplefilter("ignore")
faulthandler.cancel_dump_traceback_later()  # of which a forked process has no thread
disk = Disk(sys.argv[1], verify=True)
PAGES = np.zeros(9 * 4096, np.uint8)
OFFSET = -PAGES.ctypes.data % 4096
def block(value):
    found = PAGES[OFFSET:][4096 * value:][:4096]
    found[:] = value
    return found
def back(slot):
    found = PAGES[OFFSET:][7 * 4096:][:4096]
    disk.read(slot, found.ctypes.data)
    return found[0]
children = []
def forks():
    children.append(os.fork())
    if children[-1] == 0:
        signal.alarm(20)
def store(value):
    slot = disk.reserve(4096)
    disk.write(slot, block(value).ctypes.data)
    return slot
def step(at):
    "Whether all values came back; a forked process may be refused what it held, and nothing else."
    held = {}
    with Caller(at, forks) as caller:
        for value in (1, 2):
            try:
                held[value] = store(value)
                disk.release(held.pop(value))
                held[value] = store(value)
            except StashForkedError:
                assert children[-1] == 0
        for value, slot in held.items():
            try:
                assert back(slot) == value, "another one's bytes"
            except StashForkedError:
                assert children[-1] == 0
    if children and children[-1] == 0:
        others = {value: store(value) for value in (3, 4, 5)}
        for value, slot in {**held, **others}.items():
            try:
                assert back(slot) == value, "another one's bytes"
            except StashForkedError:
                assert value < 3
        os._exit(0)
    assert len(held) == 2
    return caller.count
lines = step(-1)
for at in range(1, lines + 1):
    step(at)
    assert disk.used_bytes == 0
print(lines > 50, {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children})
"""


@takes_long
def test_a_handler_forks_at_each_line_of_the_disk_and_no_slot_is_lent_twice(tmp_path):
    result = run_python(DISK, tmp_path)
    assert (result.stdout, result.stderr) == ("True {0}\n", "")


HANDLER = """
import os, signal, sys, warnings
from faulty import *
from nesting import Caller
from backstash.errors import StashForkedError
warnings.simplefilter("ignore")
faulthandler.cancel_dump_traceback_later()  # of which a forked process has no thread
made = Stash(disk=Disk(sys.argv[1], threads=1), min_bytes=64, prefetch="1MiB")
children = []
def forks():
    children.append(os.fork())
    if children[-1] == 0:
        signal.alarm(20)
def step(at):
    with Caller(at, forks) as caller:
        try:
            with made:
                loss = forward()
            right = are_right(torch.autograd.grad(loss, INPUTS))
        except StashForkedError:
            assert children and children[-1] == 0
            right = True
    return caller.count, right
lines, right = step(-1)
assert right
for part in range(8):
    _, right = step((2 * part + 1) * lines // 16)
    if children and children[-1] == 0:
        right = right and are_right(gradients(made)) and not hooks_left()
        os._exit(0 if right else 5)
    assert right
statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
assert len(statuses) >= 7 and not any(statuses), statuses
problems = wrong_after(made)
assert not problems, problems
"""


@takes_long
def test_a_handler_forks_in_the_middle_of_a_call_and_both_processes_go_on(tmp_path):
    result = run_python(HANDLER, tmp_path)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
