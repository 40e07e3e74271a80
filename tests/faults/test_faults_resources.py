"""No descriptors, no memory, no threads, no directory: a clear error or a stated fallback, and nothing lost."""

import errno
import os
import threading
import warnings

import pytest
import torch

import backstash._device.pinned_pool as host_memory
import backstash.stores._buffer_pool as memory
from backstash import Disk, Stash
from backstash.errors import StashIOError
from backstash.testing import TwinDevice
from faulty import INPUTS, MIXES, are_right, forward, gradients, run_python, wrong_after
from long_tests import takes_long

DESCRIPTORS = """
import resource
from faulty import *
from backstash.errors import StashIOError
where, limit = Path(sys.argv[1]), resource.getrlimit(resource.RLIMIT_NOFILE)
stash = MIXES["disk"](where)
assert are_right(gradients(stash))          # its threads have begun
fresh = MIXES["disk"](where)
taken = len(os.listdir("/proc/self/fd")) - 1
resource.setrlimit(resource.RLIMIT_NOFILE, (taken, limit[1]))
try:
    while True: os.dup(0)
except OSError: pass
assert are_right(gradients(stash))          # in the middle: it needs no more than it has
assert are_right(gradients(fresh))
try:
    Stash(disk=where)
except StashIOError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_NOFILE, limit)
problems = wrong_after(stash) + wrong_after(fresh) + wrong_after(Stash(disk=where, min_bytes=64))
assert not problems, problems
"""


@takes_long
def test_a_limit_of_descriptors(tmp_path):
    result = run_python(DESCRIPTORS, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert str(tmp_path) in result.stdout
    assert "Too many open files" in result.stdout and "ulimit -n" in result.stdout
    assert "existing" not in result.stdout  # the directory is not to blame


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_from_the_beginning(tmp_path, monkeypatch, number):
    """Opened, and then not even the first page has room: the descriptor goes, as the fixture sees."""

    def full(fd, data, at):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StashIOError, match=r"cannot hold a file .*: free space, or give another"):
        Stash(disk=tmp_path)


ADDRESS_SPACE = """
import resource
from faulty import *
where, big = Path(sys.argv[1]), 24 << 20
x = (torch.randn(big // 4, generator=torch.Generator().manual_seed(0)) * .1).requires_grad_()
def chain():
    y = x
    for _ in range(6): y = y.exp() * 0.5
    return y.sum()
wanted = torch.autograd.grad(chain(), x)[0]
stash = Stash(disk=where, prefetch="512MiB")
with stash:
    loss = chain()
stash.stats()
def mapped():
    with open("/proc/self/statm") as file: return int(file.read().split()[0]) * 4096
limit = resource.getrlimit(resource.RLIMIT_AS)
failed = worked = 0
for spare in range(0, 12 * big, big):   # from no memory at all to enough
    resource.setrlimit(resource.RLIMIT_AS, (mapped() + spare, limit[1]))
    try:
        found = torch.autograd.grad(loss, x, retain_graph=True)[0]
    except (MemoryError, RuntimeError) as error:
        message = str(error)
        assert "memory" in message, message
        failed += 1
    else:
        resource.setrlimit(resource.RLIMIT_AS, limit)
        assert same_bits(found, wanted)
        worked += 1
        del found
    resource.setrlimit(resource.RLIMIT_AS, limit)
assert failed and worked, (failed, worked)
assert same_bits(torch.autograd.grad(loss, x)[0], wanted)
del loss
problems = wrong_after(stash)
assert not problems, problems
"""


def test_a_limit_of_memory(tmp_path):
    result = run_python(ADDRESS_SPACE, tmp_path)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("kind", [MemoryError, RuntimeError])
