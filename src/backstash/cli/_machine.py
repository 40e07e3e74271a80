"""Collect facts about this machine: processor, memory, huge pages, versions. The host name is not included."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from .. import __version__

__all__ = ["Machine", "machine", "versions"]


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts that a measurement depends on."""

    processor: str
    """The processor's model name."""
    cores: int
    """Number of processors that this process may use."""
    memory_bytes: int
    """Bytes of physical memory."""
    available_bytes: int
    """Bytes that can be allocated without swapping, by the kernel's estimate."""
    swap_bytes: int
    """Bytes of swap space."""
    huge_pages: str
    """Transparent huge pages: ``always``, ``madvise`` or ``never``; empty if there are none."""
    kernel: str
    """The operating system and its release."""
    libc: str
    """The C library and its version."""

    def as_dict(self) -> dict[str, object]:
        """Return the fields as plain values, for JSON."""
        return asdict(self)


def machine() -> Machine:
    """Ask the operating system about this machine."""
    memory = _memory()
    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        memory_bytes=memory.get("MemTotal", 0),
        available_bytes=memory.get("MemAvailable", 0),
        swap_bytes=memory.get("SwapTotal", 0),
        huge_pages=_huge_pages(),
        kernel=f"{platform.system()} {platform.release()}",
        libc=" ".join(platform.libc_ver()).strip(),
    )


def versions() -> dict[str, str]:
    """Return the versions of backstash, torch and python."""
    return {
        "backstash": __version__,
        "torch": _version("torch"),
        "python": platform.python_version(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _processor() -> str:
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory() -> dict[str, int]:
    fields = (line.split() for line in _lines(Path("/proc/meminfo")))
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields if len(words) > 1}


def _huge_pages() -> str:
    lines = _lines(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    chosen = re.search(r"\[(\w+)\]", lines[0]) if lines else None
    return chosen[1] if chosen else ""


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
