import ctypes
import errno
import fcntl
import os
import stat
import subprocess
import sys
import threading

import pytest
import torch

from backstash import Disk, Stash, StashError
from backstash.errors import (
    SizeError,
    StashClosedError,
    StashCorruptError,
    StashFullError,
    StashIOError,
    UsageError,
)
from backstash.stores import _disk, _file
from backstash.stores._leases import Leases
from backstash.testing import Failing, Gated, MemoryStore, check_store
from backstash.units import format_bytes


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("verify", [True, False])
def test_disk_keeps_a_store_s_promises(tmp_path, direct, verify):
    check_store(lambda: Disk(tmp_path, direct=direct, verify=verify))
    assert list(tmp_path.iterdir()) == []


def test_the_conformance_check_notices_a_store_that_loses_a_byte():
    class Forgetful(MemoryStore):
        def read(self, slot, address):
            super().read(slot, address)
            ctypes.memset(address, 0, 1)

    with pytest.raises(AssertionError, match="bytes differ"):
        check_store(Forgetful)


@pytest.mark.parametrize("wrapping", [Gated, Failing])
def test_a_store_around_another_has_its_limit(wrapping):
    """A plan asks for it."""
    assert wrapping(MemoryStore(max_bytes=5)).max_bytes == 5
    assert wrapping(MemoryStore()).max_bytes is None


def test_the_file_has_no_name_and_is_the_owner_s_alone(tmp_path):
    disk = Disk(tmp_path)
    disk.reserve(1 << 20)
    assert list(tmp_path.iterdir()) == []
    status = os.fstat(disk._file.fd)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0
    assert not os.get_inheritable(disk._file.fd)
    disk.close()


def test_without_unnamed_files_the_name_is_gone_at_once(tmp_path, monkeypatch):
    opened = os.open

    def refuse_unnamed(path, flags, *rest, **named):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no unnamed files here")
        return opened(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse_unnamed)
    disk = Disk(tmp_path)
    status = os.fstat(disk._file.fd)
    assert (stat.S_IMODE(status.st_mode), status.st_nlink) == (0o600, 0)
    assert list(tmp_path.iterdir()) == []
    disk.close()


def test_refused_direct_io_falls_back_and_says_so(tmp_path, monkeypatch):
    opened = os.open

    def refuse_direct(path, flags, *rest, **named):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return opened(path, flags, *rest, **named)

    def refuse_direct_later(fd, command, value=0):
        if command == fcntl.F_SETFL and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return changed(fd, command, value)

    changed = fcntl.fcntl
    monkeypatch.setattr(fcntl, "fcntl", refuse_direct_later)
    monkeypatch.setattr(os, "open", refuse_direct)
    check_store(lambda: Disk(tmp_path))
    disk = Disk(tmp_path)
    assert not disk.direct
    assert "direct I/O refused" in disk.notes[0]
    stash = Stash(disk=disk)
    assert any("direct I/O refused" in note for note in stash.stats().notes)
    disk.close()


def test_buffered_writes_leave_no_page_cache(tmp_path):
    disk = Disk(tmp_path, direct=False)
    data = torch.ones(8 << 20, dtype=torch.uint8)
    slot = disk.reserve(data.nbytes)
    disk.write(slot, data.data_ptr())
    resident = _cached_pages(disk._file.fd, data.nbytes)
    disk.close()
    assert resident * 4096 <= data.nbytes // 20


def _cached_pages(fd, nbytes):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = libc.mmap(None, nbytes, 1, 1, fd, 0)
    pages = (ctypes.c_ubyte * (nbytes // 4096))()
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), pages) == 0
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
    return sum(page & 1 for page in pages)


def test_a_directory_in_memory_is_noted():
    if not os.path.isdir("/dev/shm"):
        pytest.skip("this system has no /dev/shm")
    disk = Disk("/dev/shm")
    assert "still uses memory" in disk.notes[-1]
    disk.close()


@pytest.mark.parametrize("wrong", ["missing", "a_file"])
def test_a_directory_that_cannot_hold_a_file_is_named(tmp_path, wrong):
    (tmp_path / "a_file").write_text("")
    with pytest.raises(StashIOError, match=f"{wrong}.*must be an existing, writable directory"):
        Stash(disk=tmp_path / wrong)


def test_an_unwritable_directory_is_named(tmp_path):
    directory = tmp_path / "locked"
    directory.mkdir(mode=0o555)
    code = (
        "import os, sys\n"
        "from backstash import Disk, StashError\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "try: Disk(sys.argv[1])\n"
        "except StashError as error: print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code, directory], capture_output=True, text=True)
    assert "writable directory" in run.stdout, run.stderr


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EMFILE, "ulimit -n"),
        (errno.ENFILE, "ulimit -n"),
        (errno.ENOSPC, "free space"),
        (errno.EDQUOT, "free space"),
        (errno.EACCES, "existing, writable directory"),
    ],
)
def test_why_there_is_no_file_and_what_to_do(tmp_path, monkeypatch, number, words):
    opened = os.open

    def refuse(path, *rest, **named):
        if path == str(tmp_path):
            raise OSError(number, os.strerror(number))
        return opened(path, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StashIOError, match=words) as caught:
        Disk(tmp_path)
    assert caught.value.errno == number and os.strerror(number) in str(caught.value)


def test_wrong_arguments_say_what_is_allowed(tmp_path):
    with pytest.raises(SizeError, match="max_bytes='lots'"):
        Disk(tmp_path, max_bytes="lots")
    for threads in (0, -1, "two", True):
        with pytest.raises(UsageError, match="at least 1"):
            Disk(tmp_path, threads=threads)


