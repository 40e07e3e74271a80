"""One process of the benchmarks `overhead` and `alive`; its only argument, in JSON, says which one.

They time a stash's own work: for each small saved tensor, and while many saved tensors are alive.
"""

from __future__ import annotations

import json
import operator
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from backstash import Stash

__all__ = ["alive", "main", "overhead", "seconds_of_unpacks"]

_ELEMENTS = 16  # of each tensor in the chain: 64 bytes, far below min_bytes
_SAMPLE = 1000  # packs, and unpacks, that are timed with so many others alive
_ROUNDS = 5


def main() -> None:
    """Measure what the only argument asks for, in JSON, and print the figures on the last line."""
    task = json.loads(sys.argv[1])
    if task["what"] == "overhead":
        result: dict[str, Any] = overhead(task["operations"], task["rounds"], task["directory"])
    else:
        result = {
            "rows": [alive(task["mode"], count, task["directory"]) for count in task["counts"]]
        }
    print(json.dumps(result))


def overhead(operations: int, rounds: int, directory: str) -> dict[str, Any]:
    """Seconds per operation of a chain, forward and backward, interleaved over ``rounds``.

    Each operation saves its input, one small tensor. Three ways are compared: no hooks at all, a pair of
    Python hooks that return what they get, and a stash with a disk.
    """
    stash = Stash(disk=directory, name="overhead")
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "no hooks": nullcontext,
        "empty hooks": lambda: saved_tensors_hooks(lambda tensor: tensor, lambda held: held),
        "stash": lambda: stash,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for name in ways:
        _forward_backward(operations, ways[name])
    for at in range(rounds):
        order = list(ways)[at % len(ways) :] + list(ways)[: at % len(ways)]
        for name in order:
            seconds[name].append(_forward_backward(operations, ways[name]) / operations)
    stash.close()
    return {"operations": operations, "seconds_per_operation": seconds}


def _forward_backward(operations: int, way: Callable[[], AbstractContextManager[Any]]) -> float:
    leaf = torch.zeros(_ELEMENTS, requires_grad=True)
    started = time.perf_counter()
    with way():
        y = _chain(leaf, operations)
    torch.autograd.backward(y.sum())
    return time.perf_counter() - started


def _chain(x: Tensor, operations: int) -> Tensor:
    for _ in range(operations):
        x = x.sin()
    return x


def alive(mode: str, count: int, directory: str) -> dict[str, Any]:
    """Seconds per pack and per unpack while ``count`` saved tensors are alive.

    Args:
        mode: ``small`` (the tensors are too small for the stash, which leaves them in place), ``keep`` (the
            stash holds each one in place, as a block) or ``disk`` (it moves each one to disk).
        count: how many saved tensors there are.
        directory: where the disk tier is.

    Returns:
        The mode, the count, and medians over rounds of 1000 packs and 1000 unpacks; a pack is an
        operation with the stash less the same operation without hooks.
    """
    options: dict[str, dict[str, Any]] = {
        "small": {"disk": directory},
        "keep": {"keep": None, "disk": directory, "min_bytes": 1},
        "disk": {"disk": directory, "min_bytes": 1},
    }
    stash = Stash(name=f"alive {mode}", **options[mode])
    leaf = torch.zeros(_ELEMENTS, requires_grad=True)
    with stash:
        saved = _fan(leaf, count)
    packs, plain, unpacks = [], [], []
    for _ in range(_ROUNDS):
        plain.append(_seconds_of_operations(leaf, nullcontext()))
        packs.append(_seconds_of_operations(leaf, stash))
        unpacks.append(seconds_of_unpacks(saved))
    del saved
    stash.close()
    return {
        "mode": mode,
        "alive": count,
        "pack_seconds": statistics.median(packs) - statistics.median(plain),
        "unpack_seconds": statistics.median(unpacks),
    }


def _fan(leaf: Tensor, count: int) -> list[Tensor]:
    """``count`` graphs of one node that saves its own result.

    Not one graph of that depth: torch 2.13 overflows its stack when it frees a chain of 100,000 nodes
    that Python has walked, with hooks or without.
    """
    return [leaf.exp() for _ in range(count)]


def _seconds_of_operations(leaf: Tensor, context: AbstractContextManager[Any]) -> float:
    with context:
        started = time.perf_counter()
        held = _fan(leaf, _SAMPLE)
        seconds = time.perf_counter() - started
    del held
    return seconds / _SAMPLE


def seconds_of_unpacks(saved: list[Tensor]) -> float:
    """Mean seconds of one use of a saved tensor, over about 1000 of them, spread evenly."""
    unpack = operator.attrgetter("_saved_result")
    nodes = [y.grad_fn for y in saved[:: max(1, len(saved) // _SAMPLE)]]
    started = time.perf_counter()
    for node in nodes:
        unpack(node)
    return (time.perf_counter() - started) / len(nodes)


if __name__ == "__main__":
    main()
