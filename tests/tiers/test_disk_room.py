"""The disk's store, piece by piece: how its file grows, which bytes go through it, and what is refused."""

import ctypes
import errno
import os
import stat
import threading
import zlib
from types import SimpleNamespace

import pytest
import torch

from backstash import Disk
from backstash.errors import StashClosedError, StashForkedError, StashFullError, StashIOError
from backstash.stores import Slot, _disk
from backstash.stores._disk import _checksum, _checksum_by_the_system, _file_system_type

KIB, PAGE = 1 << 10, 4096


@pytest.fixture
def disk(tmp_path):
    made = Disk(tmp_path)
    yield made
    made.close()


def memory(nbytes, residue=0):
    """A tensor of random bytes, and an address in it with ``residue`` modulo 4096."""
    owner = torch.zeros(nbytes + 3 * PAGE, dtype=torch.uint8)
    owner.random_(0, 256, generator=torch.Generator().manual_seed(nbytes + residue))
    return owner, -(-owner.data_ptr() // PAGE) * PAGE + residue


# How the file grows.


@pytest.fixture(autouse=True)
def slots(monkeypatch):
    """A slot that nobody has goes back by itself: here somebody has each."""
    held, reserve = [], Disk.reserve

    def reserved(disk, nbytes):
        held.append(reserve(disk, nbytes))
        return held[-1]

    monkeypatch.setattr(Disk, "reserve", reserved)


@pytest.fixture
def grown(monkeypatch):
    """Sizes that the file was asked to have; ``most``: beyond it the file system has no room."""
    monkeypatch.setattr(_disk, "_GROW_BYTES", 64 * KIB)
    asked = SimpleNamespace(sizes=[], most=1 << 40)

    def grow(size):
        asked.sizes.append(size)
        if size > asked.most:
            raise OSError(errno.ENOSPC, "No space left on device")

    asked.on = lambda disk: setattr(disk._file, "grow", grow) or disk
    return asked


def test_the_file_grows_in_large_steps(disk, grown):
    grown.on(disk)
    disk.reserve(16 * KIB)
    assert (grown.sizes, disk.file_bytes) == ([64 * KIB], 64 * KIB)
    disk.reserve(48 * KIB)  # to its very end
    assert grown.sizes == [64 * KIB]
    disk.reserve(1)
    assert (grown.sizes[1:], disk.file_bytes) == ([128 * KIB], 128 * KIB)
    disk.reserve(200 * KIB)  # more than a step
    assert disk.file_bytes == grown.sizes[-1] == (16 + 48 + 4 + 200) * KIB
    assert disk.used_bytes == disk.file_bytes


def test_a_step_that_does_not_fit_is_as_large_as_needed(disk, grown):
    grown.on(disk).reserve(16 * KIB)
    grown.most = 100 * KIB
    disk.reserve(60 * KIB)
    assert grown.sizes == [64 * KIB, 128 * KIB, 76 * KIB] and disk.file_bytes == 76 * KIB
    with pytest.raises(
        StashFullError, match=r"no space for 28 KiB in addition to the 76 KiB"
    ) as caught:
        disk.reserve(28 * KIB)
    assert caught.value.errno == errno.ENOSPC and "No space left" in str(caught.value)
    assert grown.sizes[3:] == [140 * KIB, 104 * KIB]
    assert (disk.file_bytes, disk.used_bytes) == (76 * KIB, 76 * KIB)
    assert disk.reserve(24 * KIB).offset == 76 * KIB and disk.file_bytes == 100 * KIB


def test_the_limit_is_the_last_step(tmp_path, grown):
    disk = grown.on(Disk(tmp_path, max_bytes=100 * KIB))
    disk.reserve(40 * KIB)
    disk.reserve(40 * KIB)
    assert grown.sizes == [64 * KIB, 100 * KIB]
    with pytest.raises(StashFullError, match="max_bytes is 100 KiB"):
        disk.reserve(20 * KIB + 1)
    disk.reserve(20 * KIB)
    assert (grown.sizes, disk.used_bytes) == ([64 * KIB, 100 * KIB], 100 * KIB)
    disk.close()
    disk = grown.on(Disk(tmp_path, max_bytes=16 * KIB))
    disk.reserve(16 * KIB)  # all of it at once
    assert grown.sizes[2:] == [16 * KIB]
    disk.close()


def test_room_is_taken_and_given_under_the_lock(disk):
    taken = []

    class Lock:
        def __enter__(self):
            taken.append(disk.used_bytes)

        def __exit__(self, *_):
            taken.append(disk.used_bytes)

        def _is_owned(self):
            return True

    assert isinstance(disk.lock, type(threading.RLock()))
    disk.lock = Lock()
    disk.release(disk.reserve(100))
    assert taken == [0, PAGE, PAGE, 0]


def test_a_forked_process_has_a_file_of_its_own_when_it_needs_one(disk):
    theirs, file = disk.reserve(100), disk._file
    disk.forked()
    assert file.fd == -1 and disk.used_bytes == disk.file_bytes == 0
    for call in (disk.read, disk.write):
        with pytest.raises(StashForkedError, match="in the parent process's file"):
            call(theirs, 0)
    mine = disk.reserve(5000)
    assert disk._file is not file and disk._file.fd >= 0 and mine.offset == theirs.offset == 0
    disk.release(theirs)
    assert disk.used_bytes == 8192, "what another process reserved is not given back here"
    disk.forked()
    disk.close()
    with pytest.raises(StashClosedError):
        disk.reserve(1)


def test_a_forked_process_that_gets_no_file_has_no_room(disk, tmp_path):
    disk.forked()
    disk.directory = str(tmp_path / "nowhere")
    with pytest.raises(StashFullError, match="cannot hold a file"):
        disk.reserve(100)
    assert disk.used_bytes == 0


def test_what_a_disk_says_of_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    disk = Disk("~", threads=5)
    assert disk.directory == str(tmp_path) and disk.name == f"disk {str(tmp_path)!r}"
    assert (disk.threads, disk.verify, disk.max_bytes) == (5, False, None)
    assert disk.direct is disk._file.direct
    slot = disk.reserve(5000)
    assert repr(disk) == f"Disk({str(tmp_path)!r}, used_bytes=8192, direct={disk.direct})"
    assert (Disk(tmp_path, threads=1).threads, Disk(tmp_path).threads) == (1, 2)
    disk.close()
    for call in (disk.read, disk.write):
        with pytest.raises(StashClosedError):
            call(slot, 0)


# Which bytes go through the file.


@pytest.mark.parametrize("align", [512, 4096])
@pytest.mark.parametrize(
    ("residue", "nbytes", "head", "units"),
    [
        (0, PAGE, 0, 1), (0, PAGE - 1, 0, 0), (0, 3 * PAGE + 1, 0, 3), (64, 5, 5, 0),
        (-64, 64, 64, 0), (-64, 65, 64, 0), (-64, 64 + PAGE, 64, 1), (-64, 63 + PAGE, 64, 0),
        (-512, 512 + PAGE, None, 1),
    ],
)  # fmt: skip
def test_only_whole_aligned_units_go_through_the_file(disk, align, residue, nbytes, head, units):
    disk._file.direct, disk._file.memory_align = True, align
    if head is None:
        head = 0 if align == 512 else 512
    if residue == 64:
        head = min(nbytes, align - 64)
    base = 100 * PAGE
    start, middle = disk._middle(Slot(nbytes), base + residue)
    assert (start - base - residue, middle) == (head, units * PAGE)
    disk._file.direct = False
    assert disk._middle(Slot(nbytes), base + residue) == (base + residue, nbytes)


def test_what_was_staged_is_what_is_written_once(disk):
    if not disk.direct:
        pytest.skip("no direct I/O here, so nothing is staged")
    nbytes = 2 * PAGE + 200
    owner, address = memory(nbytes, residue=PAGE - 100)
    first = ctypes.string_at(address, nbytes)
    slot = disk.reserve(nbytes)
    assert (slot.staged, slot.head, slot.tail, slot.checksum) == (False, b"", b"", None)
    disk.stage(slot, address)
    assert slot.staged is True
    assert slot.head + slot.tail == first[:100] + first[-100:]
    ctypes.memset(address, 0, 50)  # after it was staged: not to be seen
    disk.write(slot, address)
    assert slot.staged is False
    target, back = memory(nbytes, residue=PAGE - 100)
    disk.read(slot, back)
    assert ctypes.string_at(back, nbytes) == first
    disk.write(slot, address)  # nothing was staged for this one
    disk.read(slot, back)
    assert ctypes.string_at(back, nbytes) == bytes(50) + first[50:]
    del owner, target


def test_a_write_goes_to_its_own_slot(disk):
    slots = []
    for number in (1, 2, 3):
        owner, address = memory(PAGE)
        owner.fill_(number)
        slots.append(disk.reserve(PAGE))
        disk.write(slots[-1], address)
    for number, slot in zip((1, 2, 3), slots, strict=True):
        owner, address = memory(PAGE)
        disk.read(slot, address)
        assert ctypes.string_at(address, PAGE) == bytes([number]) * PAGE
        assert slot.checksum is None


# Checksums.


@pytest.mark.parametrize("nbytes", [0, 1, 999, 1000, 1001, 2500, 4000])
def test_a_checksum_in_pieces_is_that_of_the_whole(monkeypatch, nbytes):
    monkeypatch.setattr(_disk, "_CHECKSUM_CALL_BYTES", 1000)
    monkeypatch.setattr(_disk, "_CHECKSUM_READ_BYTES", 1000)
    _owner, address = memory(5000)
    expected = zlib.crc32(ctypes.string_at(address, nbytes))
    before = set(os.listdir("/proc/self/fd"))
    assert _checksum(address, nbytes) == _checksum_by_the_system(address, nbytes) == expected
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_system_that_reads_no_memory_for_us(monkeypatch):
    _owner, address = memory(5000)
    expected = _checksum(address, 5000)

    def refuse(*_):
        raise FileNotFoundError("/proc/self/mem")

    monkeypatch.setattr(os, "open", refuse)
    assert _checksum_by_the_system(address, 5000) == expected


def test_memory_that_is_gone_while_it_is_checked_fails_the_write(tmp_path, monkeypatch):
    disk = Disk(tmp_path, verify=True)
    _owner, address = memory(2 * PAGE)
    slot = disk.reserve(2 * PAGE)
    monkeypatch.setattr(os, "pread", lambda *_: b"short")
    with pytest.raises(StashIOError, match="write failed: the memory was freed") as caught:
        disk.write(slot, address)
    assert caught.value.errno == errno.EFAULT
    monkeypatch.undo()
    disk.write(slot, address)
    assert slot.checksum == _checksum(address, 2 * PAGE)
    disk.read(slot, address)
    disk.close()


# What is refused, and what is noted.


def link_seen(monkeypatch, link, *, owner, mode=stat.S_IFLNK | 0o777, above=0o1777, above_owner=0):
    lstat, status = os.lstat, os.stat

    def fake(path, what, real, *rest, **named):
        return what if str(path) == str(what.path) else real(path, *rest, **named)

    own = SimpleNamespace(path=link, st_mode=mode, st_uid=owner)
    parent = SimpleNamespace(path=link.parent, st_mode=stat.S_IFDIR | above, st_uid=above_owner)
    monkeypatch.setattr(os, "lstat", lambda path, *r, **n: fake(path, own, lstat, *r, **n))
    monkeypatch.setattr(os, "stat", lambda path, *r, **n: fake(path, parent, status, *r, **n))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


@pytest.mark.parametrize(
    ("case", "refused"),
    [
        ({"owner": 1001}, True),
        ({"owner": 1001, "above": 0o777}, True),
        ({"owner": 1000}, False),
        ({"owner": 0}, False),
        ({"owner": 1001, "above_owner": 1001}, False),
        ({"owner": 1001, "above": 0o775}, False),
        ({"owner": 1001, "mode": stat.S_IFDIR | 0o777}, False),
    ],
)
@pytest.mark.parametrize("below", ["", "run/7"])
def test_a_link_that_another_user_put_where_all_may_write(
    monkeypatch, tmp_path, case, refused, below
):
    link_seen(monkeypatch, tmp_path / "link", **case)
    path = str(tmp_path / "link" / below)
    (tmp_path / "link" / below).mkdir(parents=True, exist_ok=True)
    if refused:
        with pytest.raises(
            StashIOError, match=r"link' is a symbolic link that another user"
        ) as caught:
            Disk(path)
        assert caught.value.errno == errno.ELOOP and f"(uid {case['owner']})" in str(caught.value)
    else:
        disk = Disk(path)
        disk.close()
        assert disk.directory == path


def test_a_path_that_is_not_there_is_for_opening_to_complain_about(tmp_path):
    with pytest.raises(StashIOError, match="cannot hold a file") as caught:
        Disk(tmp_path / "missing" / "too")
    assert caught.value.errno == errno.ENOENT


def test_the_kind_of_file_system(tmp_path, monkeypatch):
    assert _file_system_type(str(tmp_path)) != 0
    assert _file_system_type(str(tmp_path / "missing")) == 0
    if os.path.isdir("/dev/shm"):
        assert _file_system_type("/dev/shm") == 0x01021994
    for magic, kind in ((0x01021994, "tmpfs"), (0x858458F6, "ramfs")):
        monkeypatch.setattr(_disk, "_file_system_type", lambda _, magic=magic: magic)
        assert f"'/x' is a {kind}: what is stored there still uses" in _disk._memory_note("/x")
    monkeypatch.setattr(_disk, "_file_system_type", lambda _: 0xEF53)
    assert _disk._memory_note("/x") == ""


@pytest.mark.parametrize("error", [OSError, AttributeError, TypeError])
def test_a_system_that_cannot_be_asked_for_it(monkeypatch, tmp_path, error):
    def missing(*_, **__):
        raise error("not here")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert _file_system_type(str(tmp_path)) == 0