def test_max_bytes_is_the_most_the_file_ever_has(tmp_path):
    disk = Disk(tmp_path, max_bytes="1MiB")
    slots = [disk.reserve(256 << 10) for _ in range(4)]
    with pytest.raises(StashFullError, match=r"no space for 4.00 KiB.*max_bytes is 1.00 MiB"):
        disk.reserve(4096)
    assert os.fstat(disk._file.fd).st_size == 1 << 20
    disk.release(slots[1])
    assert disk.reserve(200 << 10).offset == slots[1].offset
    disk.close()


def test_a_slot_that_nobody_has_any_more_is_room_again(tmp_path, monkeypatch):
    disk, settle, locked = Disk(tmp_path), Leases.settle, []
    slots = [disk.reserve(4096) for _ in range(2)]
    assert disk.used_bytes == 8192
    monkeypatch.setattr(
        Leases, "settle", lambda leases: locked.append(disk.lock._is_owned()) or settle(leases)
    )
    assert disk.used_bytes == 8192 and locked == []  # there is nothing to settle
    del slots[0]
    assert disk.used_bytes == 4096 and locked == [True]
    assert disk.reserve(4096).offset == 0
    disk.close()


def test_a_slot_that_dies_while_another_is_refused_hangs_nobody(tmp_path, monkeypatch):
    """Let a slot die while the error of a full disk is made; its cleanup once waited for a lock held there."""
    disk = Disk(tmp_path, max_bytes="1MiB")
    slots, refused = [disk.reserve(512 << 10) for _ in range(2)], []

    def dies_meanwhile(nbytes):
        if nbytes == 4096:  # in the words of the error
            slots.clear()  # as another thread, or the collector, may do at any moment
        return format_bytes(nbytes)

    def ask():
        try:
            disk.reserve(4096)
        except StashFullError as error:
            refused.append(str(error))

    monkeypatch.setattr(_disk, "format_bytes", dies_meanwhile)
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive() and "no space for 4.00 KiB" in refused[0]
    assert disk.used_bytes == 0
    disk.close()


def test_a_file_system_without_space_is_full_and_nothing_changes(tmp_path, monkeypatch):
    def no_space(fd, offset, nbytes):
        os.ftruncate(fd, offset + nbytes // 2)  # ext4 keeps what it got before it was full
        raise OSError(errno.ENOSPC, "No space left on device")

    disk = Disk(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(StashFullError, match="No space left on device"):
        disk.reserve(1 << 20)
    assert (disk.used_bytes, disk.file_bytes, os.fstat(disk._file.fd).st_size) == (0, 0, 0)
    monkeypatch.undo()
    assert disk.reserve(1 << 20).offset == 0
    disk.close()


def test_short_transfers_go_on_where_they_stopped(tmp_path, monkeypatch):
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, at: write(fd, memoryview(data).cast("B")[: 4096 * 3], at)
    )
    monkeypatch.setattr(
        os, "preadv", lambda fd, parts, at: read(fd, [memoryview(parts[0]).cast("B")[:8192]], at)
    )
    check_store(lambda: Disk(tmp_path))


def test_a_file_that_ends_early_is_an_error(tmp_path):
    disk = Disk(tmp_path, direct=False)
    data = torch.ones(20_000, dtype=torch.uint8)
    slot = disk.reserve(data.nbytes)
    disk.write(slot, data.data_ptr())
    os.ftruncate(disk._file.fd, 5000)
    with pytest.raises(StashIOError, match="the file ends"):
        disk.read(slot, data.data_ptr())
    disk.close()


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_an_input_output_error_names_the_disk(tmp_path, monkeypatch, call):
    disk = Disk(tmp_path)
    data = torch.ones(1 << 20, dtype=torch.uint8)
    slot = disk.reserve(data.nbytes)
    disk.write(slot, data.data_ptr())

    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, broken)
    with pytest.raises(StashIOError, match=f"disk '{tmp_path}'.*Input/output error") as caught:
        (disk.write if call == "pwrite" else disk.read)(slot, data.data_ptr())
    assert caught.value.errno == errno.EIO
    monkeypatch.undo()
    disk.read(slot, data.data_ptr())
    assert int(data.sum()) == 1 << 20
    disk.close()


def test_verify_notices_a_flipped_bit(tmp_path):
    disk = Disk(tmp_path, verify=True)
    data = torch.arange(1 << 20, dtype=torch.int32)
    slot = disk.reserve(data.nbytes)
    disk.write(slot, data.data_ptr())
    disk.read(slot, data.data_ptr())
    file = os.open(f"/proc/self/fd/{disk._file.fd}", os.O_RDWR)
    byte = os.pread(file, 1, slot.offset + 12_345)
    os.pwrite(file, bytes([byte[0] ^ 4]), slot.offset + 12_345)
    os.close(file)
    with pytest.raises(StashCorruptError, match="not what was written"):
        disk.read(slot, data.data_ptr())
    disk.close()


def test_a_closed_disk_refuses_and_closes_twice(tmp_path):
    disk = Disk(tmp_path)
    slot = disk.reserve(4096)
    disk.close()
    disk.close()
    data = torch.zeros(4096, dtype=torch.uint8)
    for call in (lambda: disk.reserve(1), lambda: disk.write(slot, data.data_ptr())):
        with pytest.raises(StashClosedError, match="is closed"):
            call()


def test_errors_are_one_tree_and_the_builtins_too():
    assert issubclass(StashFullError, StashError) and issubclass(StashFullError, OSError)
    assert issubclass(UsageError, RuntimeError) and issubclass(SizeError, ValueError)


def test_nothing_is_pickled():
    for module in (_disk, _file):
        with open(module.__file__, encoding="utf-8") as source:
            assert "pickle" not in source.read()
