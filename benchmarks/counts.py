#!/usr/bin/env python
"""What a stash asks of an accelerator for each block of a GPT, counted without one.

    benchmarks/counts.py [--json FILE]

On :class:`backstash.testing.CountedDevice`. Each figure is of one block of the model and one step: what a model
of eleven blocks asks beyond one of seven, by four. Of the last eight of 24 steps the one with the fewest calls
counts: under a budget some are measured, and ask for much more. "calls" are Python calls of functions of the
package; "files" are those that the whole step opens.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import backstash
from backstash import Stash
from backstash.testing import CountedDevice, stash_on

PACKAGE = str(Path(backstash.__file__).parent)
DEVICE = inspect.getfile(CountedDevice)  # what stands in for PyTorch's streams
FEW, MANY, STEPS, LAST = 7, 11, 24, 8
KEYS = (
    "kernels",
    "copies_down",
    "copies_up",
    "event_records",
    "stream_waits",
    "event_queries",
    "record_stream",
    "host_syncs",
    "memory_queries",
)


class Block(nn.Module):
    """Attention and a feed-forward part, each with its norm and dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            each.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for each in self.qkv(self.first(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.second(x)))))


class GPT(nn.Module):
    """As many examples iterate their blocks: no module calls the blocks but the model itself."""

    def __init__(self, blocks: int, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.head = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.tail = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.head(tokens)
        for block in self.blocks:
            x = block(x)
        return self.tail(x)


class Calls:
    """Counts the Python calls of the package while it is entered."""

    def __init__(self) -> None:
        self.by: Counter[str] = Counter()

    def __enter__(self) -> Calls:
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            code = frame.f_code
            if code.co_filename != DEVICE:
                self.by[f"{code.co_filename[len(PACKAGE) + 1 :]}:{code.co_name}"] += 1


_opened = [0]


def _audit(event: str, _: Any) -> None:
    _opened[0] += event == "open"


def saved_bytes(blocks: int) -> int:
    """What such a step saves, in bytes."""
    model = GPT(blocks)
    parameters = {each.untyped_storage().data_ptr() for each in model.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens()).square().mean()
    del loss
    return sum(storages.values())


def tokens() -> torch.Tensor:
    """A batch of four sequences."""
    return torch.randint(256, (4, 128), generator=torch.Generator().manual_seed(1))


def count(
    make: Callable[[CountedDevice, int], Stash], blocks: int, recompute: bool
) -> Counter[str]:
    """What the last of some steps asks.

    Args:
        make: the stash, given the device and the bytes that a step saves.
        blocks: of the model.
        recompute: whether its blocks are recomputed.
    """
    torch.manual_seed(0)
    nbytes = saved_bytes(blocks)
    device = CountedDevice()
    model, stash = GPT(blocks), make(device, nbytes)
    if recompute:
        stash.recompute(*model.blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    steps: list[Counter[str]] = []
    for _ in range(STEPS):
        _ = stash.plan
        device.counts.clear()
        _opened[0] = 0
        with Calls() as forward, stash:
            loss = model(tokens()).square().mean()
        down = device.counts.copy()
        with Calls() as backward:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
        found: Counter[str] = Counter()
        for key in KEYS:
            found[f"{key} forward"] = down[key]
            found[f"{key} backward"] = device.counts[key] - down[key]
        found["calls forward"] = sum(forward.by.values())
        found["calls backward"] = sum(backward.by.values())
        found["files"] = _opened[0]
        for name, part in (("forward", forward.by), ("backward", backward.by)):
            for function, number in part.items():
                found[f"{name}: {function}"] = number
        steps.append(found)
    stash.close()
    return min(steps[-LAST:], key=lambda each: each["calls forward"] + each["calls backward"])


MOVES: dict[str, Any] = {"min_bytes": 0, "host": "4GiB"}
# The stash, given the device and the bytes that a step saves; and whether the blocks are recomputed.
WAYS: dict[str, tuple[Callable[[CountedDevice, int], Stash], bool]] = {
    "kept (keep=)": (lambda device, n: stash_on(device, keep="4GiB", **MOVES), False),
    "a budget that fits": (lambda device, n: stash_on(device, budget=4 * n, **MOVES), False),
    "a budget of 60%": (lambda device, n: stash_on(device, budget=n * 6 // 10, **MOVES), False),
    "moved (host=)": (lambda device, n: stash_on(device, **MOVES), False),
    "recomputed (blocks)": (lambda device, n: stash_on(device, **MOVES), True),
}


def per_block(few: Counter[str], many: Counter[str]) -> dict[str, float]:
    """Of one block of the model; files, of the step."""
    found = {
        key: (many[key] - few[key]) / (MANY - FEW)
        for key in sorted({*few, *many})
        if key != "files"
    }
    found["files"] = many["files"]
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write all figures, with each function's calls")
    parser.add_argument(
        "--functions", type=int, default=0, help="list so many functions of each way"
    )
    given = parser.parse_args()
    sys.addaudithook(_audit)
    torch.set_num_threads(1)
    results: dict[str, dict[str, float]] = {}
    for name, (make, recompute) in WAYS.items():
        results[name] = per_block(*(count(make, blocks, recompute) for blocks in (FEW, MANY)))
    print(f"{'per block, forward/backward':27}" + "".join(f"{name:>27}" for name in results))
    for key in ("calls", *KEYS):
        row = [
            f"{each[f'{key} forward']:.4g}/{each[f'{key} backward']:.4g}"
            for each in results.values()
        ]
        print(f"{key:27}" + "".join(f"{cell:>27}" for cell in row))
    print(f"{'files in a step':27}" + "".join(f"{each['files']:>27}" for each in results.values()))
    for name, each in results.items():
        listed = sorted((-n, key) for key, n in each.items() if ": " in key)[: given.functions]
        for number, key in listed:
            print(f"{name}: {-number:6.1f} {key}")
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
