"""Choose a memory allocator for a training process, and the variables that select it.

A stash frees a tensor as soon as its bytes are on disk. Whether the process becomes smaller then depends on the
allocator. glibc keeps freed blocks below its growing threshold in its heap, in pieces. When it returns them to
the system, the next step has to fault in every page again. An allocator that keeps whole pages by size and
reuses them does neither. With other settings, which can be changed at any time, glibc does neither either.

Most allocators cost a small program more memory than a stash can save it (see `docs/explanation/memory.md`);
tcmalloc does not. So `auto` takes tcmalloc if it is installed. Otherwise it keeps the process's allocator, and
the stash changes glibc's settings once it has moved much (:mod:`backstash._runtime.trim`).

Environment variables select another allocator before a process starts. This module does not change the process
that it runs in.
"""

from __future__ import annotations

import os
import platform
import site
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["CHOICES", "INSTALL_HINT", "Allocator", "choose", "find", "preloaded"]

_FILES = {
    "tcmalloc": ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4"),
    "jemalloc": ("libjemalloc.so.2",),
    "mimalloc": ("libmimalloc.so.3", "libmimalloc.so.2"),
    "tbb": ("libtbbmalloc_proxy.so.2",),
}
# A library in the same directory that has to be preloaded first, because the loader might not find it.
_PRELOADED_FIRST = {"tbb": "libtbbmalloc.so.2"}
CHOICES = ("auto", "glibc", *_FILES, "none")
_FROM_PYPI = "pip install tbb"  # it has wheels only for Linux on x86-64
_FROM_THE_SYSTEM = (
    "apt install libtcmalloc-minimal4, dnf install gperftools-libs, conda install gperftools"
)
INSTALL_HINT = (
    f"{_FROM_PYPI}, or {_FROM_THE_SYSTEM}" if platform.machine() == "x86_64" else _FROM_THE_SYSTEM
)

_HUGE_TENSORS = {"THP_MEM_ALLOC_ENABLE": "1"}  # torch: huge pages for tensors of 2 MiB or more
# One heap in huge pages for tensors of any size, which free() never shrinks, so that freed memory is reused.
# The stash itself returns the memory that forward freed, with malloc_trim.
_GLIBC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
    **_HUGE_TENSORS,
}
_TUNABLES = "GLIBC_TUNABLES"
_HUGE_PAGES = "glibc.malloc.hugetlb=1"  # glibc 2.35 and later: huge pages for the rest
_WHY = {
    "own": "the process's own; glibc is set to reuse freed memory once much is moved",
    "tcmalloc": "it reuses the memory of freed tensors",
    "jemalloc": "asked for",
    "mimalloc": "asked for",
    "tbb": "it reuses the memory of freed tensors",
    "glibc": "tuned to reuse the memory of freed tensors, in huge pages",
}


@dataclass(frozen=True, slots=True)
class Allocator:
    """A choice of allocator."""

    kind: str
    """``own`` (the process's, its settings changed once much is moved), ``glibc`` (tuned from the start),
    ``tcmalloc``, ``jemalloc``, ``mimalloc``, ``tbb``, or ``none`` (unchanged)."""
    reason: str
    """Why it was chosen, as text."""
    library: str = ""
    """The preloaded file; empty for ``own``, ``glibc`` and ``none``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The environment variables that select it; set them before the process starts."""


def choose(
    asked: str, environ: Mapping[str, str], installed: Mapping[str, str], libc: str | None = None
) -> Allocator:
    """Choose an allocator for a process that has not started yet.

    Args:
        asked: one of :data:`CHOICES`; ``auto`` takes tcmalloc if it is installed, and otherwise keeps the
            process's own.
        environ: the environment that the process would have.
        installed: kind to file, as :func:`find` returns it.
        libc: the C library's name; ``None`` asks the system.

    Raises:
        LookupError: ``asked`` names an allocator that is not installed; the message lists those that are.
    """
    if asked == "none":
        return Allocator("none", "asked to leave the allocator alone")
    present = preloaded(environ)
    if asked == "auto" and present:
        return Allocator("none", f"LD_PRELOAD already has {present}")
    if (platform.libc_ver()[0] if libc is None else libc) != "glibc":
        return Allocator("none", "another allocator can be preloaded only on Linux with glibc")
    if asked in _FILES:
        if asked not in installed:
            raise LookupError(_missing(asked, installed))
        return _preload(asked, installed[asked], environ)
    if asked == "auto" and "tcmalloc" in installed:
        return _preload("tcmalloc", installed["tcmalloc"], environ)
    if asked == "auto":
        return Allocator("own", _WHY["own"], "", _huge_pages(environ))
    return _tuned_glibc(environ)


