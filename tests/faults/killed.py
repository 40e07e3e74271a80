"""A training process that is killed, and what it must not leave."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

TRAINS = """
import sys
from faulty import *
where, mix = Path(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
while True:  # opened, used, closed, and again, until somebody kills it
    stash = MIXES[mix](where)
    for _ in range(3):
        assert are_right(gradients(stash))
    stash.close()
"""


def environment() -> dict[str, str]:
    """One in which ``faulty`` can be imported."""
    here = Path(__file__).resolve().parent
    path = os.pathsep.join([str(here), str(here.parent), *filter(None, sys.path)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def train(where: Path, mix: str) -> subprocess.Popen[str]:
    """A process that trains, once it has begun."""
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINS, str(where), mix],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise AssertionError(process.communicate()[1])
    return process


def kill_at_random(rng: random.Random, where: Path, mixes: list[str]) -> list[str]:
    """Kill processes that share ``where`` at random moments; what is wrong, in words."""
    shared = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    free = _free(where)
    processes = [train(where, mix) for mix in mixes]
    found = []
    for process in processes:
        time.sleep(rng.random() * 0.5)  # any moment will do: none is waited for
        if process.poll() is not None:
            found.append(f"it ended by itself: {process.communicate()[1]}")
        process.send_signal(signal.SIGKILL)
    for process in processes:
        process.communicate()
    found += [f"file {name}" for name in os.listdir(where)]
    if os.path.isdir("/dev/shm"):
        found += [f"shared memory {name}" for name in set(os.listdir("/dev/shm")) - shared]
    if free is not None and _free(where) != free:
        found.append("space of the disk is still taken")
    return found


def _free(where: Path) -> int | None:
    """Free blocks of a file system that is ``where``'s alone; ``None`` where others write to it too."""
    return os.statvfs(where).f_bfree if os.path.ismount(where) else None