def test_no_memory_now_and_then(tmp_path, monkeypatch, mix, kind):
    """Every n-th buffer cannot be had, for several n: on the way down, on the way up, for host memory."""
    failures = 0
    for every in (1, 2, 3, 5):
        stash = MIXES[mix](tmp_path)
        asked = 0

        def scarce(make, every=every):
            def made(*arguments, **named):
                nonlocal asked
                asked += 1
                if asked % every == 0:
                    raise kind("Cannot allocate memory: injected")
                return make(*arguments, **named)

            return made

        with monkeypatch.context() as patch:
            if kind is MemoryError:
                patch.setattr(memory, "_map", scarce(memory._map))
                patch.setattr(host_memory, "mapped", scarce(host_memory.mapped))
            else:
                patch.setattr(torch, "empty", scarce(torch.empty))
            patch.setattr(warnings, "warn", lambda *arguments, **named: None)
            for _ in range(4):
                try:
                    assert are_right(gradients(stash))
                except kind as error:
                    assert "Cannot allocate" in str(error)
                    failures += 1
        if mix != "accelerator" or every > 1:
            assert not wrong_after(stash)
        else:
            stash.close()
    assert failures or mix == "accelerator"


class _NoThread(threading.Thread):
    def start(self):
        raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("already", [0, 1])
def test_no_thread_can_be_started(tmp_path, monkeypatch, mix, already):
    """None at all, or no second one: the moves are made all the same."""
    stash = MIXES[mix](tmp_path)
    if already:
        stash._workers.submit(lambda: None)
    monkeypatch.setattr(threading, "Thread", _NoThread)
    for _ in range(2):
        assert are_right(gradients(stash))
    noted = [note for note in stash.stats().notes if "no worker thread" in note]
    assert bool(noted) == (not already)
    if noted:
        assert "moves run on the computing thread" in noted[0]
    monkeypatch.undo()
    assert not wrong_after(stash)


PROCESSES = """
import resource
os_uid = int(sys.argv[2])
from faulty import *
torch.set_num_threads(1)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
os.setuid(os_uid)
stash = Stash(disk=sys.argv[1], min_bytes=64)
assert are_right(gradients(stash))
notes = stash.stats().notes
assert any("no worker thread" in note for note in notes), notes
problems = wrong_after(stash)
assert not problems, problems
"""


def test_a_limit_of_processes(tmp_path_factory):
    directory = tmp_path_factory.mktemp("nobody")
    for each in (directory, *directory.parents):
        if not each.stat().st_mode & 0o001:
            pytest.skip(f"another user cannot reach {each}")
    directory.chmod(0o777)
    result = run_python("import sys\n" + PROCESSES, directory, 65533)
    if "Operation not permitted" in result.stderr:
        pytest.skip("only root may become another user, whom the limit binds")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("mix", MIXES)
def test_the_directory_goes_away(tmp_path, mix):
    """The file has no name in it: what is held there stays, and room can still be had."""
    directory = tmp_path / "gone"
    directory.mkdir()
    stash = MIXES[mix](directory)
    with stash:
        loss = forward()
    directory.rmdir()
    assert are_right(gradients(stash))
    assert are_right(torch.autograd.grad(loss, INPUTS))
    del loss
    assert not wrong_after(stash)
    with pytest.raises(OSError, match=r"gone.*existing, writable directory"):
        Stash(disk=directory)


def test_the_parent_becomes_read_only(tmp_path):
    directory = tmp_path / "parent" / "scratch"
    directory.mkdir(parents=True)
    stash = Stash(disk=Disk(directory), min_bytes=64)
    try:
        for each in (directory, directory.parent):
            each.chmod(0o500)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert are_right(gradients(stash))
        assert not wrong_after(stash)
    finally:
        for each in (directory.parent, directory):
            each.chmod(0o700)


def test_memory_that_cannot_be_pinned_halfway(tmp_path):
    """The second slab is refused: the fallback is stated, and what was pinned is unpinned."""
    from backstash.testing import stash_on

    device = TwinDevice(chance=0.5)
    stash = stash_on(device, host="2MiB", disk=tmp_path, min_bytes=64, inflight="1MiB")
    assert are_right(gradients(stash))
    device._refuses = "the limit of locked memory is reached"
    assert are_right(gradients(stash))
    device._refuses = ""
    assert not wrong_after(stash)
