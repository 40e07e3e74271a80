#!/usr/bin/env python
"""What recording operations takes: time for each, and memory of what a program drops meanwhile.

    python benchmarks/tape.py [--runs N]
    python benchmarks/tape.py --forward      peak memory of a model's forward with hooks, and recorded, too
    python benchmarks/tape.py --small        steps of modules that save too little to recompute

Time: an unrolled LSTMCell of small tensors, plain, under a dispatch mode that does nothing, and under a tape of
a module and of a context, in turns: the least of the runs, divided by the operations that a tape notes. Memory:
the process's resident bytes after 300 pairs of tensors of 1 MiB were computed under each and dropped, each in a
process of its own.

``--forward``: the models of ``backstash bench``, each in processes of its own, the median of three. All saved
tensors stay in memory, under hooks only, and under hooks and a tape of the whole forward.

``--small``: recurrent cells over 64 steps and a network of 20 small layers, each cell or layer named to
``recompute``. The steps run in turns; the medians.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from backstash import Stash
from backstash._recompute.blocks import MOST_OPERATIONS
from backstash._recompute.context_tape import ContextTape
from backstash._recompute.holding import HoldingTape
from backstash.cli._resident import reset_resident_peak, resident_peak_bytes
from bench._workloads import WORKLOADS, call

WAYS = ("plain", "a mode", "a module's tape", "a context's tape")
PAIRS, SIDE, STEPS = 300, 512, 100
RETURNS = {
    "MALLOC_MMAP_THRESHOLD_": "1048576"
}  # glibc returns what is freed, so a peak is of tensors


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def under(way: str) -> Iterator[ContextTape | HoldingTape | None]:
    if way == "plain":
        yield None
    elif way == "a mode":
        with Nothing():
            yield None
    else:
        tape = ContextTape(MOST_OPERATIONS) if "context" in way else HoldingTape()
        tape.enter()
        try:
            yield tape
        finally:
            tape.leave()
            tape.end()


def resident_mib() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 >> 20


def memory(way: str) -> int:
    weight = torch.ones(SIDE, requires_grad=True)
    with under(way):
        for _ in range(PAIRS):
            x = torch.ones(SIDE, SIDE) * weight
            y = x * 2
            del x, y
        return resident_mib()


def seconds(way: str, cell: nn.LSTMCell, x: torch.Tensor) -> tuple[float, int]:
    with under(way) as tape:
        began = time.perf_counter()
        h = c = torch.zeros_like(x)
        for _ in range(STEPS):
            h, c = cell(x, (h, c))
        took = time.perf_counter() - began
        return took, tape._count if tape is not None else 0


def forward_peak(name: str, way: str) -> int:
    """The peak of the process in a forward, in KiB, after a whole step."""
    torch.manual_seed(0)
    workload = WORKLOADS[name]()
    for recorded in (False, way != "plain"):
        gc.collect()
        reset_resident_peak()
        with Stash(keep="1TiB"), under("a module's tape" if recorded else "plain"):
            loss = workload.model(*workload.inputs, call)
        peak = resident_peak_bytes()
        loss.backward()
        del loss
    return peak >> 10


def forward() -> None:
    """The table of ``--forward``."""
    print(f"{'forward, peak in MiB':22}{'hooks':>8}{'recorded':>10}{'ratio':>8}")
    for name in WORKLOADS:
        peaks: dict[str, list[int]] = {"plain": [], "a module's tape": []}
        for _ in range(3):
            for way, of in peaks.items():
                command = [sys.executable, __file__, "--forward-of", name, way]
                ran = subprocess.run(
                    command, capture_output=True, text=True, check=True, env=os.environ | RETURNS
                )
                of.append(int(ran.stdout))
        hooks, recorded = (statistics.median(each) for each in peaks.values())
        print(f"{name:22}{hooks / 1024:8.0f}{recorded / 1024:10.0f}{recorded / hooks:8.3f}")


class Unrolled(nn.Module):
    """A cell over 64 steps."""

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.named = nn.ModuleList([cell])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last hidden state."""
        state = None
        for part in x:
            state = self.named[0](part, state)
        return state[0] if isinstance(state, tuple) else state


class Layers(nn.Module):
    """Twenty small layers."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(20)]
        self.named = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last layer's result."""
        x = x[0]
        for layer in self.named:
            x = layer(x)
        return x


def small(runs: int) -> None:
    """The table of ``--small``."""
    kinds: dict[str, Callable[[], nn.Module]] = {
        "LSTMCell": lambda: Unrolled(nn.LSTMCell(32, 32)),
        "GRUCell": lambda: Unrolled(nn.GRUCell(32, 32)),
        "20 layers": Layers,
    }
    print(f"{'ms a step':12}{'plain':>8}{'in a stash':>12}{'recomputed':>12}{'ratio':>8}")
    x = torch.randn(64, 8, 32)
    for name, make in kinds.items():
        stash = Stash()
        plain, managed, named = make(), make(), make()
        taken: list[list[float]] = [[], [], []]
        with stash.recompute(*named.named):
            for _ in range(runs + 5):
                for net, of in zip((plain, managed, named), taken, strict=True):
                    net.zero_grad()
                    began = time.perf_counter()
                    with nullcontext() if net is plain else stash:
                        loss = net(x).sum()
                    loss.backward()
                    of.append(time.perf_counter() - began)
        ms = [statistics.median(each[5:]) * 1e3 for each in taken]
        print(f"{name:12}{ms[0]:8.2f}{ms[1]:12.2f}{ms[2]:12.2f}{ms[2] / ms[0]:8.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--memory", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--forward", action="store_true", help="peaks of models' forwards instead")
    parser.add_argument("--small", action="store_true", help="steps of small modules instead")
    parser.add_argument("--forward-of", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.forward_of:
        print(forward_peak(*options.forward_of))
        return 0
    if options.forward:
        forward()
        return 0
    if options.small:
        small(options.runs)
        return 0
    if options.memory:
        print(memory(options.memory))
        return 0
    cell, x = nn.LSTMCell(32, 32), torch.randn(4, 32)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    count = 0
    for _ in range(options.runs):
        for way in WAYS:
            took, noted = seconds(way, cell, x)
            found[way].append(took)
            count = max(count, noted)
    print(f"{'':18}{'us an operation':>18}{'MiB resident':>14}")
    for way in WAYS:
        command = [sys.executable, __file__, "--memory", way]
        mib = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        print(f"{way:18}{min(found[way]) / count * 1e6:18.1f}{mib:14}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
