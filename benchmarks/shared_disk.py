"""Several ranks of a machine move to one disk at the same time: what each gets of it.

    python benchmarks/shared_disk.py --disk /scratch                 # 1, 2, 4 and 8 processes, 10 s each
    python benchmarks/shared_disk.py --disk . --ranks 2 --seconds 0.2 --mib 16    # small, for tests

Each process has a stash of its own. It packs blocks of 16 MiB until it has packed as many as a step would, and
unpacks them in reverse order, again and again for as long as is given; it computes nothing. All begin when the
last one is ready. What is counted is what was written and read within that time.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import torch

from backstash import Stash
from backstash.cli._machine import machine
from backstash.scratch import file_system
from backstash.units import format_bytes
from bench._markdown import markdown

BLOCK_BYTES = 16 << 20
HEAD = ("processes", "all, a second", "fastest", "slowest", "slowest of fastest")


def rank(disk: str, seconds: float, nbytes: int) -> None:
    """One process: waits for a line, and prints how many bytes a second it has moved."""
    block = min(BLOCK_BYTES, nbytes // 2)
    stash = Stash(disk=disk, min_bytes=0)
    step(stash, block, nbytes)  # space on the disk is allocated
    before = moved(stash)
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        step(stash, block, nbytes)
    print((moved(stash) - before) / (time.perf_counter() - began), flush=True)
    stash.close()


def step(stash: Stash, block: int, nbytes: int) -> None:
    """Move so many bytes down and back."""
    with stash:
        packed = [stash.pack(torch.ones(block, dtype=torch.uint8)) for _ in range(nbytes // block)]
    while packed:
        stash.unpack(packed.pop())


def moved(stash: Stash) -> int:
    """Bytes that were written or read."""
    stats = stash.stats()
    return stats.written_bytes + stats.read_bytes


def together(count: int, options: argparse.Namespace) -> list[float]:
    """Bytes a second that each of ``count`` processes has moved at the same time."""
    command = [sys.executable, __file__, "--disk", options.disk, "--seconds", str(options.seconds)]
    ranks = [
        subprocess.Popen(
            [*command, "--mib", str(options.mib), "--rank"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    for each in ranks:
        assert each.stdout is not None and each.stdout.readline() == "ready\n"
    for each in ranks:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    return [float(each.communicate()[0]) for each in ranks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--disk", required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--mib", type=int, default=256, help="of a step, in each process")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.disk, options.seconds, options.mib << 20)
        return
    rows = []
    for count in options.ranks:
        speeds = sorted(together(count, options))
        cells = [f"{format_bytes(round(each))}" for each in (sum(speeds), speeds[-1], speeds[0])]
        rows.append((str(count), *cells, f"{speeds[0] / speeds[-1]:.0%}"))
    print(markdown(HEAD, rows))
    about = machine()
    print(
        f"\n{time.strftime('%Y-%m-%d')}; {about.processor}, {about.cores} cores, "
        f"{file_system(options.disk)}; torch {torch.__version__}"
    )


if __name__ == "__main__":
    main()
