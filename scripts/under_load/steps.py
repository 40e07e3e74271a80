"""Thousands of steps with changing shapes: what the process holds after them, compared with after the first."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backstash import Disk, Stash
from backstash.testing import TwinDevice, stash_on

from .resident import Held, held

__all__ = ["LEAKS", "TIERS", "Moment", "changing_steps", "growth"]

KIB, MIB = 1 << 10, 1 << 20

TIERS: dict[str, Callable[[str], Stash]] = {
    "keep, disk": lambda where: Stash(
        keep=MIB, disk=Disk(where), min_bytes=KIB, inflight=2 * MIB, prefetch=2 * MIB
    ),
    "disk": lambda where: Stash(disk=Disk(where), min_bytes=KIB),
    "keep": lambda where: Stash(keep=None, disk=Disk(where), min_bytes=KIB),
    "host, disk": lambda where: stash_on(
        TwinDevice(chance=0.5), host=12 * MIB, disk=Disk(where), min_bytes=KIB, inflight=2 * MIB
    ),
}

# What may grow from one moment to the next, late in a run: noise, and nothing that a step adds.
_SLACK = {
    "anonymous_bytes": 24 * MIB,
    "descriptors": 0,
    "threads": 0,
    "objects": 1500,
    "bookkeeping": 1500,
    "host_bytes": 0,
    "file_bytes": 0,
    "file_block_bytes": 0,
}


@dataclass(frozen=True, slots=True)
class Moment:
    """A look at a run."""

    step: int
    """After so many steps."""
    held: Held
    """What the process holds."""
    alive_bytes: int
    """The most that was alive on disk at once so far."""
    end_bytes: int
    """Where the last extent in the file ended at most, looked at after each forward."""
    wrong: str
    """What was wrong since the last look."""


def _end_of_file(stash: Stash) -> int:
    assert isinstance(stash._store, Disk)
    return stash._store._file.leases.extents.end_bytes


def _shape(order: random.Random, step: int) -> tuple[int, int]:
    """Rows and columns: uniform, heavy-tailed, or on a saw's tooth, in turn."""
    kind = step // 10 % 3
    if kind == 0:
        return order.randint(4, 400), 256
    if kind == 1:
        return min(1500, int(8 * order.paretovariate(0.9))), 192
    return 16 + 8 * (step % 60), 320


def changing_steps(
    tiers: str, directory: str, *, steps: int, seed: int, leak: str = "", moments: int = 6
) -> Iterator[Moment]:
    """Train, and look ``moments`` times.

    Args:
        tiers: of ``TIERS``.
        directory: where the disk tier is.
        steps: how many; shapes are new in each.
        seed: of the shapes.
        leak: of ``LEAKS``: something to be found.
    """
    stash = TIERS[tiers](directory)
    order, leaking = random.Random(seed), LEAKS[leak](stash, steps) if leak else None
    torch.manual_seed(seed)
    weights = {
        width: torch.randn(width, width).div_(width).requires_grad_() for width in (192, 256, 320)
    }
    late: list[tuple[Tensor, Tensor]] = []
    looks = {steps * number // moments for number in range(1, moments + 1)}
    wrong, end_bytes = "", 0
    for step in range(1, steps + 1):
        rows, width = _shape(order, step)
        weight, x = weights[width], torch.randn(rows, width)
        loss = _forward(stash, x, weight)
        end_bytes = max(end_bytes, _end_of_file(stash))
        if step % 7 == 0:
            late.append((loss, weight))  # differentiated in a later step
        elif step % 11:  # else dropped
            (gradient,) = torch.autograd.grad(loss, weight)
            if step % 50 == 0 and not torch.equal(gradient, _plain(x, weight)):
                wrong = f"step {step}: differs"
        if len(late) > 3:
            torch.autograd.grad(*late.pop(order.randrange(3)))
        if leaking is not None:
            leaking(step)
        if step in looks:
            late.clear()
            del loss
            yield Moment(step, held(stash), stash.stats().disk_peak_bytes, end_bytes, wrong)
            wrong = ""
    stash.close()
    assert isinstance(stash._store, Disk)
    stash._store.close()


def _forward(hold: AbstractContextManager[Any], x: Tensor, weight: Tensor) -> Tensor:
    with hold:
        h = x
        for _ in range(4):
            h = torch.tanh(h @ weight) * h.sigmoid() + h[: len(h) // 2 + 1].mean()
        return h.square().sum()


def _plain(x: Tensor, weight: Tensor) -> Tensor:
    h = x
    for _ in range(4):
        h = torch.tanh(h @ weight) * h.sigmoid() + h[: len(h) // 2 + 1].mean()
    (gradient,) = torch.autograd.grad(h.square().sum(), weight)
    return gradient


def growth(moments: list[Held]) -> list[str]:
    """What grew, in words: from the first half's largest figure to the second half's smallest.

    The first moment is a warm-up and left out. What only rises and falls does not grow; what each step
    adds to does, since then even the least of the later figures is above all earlier ones.
    """
    rest = moments[1:]
    early, late = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    found = []
    for name, slack in _SLACK.items():
        before, after = max(getattr(m, name) for m in early), min(getattr(m, name) for m in late)
        if after > before + slack:
            found.append(f"{name} grew from {before} to {after}")
    return found


# Things to be found.


class _Open:
    def __init__(self) -> None:
        self.fd = os.open(os.devnull, os.O_RDONLY)

    def __del__(self) -> None:
        os.close(self.fd)


def _leak_memory(stash: Stash, steps: int) -> Callable[[int], None]:
    held: list[Tensor] = []
    return lambda step: held.append(torch.ones(200 * MIB // 4 // steps))


def _leak_blocks(stash: Stash, steps: int) -> Callable[[int], None]:
    """A graph in each step that nobody ever drops: its bytes are on disk, so the file grows."""
    held: list[Tensor] = []

    def leak(step: int) -> None:
        with stash:
            held.append((torch.ones(400 * MIB // 4 // steps, requires_grad=True) * 2).exp())

    return leak


def _leak_descriptors(stash: Stash, steps: int) -> Callable[[int], None]:
    held: list[_Open] = []
    return lambda step: held.append(_Open()) if step % 5 == 0 else None


def _leak_objects(stash: Stash, steps: int) -> Callable[[int], None]:
    session: Any = stash._session
    session.leaked = []
    return lambda step: session.leaked.extend([{} for _ in range(1 + 20_000 // steps)])


LEAKS: dict[str, Callable[[Stash, int], Callable[[int], None]]] = {
    "memory": _leak_memory,
    "blocks": _leak_blocks,
    "descriptors": _leak_descriptors,
    "objects": _leak_objects,
}
