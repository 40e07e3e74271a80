"""One long loop, held in five ways: plain, a plain Stash on disk, checkpoint_loop, and checkpoint per segment.

    python benchmarks/long_loop.py [--tiny] [--disk DIR]

Every way runs once in turn, then again; the table has medians. Memory is what the process's resident peak rose
by, in a process of its own. Gradients are compared with plain's, to the bit.
"""

import argparse
import hashlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from backstash import Stash
from backstash.graph import checkpoint_loop

WAYS = ("plain", "stash on disk", "loop in memory", "loop with disk", "checkpoint per segment")


def run(way: str, size: int, n: int, memory: int, disk: str) -> dict[str, object]:
    """Seconds of forward and backward, the resident peak, and the gradients' fingerprint."""
    generator = torch.Generator().manual_seed(0)
    w = (torch.randn(size, size, generator=generator) * 0.01).requires_grad_()
    x = torch.randn(size, size, generator=generator).requires_grad_()

    steps = 2  # at first, so that libraries are loaded

    def step(state: Tensor) -> Tensor:
        return torch.tanh(state + 0.1 * torch.sin(state @ w))

    def plainly() -> Tensor:
        state = x
        for _ in range(steps):
            state = step(state)
        return state

    def on_disk() -> Tensor:
        with Stash(disk=disk):
            return plainly()

    def by_segments() -> Tensor:
        each = max(1, int(steps**0.5))
        state = x
        for begin in range(0, steps, each):
            several = min(each, steps - begin)
            state = checkpoint(_several, step, state, several, use_reentrant=False)
        return state

    ways: dict[str, Callable[[], Tensor]] = {
        "plain": plainly,
        "stash on disk": on_disk,
        "loop in memory": lambda: checkpoint_loop(step, x, steps, memory=memory),
        "loop with disk": lambda: checkpoint_loop(step, x, steps, memory=memory, disk=disk),
        "checkpoint per segment": by_segments,
    }
    ways[way]().sum().backward()
    w.grad = x.grad = None
    steps = n
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.perf_counter()
    ways[way]().sum().backward()
    seconds = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    found = hashlib.sha256(bytes(w.grad.view(torch.uint8).flatten().tolist()))
    found.update(bytes(x.grad.view(torch.uint8).flatten().tolist()))
    return {"seconds": seconds, "peak_mib": peak / 1024, "gradients": found.hexdigest()[:12]}


def _several(step: Callable[[Tensor], Tensor], state: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        state = step(state)
    return state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a short loop, once")
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="where the disk's files go")
    parser.add_argument("--way", choices=WAYS, help="run this one alone, and print JSON")
    given = parser.parse_args()
    size, n, repeats = (32, 20, 1) if given.tiny else (256, 200, 3)
    memory = 16 * size * size * 4  # of sixteen states
    if given.way:
        print(json.dumps(run(given.way, size, n, memory, given.disk)))
        return
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way in WAYS:
            options = ["--disk", given.disk, "--way", way, *(["--tiny"] if given.tiny else [])]
            command = [sys.executable, __file__, *options]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[way].append(json.loads(output))
    reference = found["plain"][0]["gradients"]
    plain = statistics.median(each["seconds"] for each in found["plain"])
    print(
        f"{n} steps, a state of {size * size * 4 / 2**20:.3g} MiB, torch {torch.__version__}, CPU"
    )
    for way, each in found.items():
        seconds = statistics.median(one["seconds"] for one in each)
        peak = statistics.median(one["peak_mib"] for one in each)
        equal = "equal" if all(one["gradients"] == reference for one in each) else "DIFFER"
        print(
            f"{way:24}{seconds:8.2f} s {seconds / plain:6.2f} x {peak:8.0f} MiB  gradients {equal}"
        )


if __name__ == "__main__":
    main()
