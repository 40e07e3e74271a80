"""The disk tier's store: extents in one unnamed file, read and written directly from tensor memory."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import threading
import weakref
import zlib
from pathlib import Path

from .._text import shown
from ..errors import (
    StashClosedError,
    StashCorruptError,
    StashForkedError,
    StashFullError,
    StashIOError,
    UsageError,
)
from ..units import format_bytes, parse_limit
from ._base import PAGE_BYTES, Slot, Store, is_mine
from ._file import UnnamedFile
from ._leases import Leases

__all__ = ["Disk"]

_UNIT_BYTES = PAGE_BYTES
_GROW_BYTES = 256 << 20
_CHECKSUM_CALL_BYTES = 64 << 20
_CHECKSUM_READ_BYTES = 1 << 20
_MEMORY_FILE_SYSTEMS = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}


class Disk(Store):
    """Hold bytes in one unnamed file of ``directory``.

    The file is created at once, with mode 0600 and without a name. So nobody else can open it, and nothing of
    it outlives the process. It grows as needed, and its extents are reused.

    A forked process begins with nothing. It closes the descriptor that it inherited, so that it keeps none of
    the parent's space, and creates its own file when it first reserves a slot.

    Args:
        directory: an existing, writable directory on a real disk. A directory in memory (tmpfs) works, with a
            note, since bytes there still take memory. A link works, unless another user put it where everyone
            may write.
        max_bytes: the most bytes that the file may have; ``None``: no limit.
        direct: bypass the page cache with direct I/O. If the system refuses it, ``notes`` says so.
        verify: keep a CRC-32 of everything written and compare it at each read. Without it, a disk that
            returns other bytes than were written is not detected, and gradients are wrong.
        threads: the number of transfers at a time. One or two reach a disk's speed.

    Raises:
        StashIOError: the directory is missing or not writable, or another user's link in a directory
            open to all; the message names it.
        SizeError: ``max_bytes`` is not a size.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     disk = Disk(directory, max_bytes="1GiB", verify=True)
    ...     disk.close()
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_bytes: int | str | None = None,
        direct: bool = True,
        verify: bool = False,
        threads: int = 2,
    ) -> None:
        if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
            raise UsageError(f"disk={shown(directory)}: allowed is a directory, a Disk, or None")
        self.directory = str(Path(directory).expanduser())
        self.name = f"disk {self.directory!r}"
        self.max_bytes = parse_limit(max_bytes, name="max_bytes")
        if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
            raise UsageError(f"threads={shown(threads)}: allowed is an int of at least 1")
        self.verify = verify
        self.threads = threads
        self._direct = direct
        self._is_closed = False
        self.lock = threading.RLock()
        self._open()
        self.notes = tuple(filter(None, (self._file.note, _memory_note(self.directory))))
        _all.add(self)

    def _open(self) -> None:
        _refuse_links_of_others(self.directory)
        try:
            self._file = _LentFile(self.directory, direct=self._direct)
        except OSError as error:
            is_missing = isinstance(
                error, (FileNotFoundError, NotADirectoryError)
            )  # the message needs no cause
            raise StashIOError(
                error.errno,
                f"{self.name} cannot hold a file ({_reason(error, self.directory)}): {_remedy(error)}",
            ) from None if is_missing else error
        self._closer = weakref.finalize(self, self._file.close)
        # Not at the interpreter's exit: the system closes it, and until then a backward may still run.
        self._closer.atexit = False

    def forked(self) -> None:
        """Close the inherited file in a forked child. The first slot creates a new one.

        A signal handler may fork in the middle of any call here, which then continues in both processes. In
        the child the extents and the descriptor of that call belong to a closed file and are refused.
        """
        self.lock = threading.RLock()  # another thread may have held the old one
        self._file.leases = Leases(unit_bytes=_UNIT_BYTES)
        self._file.allocated = 0
        self._closer()

    begins_anew_when_forked = True

    def __repr__(self) -> str:
        return f"Disk({self.directory!r}, used_bytes={self.used_bytes}, direct={self.direct})"

    @property
    def direct(self) -> bool:
        """Whether direct I/O is in use."""
        return self._file.direct

    @property
    def used_bytes(self) -> int:
        """Bytes reserved at present, each slot rounded up to 4096."""
        leases = self._file.leases
        if not leases.in_order and not is_mine(self.lock):
            with self.lock:
                leases.settle()
        return leases.extents.used_bytes

    @property
    def file_bytes(self) -> int:
        """The size of the file, which is the most that was needed so far."""
        return self._file.allocated

    def reserve(self, nbytes: int) -> Slot:
        """Return a slot for ``nbytes``, growing the file if needed. Its space is freed when the slot dies.

        Raises:
            StashFullError: ``max_bytes`` or the file system leaves no space. Nothing changes then.
            StashClosedError: after :meth:`close`.
        """
        if self._is_closed:
            raise self._closed()
        slot = Slot(nbytes)
        with self.lock:
            if self._file.fd < 0:
                self._open_again(nbytes)
            slot.file = file = self._file
            slot.offset = file.leases.take(slot, nbytes)
            try:
                if file.leases.extents.end_bytes > file.allocated:
                    self._grow(file, file.leases.extents.end_bytes)
            except OSError as error:
                file.leases.free(slot.offset)
                self._file_of(slot)
                raise self._full(nbytes, error) from error
        return slot

    def _open_again(self, nbytes: int) -> None:
        """Create the file of a forked child."""
        try:
            self._open()
        except OSError as error:
            raise self._full(nbytes, error) from error

    def _grow(self, file: _LentFile, end: int) -> None:
        limit = self.max_bytes
        if limit is not None and end > limit:
            raise OSError(errno.ENOSPC, f"max_bytes is {format_bytes(limit)}")
        generous = max(end, file.allocated + _GROW_BYTES)
        for size in (generous if limit is None else min(generous, limit), end):
            try:
                file.grow(size)
            except OSError:
                file.shrink(file.allocated)  # ext4 keeps what it allocated before it was full
                if size == end:
                    raise
                continue
            file.allocated = size
            return

    def _full(self, nbytes: int, error: OSError) -> StashFullError:
        # Not through the used_bytes property, which may take the lock that the caller holds.
        held = self._file.leases.extents.used_bytes
        return StashFullError(
            errno.ENOSPC,
            f"{self.name} has no space for {format_bytes(nbytes)} in addition to the "
            f"{format_bytes(held)} it holds ({error.strerror}): free space, raise max_bytes, or give "
            "another directory",
        )

    def stage(self, slot: Slot, address: int) -> None:
        """Copy the ends of a slot's bytes that do not fill aligned units. They stay in memory."""
        start, middle = self._middle(slot, address)
        # The same as ctypes.string_at, without its Python call.
        slot.head = (ctypes.c_char * (start - address)).from_address(address).raw
        after = start + middle
        slot.tail = (ctypes.c_char * (address + slot.nbytes - after)).from_address(after).raw
        slot.staged = True

    def write(self, slot: Slot, address: int) -> None:
        """Write a slot from memory at ``address``. Only whole aligned units go to the file; the rest stays."""
        file = self._file_of(slot)
        if not slot.staged:
            self.stage(slot, address)
        slot.staged = False
        start, middle = self._middle(slot, address)
        try:
            file.write(start, middle, slot.offset)
            if self.verify:
                slot.checksum = _checksum_by_the_system(start, middle)
        except OSError as error:
            self._file_of(slot)
            raise StashIOError(
                error.errno, f"{self.name}: write failed: {error.strerror}"
            ) from error

    def read(self, slot: Slot, address: int) -> None:
        """Read a slot to memory at ``address``, which equals the source's address modulo 4096."""
        file = self._file_of(slot)
        start, middle = self._middle(slot, address)
        try:
            file.read(start, middle, slot.offset)
        except OSError as error:
            self._file_of(slot)
            raise StashIOError(
                error.errno, f"{self.name}: read failed: {error.strerror}"
            ) from error
        if slot.checksum is not None and _checksum(start, middle) != slot.checksum:
            raise StashCorruptError(
                errno.EIO,
                f"{self.name}: {middle} bytes at offset {slot.offset} are not what was written "
                "(checksum differs): the disk or its driver changed them",
            )
        ctypes.memmove(address, slot.head, len(slot.head))
        ctypes.memmove(start + middle, slot.tail, len(slot.tail))

    def release(self, slot: Slot) -> None:
        """Free the slot's extent. The file keeps its size."""
        with self.lock:
            slot.file.leases.free(slot.offset)

    def close(self) -> None:
        """Close the file, which frees its space and discards its bytes."""
        self._is_closed = True
        self._closer()

    def _closed(self) -> StashClosedError:
        return StashClosedError(f"{self.name} is closed")

    def _file_of(self, slot: Slot) -> _LentFile:
        """Return the slot's file. Raises if it is closed or belongs to another process."""
        file: _LentFile = slot.file
        if file.fd < 0:
            raise self._closed() if self._is_closed else _forked(self.name)
        return file

    def _middle(self, slot: Slot, address: int) -> tuple[int, int]:
        """Return the address and length of the part that goes through the file."""
        if not self._file.direct:
            return address, slot.nbytes
        align = self._file.memory_align
        start = min(-(-address // align) * align, address + slot.nbytes)
        return start, (address + slot.nbytes - start) // _UNIT_BYTES * _UNIT_BYTES


class _LentFile(UnnamedFile):
    """A file and the leases of its extents in one object, so that no call mixes those of two files."""

    def __init__(self, directory: str, *, direct: bool) -> None:
        self.leases = Leases(unit_bytes=_UNIT_BYTES)
        self.allocated = 0
        super().__init__(directory, direct=direct)


def _forked(name: str) -> StashForkedError:
    return StashForkedError(
        f"{name}: this slot is in the parent process's file, which the parent still uses: run backward "
        "in the parent process, or run forward again in this process"
    )


def _reason(error: OSError, directory: str) -> str:
    # The kernel's own file systems (such as /proc) answer this to the creation of a file.
    if error.errno == errno.ENOENT and os.path.isdir(directory):
        return "its file system accepts no new files"
    return str(error.strerror)


def _remedy(error: OSError) -> str:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "close files, or raise the limit of open ones (ulimit -n)"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free space, or give another directory"
    return "it must be an existing, writable directory"


def _checksum(address: int, nbytes: int) -> int:
    value = 0
    for done in range(0, nbytes, _CHECKSUM_CALL_BYTES):
        part = min(_CHECKSUM_CALL_BYTES, nbytes - done)
        value = zlib.crc32((ctypes.c_char * part).from_address(address + done), value)
    return value


def _checksum_by_the_system(address: int, nbytes: int) -> int:
    """Return a checksum read through the system: an error, not a crash, if ``resize_`` unmaps the memory."""
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY)
    except OSError:
        return _checksum(address, nbytes)  # a system that cannot read memory this way
    value = 0
    try:
        for done in range(0, nbytes, _CHECKSUM_READ_BYTES):
            part = min(_CHECKSUM_READ_BYTES, nbytes - done)
            seen = os.pread(memory, part, address + done)
            if len(seen) < part:
                raise OSError(errno.EFAULT, "the memory was freed")
            value = zlib.crc32(seen, value)
    finally:
        os.close(memory)
    return value


def _refuse_links_of_others(directory: str) -> None:
    """Raise if another user put a symbolic link into a directory that everyone may write to.

    That user would choose where the bytes lie. Linux has the same rule for directories with the sticky bit
    (``protected_symlinks``).
    """
    path = Path(directory).absolute()
    for link in (path, *path.parents):
        try:
            own, above = os.lstat(link), os.stat(link.parent)
        except OSError:
            return  # opening the directory reports the problem
        if (
            stat.S_ISLNK(own.st_mode)
            and above.st_mode & stat.S_IWOTH
            and own.st_uid not in (os.geteuid(), above.st_uid)
        ):
            raise StashIOError(
                errno.ELOOP,
                f"disk {directory!r} is not used: {str(link)!r} is a symbolic link that another user "
                f"(uid {own.st_uid}) put into a directory open to all; give the directory it leads to",
            )


def _memory_note(directory: str) -> str:
    kind = _MEMORY_FILE_SYSTEMS.get(_file_system_type(directory), "")
    return f"{directory!r} is a {kind}: what is stored there still uses memory" if kind else ""


def _file_system_type(directory: str) -> int:
    """Return the file system's magic number (statfs(2)); 0 if it cannot be queried."""
    buffer = (ctypes.c_long * 64)()
    try:
        statfs = ctypes.CDLL(None).statfs
    except (OSError, AttributeError, TypeError):
        return 0
    return buffer[0] & 0xFFFFFFFF if statfs(os.fsencode(directory), buffer) == 0 else 0


_all: weakref.WeakSet[Disk] = weakref.WeakSet()


def _after_fork() -> None:
    """Close the inherited files in a forked child: an open descriptor would keep their space."""
    for disk in list(_all):
        disk.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