def _preload(kind: str, library: str, environ: Mapping[str, str]) -> Allocator:
    before = environ.get("LD_PRELOAD", "")
    value = ":".join([*_libraries(kind, library), *([before] if before else [])])
    return Allocator(kind, _WHY[kind], library, {"LD_PRELOAD": value, **_huge_pages(environ)})


def _huge_pages(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in _HUGE_TENSORS.items() if name not in environ}


def _tuned_glibc(environ: Mapping[str, str]) -> Allocator:
    settings = {name: value for name, value in _GLIBC.items() if name not in environ}
    if "MALLOC_MMAP_THRESHOLD_" in environ:  # the caller wants large tensors mapped
        settings.pop("MALLOC_MMAP_MAX_", None)
    tunables = environ.get(_TUNABLES, "")
    if "glibc.malloc.hugetlb" not in tunables:
        settings[_TUNABLES] = f"{tunables}:{_HUGE_PAGES}" if tunables else _HUGE_PAGES
    return Allocator("glibc", _WHY["glibc"], "", settings)


def _missing(asked: str, installed: Mapping[str, str]) -> str:
    there = ", ".join(["auto", "glibc", *installed, "none"])
    hints = {"tcmalloc": f"; {_FROM_THE_SYSTEM}", "tbb": f"; {_FROM_PYPI}"}
    hint = hints.get(asked, "")
    return f"--malloc {asked}: {_FILES[asked][0]} is not installed{hint}; allowed here: {there}"


def preloaded(environ: Mapping[str, str]) -> str:
    """Return the kind of allocator that ``LD_PRELOAD`` in ``environ`` already names; ``""`` for none."""
    files = environ.get("LD_PRELOAD", "").replace(":", " ").split()
    names = [os.path.basename(file) for file in files]
    return next(
        (kind for kind in _FILES if any(name.startswith(f"lib{kind}") for name in names)), ""
    )


def find(directories: Iterable[str] | None = None) -> dict[str, str]:
    """Return the allocators that a process of this interpreter can preload, kind to file.

    Args:
        directories: where to look, in order; ``None``: the library directories of the environment and of the
            user (where conda puts them, and pip puts tbb's), and the usual ones of the system. A directory
            whose path contains a space or a colon is skipped: these separate the entries of ``LD_PRELOAD``.
    """
    where = list(_directories() if directories is None else directories)
    found = {}
    for kind, names in _FILES.items():
        paths = (os.path.join(directory, name) for name in names for directory in where)
        path = next((path for path in paths if _is_usable(kind, path)), None)
        if path is not None:
            found[kind] = path
    return found


def _is_usable(kind: str, path: str) -> bool:
    return not set(path) & set(" :") and all(map(os.path.isfile, _libraries(kind, path)))


def _libraries(kind: str, path: str) -> list[str]:
    """Return the files to preload for the library at ``path``, in order."""
    first = _PRELOADED_FIRST.get(kind)
    return [path] if first is None else [os.path.join(os.path.dirname(path), first), path]


def _directories() -> list[str]:
    multiarch = sysconfig.get_config_var("MULTIARCH") or f"{platform.machine()}-linux-gnu"
    usual = [
        f"/usr/lib/{multiarch}",
        f"/lib/{multiarch}",
        "/usr/lib64",
        "/usr/local/lib",
        "/usr/lib",
    ]
    installed = (sys.prefix, site.getuserbase(), sys.base_prefix)
    return [*(os.path.join(prefix, "lib") for prefix in installed), *usual]
