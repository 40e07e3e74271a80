"""Where ``backstash run`` puts what it moves when no ``--disk`` is given."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable

from ..units import format_bytes
from ._machine import IN_MEMORY, file_system

__all__ = ["scratch"]

_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs")  # slow, and shared with others


def scratch(candidates: Iterable[str] | None = None) -> tuple[str, str] | None:
    """The directory on a real disk with the most free space, and why it was chosen; ``None``: there is none.

    Args:
        candidates: directories, the preferred first. Default: ``$TMPDIR`` or what Python takes for temporary
            files, ``/scratch``, ``/var/tmp``, the working directory. One counts if a file can be made in it and
            its file system is neither in memory nor on another machine.
    """
    if candidates is None:
        candidates = (tempfile.gettempdir(), "/scratch", "/var/tmp", os.getcwd())
    best: tuple[int, str, str] | None = None
    for directory in dict.fromkeys(candidates):
        if not (os.path.isdir(directory) and os.access(directory, os.W_OK | os.X_OK)):
            continue
        kind = file_system(directory)
        if kind in IN_MEMORY or kind in _REMOTE:
            continue
        free = shutil.disk_usage(directory).free
        if best is None or free > best[0]:
            best = free, directory, kind
    if best is None:
        return None
    free, directory, kind = best
    return directory, f"{kind or 'a file system'} with {format_bytes(free)} free"
