"""An unnamed file that no other process can open, and that leaves no bytes in the page cache.

With ``O_TMPFILE`` the file never has a name. On other systems its name is removed before the first byte is
written. In both cases the kernel frees the file when the process ends, for whatever reason.

Direct I/O (``O_DIRECT``) moves bytes between the tensor's own memory and the device. If it is refused (by some
network and overlay file systems), writes are flushed with ``sync_file_range`` and dropped from the page cache
with ``posix_fadvise``. Otherwise a gigabyte on disk would also be a gigabyte of page cache.
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile

from ..errors import StashIOError
from ._base import PAGE_BYTES

__all__ = ["UnnamedFile"]

_CALL_BYTES = 16 << 20  # the most bytes of one system call: 4 to 16 MiB run at full speed
_STANDARD_ERROR = 2
_SYNC_WRITE_AND_WAIT = 7  # SYNC_FILE_RANGE_WAIT_BEFORE | _WRITE | _WAIT_AFTER


class UnnamedFile:
    """Bytes at offsets in a file without a name. Threads may call all methods at once on different ranges.

    Args:
        directory: an existing, writable directory for the file.
        direct: try ``O_DIRECT``. If it is refused, ``note`` has the reason.
    """

    def __init__(self, directory: str, *, direct: bool) -> None:
        self.note = ""
        self.direct = False
        self.memory_align = 1
        self.fd = -1
        try:
            refusal = self._open(directory, direct)
        except BaseException:  # a full disk is noticed after the file was opened
            self.close()
            raise
        if direct and not self.direct:
            self.note = (
                f"direct I/O refused in {directory!r} ({refusal}): buffered I/O, cache dropped"
            )

    def _open(self, directory: str, direct: bool) -> str:
        refusal = "this system has no O_DIRECT"
        if direct and hasattr(os, "O_DIRECT"):
            try:
                self.fd = _create(directory, os.O_DIRECT)
                self.direct = self._accepts_direct()
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            if self.direct:
                return ""
            refusal = "the file system returned EINVAL"
            self.close()
        self.fd = _create(directory, 0)
        return refusal

    def _accepts_direct(self) -> bool:
        """Find the memory alignment that direct transfers need, by writing one page."""
        for align in (512, PAGE_BYTES):
            buffer = (ctypes.c_char * (3 * PAGE_BYTES))()
            base = -(-ctypes.addressof(buffer) // PAGE_BYTES) * PAGE_BYTES + (align % PAGE_BYTES)
            try:
                written = os.pwrite(self.fd, _bytes_at(base, PAGE_BYTES), 0)
                os.ftruncate(self.fd, 0)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                continue
            if written == PAGE_BYTES:
                self.memory_align = align
                return True
        return False

    def grow(self, nbytes: int) -> None:
        """Allocate the file's blocks up to ``nbytes``. Raises ``OSError`` if there are not enough."""
        size = os.fstat(self.fd).st_size
        if nbytes <= size:
            return
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self.fd, size, nbytes - size)
                return
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
        os.ftruncate(self.fd, nbytes)

    def shrink(self, nbytes: int) -> None:
        """Free the blocks beyond ``nbytes``."""
        os.ftruncate(self.fd, nbytes)

    def write(self, address: int, nbytes: int, offset: int) -> None:
        """Write ``nbytes`` from memory at ``address``. A short write continues where it stopped."""
        done = 0
        while done < nbytes:
            part = _bytes_at(address + done, min(_CALL_BYTES, nbytes - done))
            count = os.pwrite(self.fd, part, offset + done)
            if count == 0:
                raise OSError(errno.ENOSPC, "the file system wrote nothing")
            done += count
        if not self.direct:
            self._drop_cache(offset, nbytes)

    def read(self, address: int, nbytes: int, offset: int) -> None:
        """Read ``nbytes`` into memory at ``address``. Raises ``StashIOError`` if the file ends early."""
        done = 0
        while done < nbytes:
            part = _bytes_at(address + done, min(_CALL_BYTES, nbytes - done))
            count = os.preadv(self.fd, [part], offset + done)
            if count == 0:
                raise StashIOError(
                    errno.EIO,
                    f"the file ends {nbytes - done} bytes early, at offset {offset + done}",
                )
            done += count
        if not self.direct:
            self._drop_cache(offset, nbytes)

    def _drop_cache(self, offset: int, nbytes: int) -> None:
        if _sync_file_range is not None:
            _sync_file_range(self.fd, offset, nbytes, _SYNC_WRITE_AND_WAIT)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the descriptor. A second call does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def _bytes_at(address: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * nbytes).from_address(address)


def _create(directory: str, flags: int) -> int:
    """Return a new file's descriptor, above the standard ones.

    A process may start with stdin, stdout or stderr closed, and the next file then gets that number: what a
    library writes to stderr would overwrite saved tensors.
    """
    fd = _open_unnamed(directory, flags | os.O_RDWR)
    if fd > _STANDARD_ERROR:
        return fd
    import fcntl

    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _STANDARD_ERROR + 1)
    finally:
        os.close(fd)


def _open_unnamed(directory: str, flags: int) -> int:
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(directory, flags | os.O_TMPFILE, 0o600)
        except OSError as error:
            # Not every file system has unnamed files; old kernels answer EISDIR or ENOENT.
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                raise
    return _create_named(directory, flags)


def _create_named(directory: str, flags: int) -> int:
    """Create a file, remove its name at once, and return its descriptor.

    The file is not opened a second time: in a directory that others may write to, the name might refer to
    another file by then.
    """
    import fcntl

    fd, path = tempfile.mkstemp(prefix=".backstash-", dir=directory)
    try:
        os.unlink(path)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | flags)
    except OSError:
        os.close(fd)
        raise
    return fd


def _load_sync_file_range() -> ctypes._CFuncPtr | None:  # type: ignore[name-defined]
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


_sync_file_range = _load_sync_file_range()
