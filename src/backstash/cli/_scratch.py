"""Where ``backstash run`` puts what it moves when no ``--disk`` is given."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable

from ..units import format_bytes
from ._machine import IN_MEMORY, file_system

__all__ = ["scratch"]

# Slow, and shared with others: of clusters, of other machines, and what a program serves.
_REMOTE = frozenset(
    "9p afs beegfs ceph cifs gfs2 glusterfs gpfs lustre nfs nfs4 ocfs2 orangefs panfs pvfs2 smb3 smbfs "
    "virtiofs wekafs".split()
)
_OWN_FUSE = ("fuse.fuse-overlayfs",)  # a container's, on this machine's disk


def scratch(candidates: Iterable[str] | None = None) -> tuple[str, str] | None:
    """The directory on a real disk with the most free space, and why it was chosen; ``None``: there is none.

    Args:
        candidates: directories, the preferred first. Default: ``$TMPDIR`` or what Python takes for temporary
            files (``/tmp``), ``/scratch``, ``/var/tmp``, the working directory. One counts if a file can be
            made in it and its file system is neither in memory nor on another machine.
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


def _is_remote(kind: str) -> bool:
    return kind in _REMOTE or (kind.startswith("fuse.") and kind not in _OWN_FUSE)
