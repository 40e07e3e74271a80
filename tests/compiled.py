"""Libraries that tests bring along as source."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

__all__ = ["CannotBuild", "compiled"]

_BUILDS = Path(__file__).resolve().parent.parent / "build"


class CannotBuild(Exception):
    """There is no compiler here, or not what it needs; the words say what."""


def compiled(source: Path, *options: object, of: str = "") -> Path:
    """The shared library of a C++ file, built where there is none.

    Args:
        source: the file.
        options: of the compiler.
        of: what else a library belongs to: versions of what it is built against.

    Raises:
        CannotBuild: no compiler, or it refuses.
    """
    words = list(map(str, options))
    compiler = os.environ.get("CXX", "c++")
    what = source.read_bytes() + "\0".join([of, compiler, *words]).encode()
    digest = hashlib.sha256(what).hexdigest()[:16]
    library = _BUILDS / f"{source.parent.name}-{source.stem}-{digest}.so"
    if library.exists():
        return library
    found = shutil.which(compiler)
    if found is None:
        raise CannotBuild("there is no C++ compiler (c++, or what CXX names)")
    _BUILDS.mkdir(exist_ok=True)
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process of the tests may be building it
        if library.exists():
            return library
        unfinished = library.with_suffix(f".{os.getpid()}")
        command = [found, "-std=c++20", "-O1", "-fPIC", "-shared", "-o", str(unfinished)]
        done = subprocess.run([*command, str(source), *words], capture_output=True, text=True)
        if done.returncode:
            raise CannotBuild(f"{found} refuses: {done.stderr[-2000:]}")
        unfinished.rename(library)
    return library
