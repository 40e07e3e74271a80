"""Choose a directory for tensors that move to disk, for ``disk=True`` and for ``backstash run`` without
``--disk``."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from .units import format_bytes

__all__ = ["IN_MEMORY", "file_system", "scratch"]

IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
"""Types of file systems whose files are in memory."""

# File systems of clusters, of other machines, or served by a program: slow, and shared with others.
_REMOTE = frozenset(
    "9p afs beegfs ceph cifs gfs2 glusterfs gpfs lustre nfs nfs4 ocfs2 orangefs panfs pvfs2 smb3 smbfs "
    "virtiofs wekafs".split()
)
_OWN_FUSE = ("fuse.fuse-overlayfs",)  # a container's, on this machine's disk


def scratch(candidates: Iterable[str] | None = None) -> tuple[str, str] | None:
    """Return the directory on a real disk with the most free space, and why it was chosen; ``None`` if there is
    none.

    Args:
        candidates: directories, preferred ones first. Default: ``$TMPDIR`` or Python's directory for temporary
            files (``/tmp``), ``/scratch``, ``/var/tmp``, and the working directory. A candidate must be
            writable, and its file system must be on a disk of this machine.
    """
    if candidates is None:
        candidates = (tempfile.gettempdir(), "/scratch", "/var/tmp", os.getcwd())
    best: tuple[int, str, str] | None = None
    for directory in dict.fromkeys(candidates):
        if not (os.path.isdir(directory) and os.access(directory, os.W_OK | os.X_OK)):
            continue
        kind = file_system(directory)
        if kind in IN_MEMORY or _is_remote(kind):
            continue
        free = shutil.disk_usage(directory).free
        if best is None or free > best[0]:
            best = free, directory, kind
    if best is None:
        return None
    free, directory, kind = best
    return directory, f"{kind or 'a file system'} with {format_bytes(free)} free"


def file_system(path: str, mountinfo: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the file system that ``path`` is on, such as ``"ext4"``; ``""`` where unknown."""
    target = os.path.realpath(path)
    try:
        lines = mountinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    best, kind = -1, ""
    for line in lines:
        fields, _, tail = line.partition(" - ")
        mount = _unescaped(fields.split()[4])
        inside = target == mount or target.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= best:
            best, kind = len(mount), tail.split()[0]
    return kind


def _unescaped(mount: str) -> str:
    """Decode the octal escapes of proc(5): space, tab, newline and backslash."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), mount)


def _is_remote(kind: str) -> bool:
    return kind in _REMOTE or (kind.startswith("fuse.") and kind not in _OWN_FUSE)
