"""Find how much memory this process can still allocate, given the machine and its control group.

This reads Linux's control groups of version 1 or 2. Elsewhere only the size of the memory is known.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .launcher import Job

__all__ = ["ControlGroup", "memory_group", "spare_bytes"]

_LIMIT_FILES = {1: "memory.limit_in_bytes", 2: "memory.max"}
_USAGE_FILES = {1: "memory.usage_in_bytes", 2: "memory.current"}
_CACHE_FIELDS = {
    1: ("total_inactive_file", "total_active_file"),
    2: ("inactive_file", "active_file"),
}
_PROC = Path("/proc")
_NO_LIMIT_BYTES = 1 << 60  # version 1 reports a number near 2**63 for "no limit"


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A memory control group: its limit, and what it uses."""

    version: int
    """1 or 2."""
    path: Path
    """Its directory in the control-group file system."""
    limit_bytes: int | None
    """The smallest limit in bytes of this group and of the groups above it; ``None``: no limit."""
    used_bytes: int
    """Bytes that the group with this limit uses, page cache included."""
    cache_bytes: int = 0
    """Bytes of these that are page cache, which the system reclaims when the limit is reached."""

    @property
    def spare_bytes(self) -> int | None:
        """Bytes left under the limit once page cache is reclaimed; ``None``: no limit."""
        if self.limit_bytes is None:
            return None
        return max(0, self.limit_bytes - self.used_bytes + self.cache_bytes)


def spare_bytes(proc: Path = _PROC) -> int:
    """Return how many bytes this process can still allocate, from the machine and in its control group.

    If a launcher started several processes on this machine, as ``torchrun``, ``deepspeed``, ``srun`` and
    ``mpirun`` do, this is the equal share of one of them.

    Args:
        proc: the directory with the system's ``meminfo`` and the processes' own files. Default ``/proc``.
            Without that file the size of the machine's memory counts as free.

    >>> spare_bytes() > 0
    True
    """
    group = memory_group(proc / "self")
    limits = [_available_bytes(proc / "meminfo")]
    if group is not None and group.spare_bytes is not None:
        limits.append(group.spare_bytes)
    return min(limits) // Job.now().local_processes


def _available_bytes(meminfo: Path) -> int:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def memory_group(proc: Path = Path("/proc/self")) -> ControlGroup | None:
    """Return this process's memory control group, or ``None`` if it is in none that can be read.

    Args:
        proc: the directory with the process's ``cgroup`` and ``mountinfo`` files. Default ``/proc/self``.
    """
    try:
        membership = (proc / "cgroup").read_text().splitlines()
        mounts = (proc / "mountinfo").read_text().splitlines()
    except OSError:
        return None
    for version, group in _memberships(membership):
        found = _mounted(version, group, mounts)
        if found is not None:
            return _limits(version, *found)
    return None


def _memberships(lines: list[str]) -> list[tuple[int, str]]:
    """Return (version, path) of each group; version 1 first, since it limits memory on a mixed system."""
    groups = []
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            groups.append((1, path))
        elif hierarchy == "0" and not controllers:
            groups.append((2, path))
    return sorted(groups)


def _mounted(version: int, group: str, mounts: list[str]) -> tuple[Path, Path] | None:
    """Return (the group's directory, its mount point); ``None`` if this process cannot see them."""
    for line in mounts:
        fields, _, tail = line.partition(" - ")
        kind, _, options = tail.split(" ", 2)
        root, mount = fields.split()[3:5]
        wanted = (
            kind == "cgroup" and "memory" in options.split(",")
            if version == 1
            else kind == "cgroup2"
        )
        if not wanted:
            continue
        top = Path(mount)
        path = top / group.removeprefix(root).strip("/")
        # In a container the path may exist only on the host: then the mount is the group.
        path = path if path.is_dir() else top
        if _number(path / _USAGE_FILES[version]) is not None or version == 1 or path == top:
            return path, top
    return None


def _limits(version: int, path: Path, top: Path) -> ControlGroup:
    limit, limited = None, path
    for group in (path, *path.parents):
        found = _number(group / _LIMIT_FILES[version])
        if found is not None and found < _NO_LIMIT_BYTES and (limit is None or found < limit):
            limit, limited = found, group
        if group == top:
            break
    used = _number(limited / _USAGE_FILES[version]) or 0
    return ControlGroup(version, path, limit, used, _cache_bytes(version, limited))


def _cache_bytes(version: int, group: Path) -> int:
    """Return the bytes of page cache, which ``MemAvailable`` in ``meminfo`` also counts, for the whole
    machine."""
    try:
        fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return sum(int(fields.get(name, 0)) for name in _CACHE_FIELDS[version])


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
