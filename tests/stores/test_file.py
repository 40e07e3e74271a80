"""The unnamed file: what it asks of the system, and what it does where the system says no."""

import ctypes
import errno
import fcntl
import os

import pytest
import torch

from backstash.errors import StashIOError
from backstash.stores import _file
from backstash.stores._file import UnnamedFile

PAGE = 4096


def memory(nbytes):
    """A tensor and a page-aligned address in it."""
    owner = torch.zeros(nbytes + PAGE, dtype=torch.uint8)
    return owner, -(-owner.data_ptr() // PAGE) * PAGE


def refuse(monkeypatch, name, number, when=lambda *arguments: True):
    """Let ``os.name`` fail with errno ``number`` for the arguments that ``when`` picks."""
    called, calls = getattr(os, name), []

    def refusing(*arguments, **named):
        calls.append(arguments)
        if when(*arguments):
            raise OSError(number, os.strerror(number))
        return called(*arguments, **named)

    monkeypatch.setattr(os, name, refusing)
    return calls


@pytest.fixture
def buffered(tmp_path):
    file = UnnamedFile(str(tmp_path), direct=False)
    yield file
    file.close()


# Opening.


def test_buffered_if_asked_for_without_a_note(buffered):
    assert (buffered.direct, buffered.note, buffered.memory_align) == (False, "", 1)
    assert os.get_blocking(buffered.fd) and not os.get_inheritable(buffered.fd)


@pytest.mark.parametrize("direct", [True, False])
def test_what_it_says_of_direct_io_is_what_its_descriptor_does(tmp_path, direct):
    file = UnnamedFile(str(tmp_path), direct=direct)
    flags = fcntl.fcntl(file.fd, fcntl.F_GETFL)
    assert bool(flags & os.O_DIRECT) is file.direct and flags & os.O_ACCMODE == os.O_RDWR
    file.close()


def test_nothing_has_a_name_even_for_a_moment(tmp_path, monkeypatch):
    try:
        os.close(os.open(tmp_path, os.O_RDWR | os.O_TMPFILE, 0o600))
    except OSError:
        pytest.skip("this file system has no unnamed files")
    monkeypatch.setattr("tempfile.mkstemp", lambda *_, **__: pytest.fail("a name was made"))
    UnnamedFile(str(tmp_path), direct=True).close()
    UnnamedFile(str(tmp_path), direct=False).close()


def test_descriptor_0_is_closed_too(buffered, monkeypatch):
    closed = []
    fd, buffered.fd = buffered.fd, 0
    monkeypatch.setattr(os, "close", closed.append)
    buffered.close()
    buffered.close()
    monkeypatch.undo()
    buffered.fd = fd
    assert closed == [0]


def test_closing_twice(tmp_path):
    file = UnnamedFile(str(tmp_path), direct=True)
    fd = file.fd
    file.close()
    assert file.fd == -1
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_system_without_direct_io(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_DIRECT")
    file = UnnamedFile(str(tmp_path), direct=True)
    assert not file.direct and "this system has no O_DIRECT" in file.note
    assert str(tmp_path) in file.note and "buffered I/O, cache dropped" in file.note
    file.close()


def test_a_file_system_that_refuses_direct_transfers(tmp_path, monkeypatch):
    calls = refuse(monkeypatch, "pwrite", errno.EINVAL)
    file = UnnamedFile(str(tmp_path), direct=True)
    assert not file.direct and "the file system returned EINVAL" in file.note
    assert len(calls) == 2 and file.memory_align == 1
    file.close()


@pytest.mark.parametrize("align", [512, 4096])
def test_the_alignment_that_direct_transfers_need_is_tried(tmp_path, monkeypatch, align):
    def misaligned(fd, data, at):
        assert len(data) == PAGE and at == 0
        return ctypes.addressof(data) % align != 0

    calls = refuse(monkeypatch, "pwrite", errno.EINVAL, misaligned)
    file = UnnamedFile(str(tmp_path), direct=True)
    assert (file.direct, file.memory_align, file.note) == (True, align, "")
    assert [ctypes.addressof(data) % PAGE for _, data, _ in calls] == [512, 0][: len(calls)]
    assert os.fstat(file.fd).st_size == 0  # what was tried is gone
    file.close()


def test_a_file_system_that_writes_a_part_only_has_no_direct_io(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: 512)
    file = UnnamedFile(str(tmp_path), direct=True)
    assert not file.direct
    file.close()


@pytest.mark.parametrize("call", ["pwrite", "ftruncate"])
def test_a_full_disk_at_the_first_try_is_an_error_and_leaves_no_descriptor(
    tmp_path, monkeypatch, call
):
    refuse(monkeypatch, call, errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        UnnamedFile(str(tmp_path), direct=True)


def test_a_directory_that_may_not_be_used_is_an_error(tmp_path, monkeypatch):
    refuse(monkeypatch, "open", errno.EACCES, lambda path, *_: path == str(tmp_path))
    for direct in (True, False):
        with pytest.raises(PermissionError):
            UnnamedFile(str(tmp_path), direct=direct)
    assert list(tmp_path.iterdir()) == []


NO_UNNAMED = [errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL]


@pytest.mark.parametrize("number", NO_UNNAMED)
@pytest.mark.parametrize("direct", [True, False])
def test_without_unnamed_files(tmp_path, monkeypatch, number, direct):
    refuse(monkeypatch, "open", number, lambda path, *_: path == str(tmp_path))
    file = UnnamedFile(str(tmp_path), direct=direct)
    assert file.direct is direct and os.fstat(file.fd).st_nlink == 0
    assert list(tmp_path.iterdir()) == []
    file.close()


def test_a_system_that_knows_no_unnamed_files(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_TMPFILE")
    file = UnnamedFile(str(tmp_path), direct=False)
    assert list(tmp_path.iterdir()) == [] and os.fstat(file.fd).st_nlink == 0
    file.close()


# Growing.


def size_of(file):
    return os.fstat(file.fd).st_size


def test_blocks_are_allocated_and_a_file_never_shrinks(buffered):
    buffered.grow(3 * PAGE)
    assert size_of(buffered) == 3 * PAGE and os.fstat(buffered.fd).st_blocks * 512 >= 3 * PAGE
    buffered.grow(PAGE)
    buffered.grow(3 * PAGE)
    assert size_of(buffered) == 3 * PAGE
    buffered.grow(5 * PAGE)
    assert size_of(buffered) == 5 * PAGE and os.fstat(buffered.fd).st_blocks * 512 >= 5 * PAGE


def test_only_what_is_missing_is_allocated(buffered, monkeypatch):
    buffered.grow(2 * PAGE)
    calls = refuse(monkeypatch, "posix_fallocate", 0, lambda *_: False)
    buffered.grow(2 * PAGE)
    buffered.grow(5 * PAGE)
    assert calls == [(buffered.fd, 2 * PAGE, 3 * PAGE)]


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, None])
def test_where_blocks_cannot_be_allocated_the_file_is_extended(buffered, monkeypatch, number):
    if number is None:
        monkeypatch.delattr(os, "posix_fallocate")
    else:
        refuse(monkeypatch, "posix_fallocate", number)
    buffered.grow(3 * PAGE)
    assert size_of(buffered) == 3 * PAGE


def test_no_room_is_an_error(buffered, monkeypatch):
    refuse(monkeypatch, "posix_fallocate", errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        buffered.grow(PAGE)
    assert size_of(buffered) == 0


# Moving bytes.


@pytest.mark.parametrize("direct", [True, False])
def test_long_transfers_are_cut_into_calls(tmp_path, monkeypatch, direct):
    monkeypatch.setattr(_file, "_CALL_BYTES", 2 * PAGE)
    file = UnnamedFile(str(tmp_path), direct=direct)
    nbytes, offset = 5 * PAGE, 3 * PAGE
    owner, address = memory(nbytes)
    owner.random_(0, 256)
    expected = ctypes.string_at(address, nbytes)
    writes = refuse(monkeypatch, "pwrite", 0, lambda *_: False)
    reads = refuse(monkeypatch, "preadv", 0, lambda *_: False)
    file.write(address, nbytes, offset)
    ctypes.memset(address, 0, nbytes)
    file.read(address, nbytes, offset)
    assert ctypes.string_at(address, nbytes) == expected
    pieces = [(2 * PAGE, offset), (2 * PAGE, offset + 2 * PAGE), (PAGE, offset + 4 * PAGE)]
    assert [(len(data), at) for _, data, at in writes] == pieces
    assert [(len(data[0]), at) for _, data, at in reads] == pieces
    file.close()


def test_a_write_of_nothing_is_a_full_file_system(buffered, monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match="the file system wrote nothing") as caught:
        buffered.write(memory(PAGE)[1], PAGE, 0)
    assert caught.value.errno == errno.ENOSPC


def test_a_file_that_ends_says_where(buffered):
    _owner, address = memory(3 * PAGE)
    buffered.write(address, PAGE, PAGE)
    with pytest.raises(StashIOError, match=r"ends 8192 bytes early, at offset 8192") as caught:
        buffered.read(address, 3 * PAGE, PAGE)
    assert caught.value.errno == errno.EIO


def recorded(monkeypatch):
    calls = []
    record = lambda name: lambda *arguments: calls.append((name, *arguments))  # noqa: E731
    monkeypatch.setattr(_file, "_sync_file_range", record("sync"))
    monkeypatch.setattr(os, "posix_fadvise", record("advise"))
    return calls


def test_buffered_transfers_leave_no_cache(buffered, monkeypatch):
    calls = recorded(monkeypatch)
    _owner, address = memory(3 * PAGE)
    both = [("sync", buffered.fd, PAGE, 5000, 7)]
    both += [("advise", buffered.fd, PAGE, 5000, os.POSIX_FADV_DONTNEED)]
    buffered.write(address, 5000, PAGE)
    assert calls == both
    buffered.read(address, 5000, PAGE)
    assert calls == both * 2
    monkeypatch.setattr(_file, "_sync_file_range", None)
    buffered.write(address, 5000, PAGE)
    assert calls == both * 2 + both[1:]
    monkeypatch.delattr(os, "posix_fadvise")
    buffered.write(address, 5000, PAGE)
    assert len(calls) == 5


def test_direct_transfers_have_none_to_leave(tmp_path, monkeypatch):
    calls = recorded(monkeypatch)
    file = UnnamedFile(str(tmp_path), direct=True)
    _owner, address = memory(PAGE)
    file.write(address, PAGE, 0)
    file.read(address, PAGE, 0)
    assert not file.direct or calls == []
    file.close()


@pytest.mark.parametrize("error", [OSError, AttributeError, TypeError])
def test_a_system_without_sync_file_range(monkeypatch, error):
    def missing(*_, **__):
        raise error("not here")

    function = _file._load_sync_file_range()
    assert function is not None and function.restype is ctypes.c_int
    assert function.argtypes == [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert _file._load_sync_file_range() is None
