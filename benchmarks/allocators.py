#!/usr/bin/env python
"""What memory costs under each allocator that a script could have on this machine.

A training step under a stash asks for tensors, fills them, and lets each go a little later. A short process
for each allocator does that, without torch: so many MiB in blocks of 1 to 16 MiB, of which eight are held at
once. Where the stash would call ``malloc_trim``, so does this.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping

from backstash.cli._allocator import choose, find, preloaded

__all__ = ["USED_BYTES", "main", "measure"]

USED_BYTES = 1 << 30
"""How many bytes each process asks for, fills and frees while it is timed."""
_PROGRAM = """\
import ctypes, json, random, resource, sys
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.memset.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
total, trims = int(sys.argv[1]), sys.argv[2] == "trims" and hasattr(libc, "malloc_trim")
def step():
    draw, held, used, freed = random.Random(0), [], 0, 0
    while used < total:
        nbytes = draw.randrange(1 << 20, 16 << 20)
        held.append((libc.memset(libc.malloc(nbytes), 1, nbytes), nbytes))
        used += nbytes
        if len(held) > 8:
            memory, nbytes = held.pop(0)
            libc.free(memory)
            freed += nbytes
            if trims and freed >= 256 << 20:
                libc.malloc_trim(0)
                freed = 0
    for memory, _ in held:
        libc.free(memory)
def seconds():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
step()
before = seconds()
step()
print(json.dumps(seconds() - before))
"""


def measure(installed: Mapping[str, str], used_bytes: int = USED_BYTES) -> dict[str, float]:
    """Processor seconds under each allocator, by the names that ``--malloc`` takes; the fastest first.

    Args:
        installed: from kind to file, as ``find`` returns it.
        used_bytes: how many bytes each process asks for, fills and frees. Default 1 GiB.

    One that cannot be measured is left out, and so are all where the caller preloads an allocator.
    """
    if preloaded(os.environ):
        return {}
    found: dict[str, float] = {}
    for kind in (*installed, "glibc", "none"):
        allocator = choose(kind, os.environ, installed)
        if allocator.kind != kind:  # not on this system
            continue
        trims = "trims" if kind in ("glibc", "none") else "reuses"
        try:
            ended = subprocess.run(
                [sys.executable, "-I", "-c", _PROGRAM, str(used_bytes), trims],
                env={**os.environ, **allocator.environment},
                capture_output=True,
                check=True,
            )
            found[kind] = float(json.loads(ended.stdout))
        except (OSError, ValueError, subprocess.CalledProcessError):
            continue
    return dict(sorted(found.items(), key=lambda pair: pair[1]))


def main() -> int:
    """Print a line for each allocator, the fastest first."""
    for kind, seconds in measure(find()).items():
        print(f"{kind:<10} {seconds:6.2f} s of processor time for {USED_BYTES >> 20} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
