"""What the tests of faults share: a small program with blocks of every kind, stashes, and what must be left."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from backstash import Action, Disk, Stash
from backstash.testing import TwinDevice, stash_on
from oracle import same_bits

# One is saved in segments, the other block by block, straight from its memory.
_MAKE = torch.Generator().manual_seed(0)
INPUTS = tuple(
    (torch.randn(size, generator=_MAKE) * 0.1).requires_grad_() for size in (10_000, 160_000)
)
ZEROS = ("blocks", "keep_bytes", "inflight_bytes", "ahead_bytes", "host_bytes", "disk_bytes")

Mix = Callable[[Path], Stash]
MIXES: dict[str, Mix] = {
    "disk": lambda where: Stash(disk=Disk(where, verify=True), min_bytes=64),
    "at once": lambda where: Stash(disk=where, min_bytes=64, inflight=0, prefetch="1MiB"),
    "keep": lambda where: Stash(keep="300KiB", disk=where, min_bytes=64, inflight="1MiB"),
    "packed": lambda where: Stash(
        policy=lambda saved: Action("pack"), keep="20KiB", disk=where, min_bytes=64, inflight="1MiB"
    ),
    "accelerator": lambda where: stash_on(
        TwinDevice(chance=0.3),
        keep="300KiB",
        host="3MiB",
        disk=where,
        min_bytes=64,
        inflight="1MiB",
    ),
}


def forward(inputs: Sequence[Tensor] = INPUTS) -> Tensor:
    """A loss: elementwise chains, views that share a storage, a part of one, and one with zeros."""
    loss = torch.zeros(())
    for each in inputs:
        y = each
        for _ in range(3):
            y = y.exp() * 0.5
        rows = y.view(-1, 100)
        loss = (
            loss + (rows[:40] * rows[40:80]).sum() + y.square().sum() + each.relu().square().sum()
        )
    return loss


def gradients(stash: Stash | None = None, **options: bool) -> tuple[Tensor, ...]:
    """Of one step, its forward under ``stash``."""
    if stash is None:
        return torch.autograd.grad(forward(), INPUTS, **options)
    with stash:
        loss = forward()
    return torch.autograd.grad(loss, INPUTS, **options)


WANTED = gradients()


def are_right(found: Sequence[Tensor]) -> bool:
    """Whether these are the gradients of plain PyTorch, to the bit."""
    return len(found) == len(WANTED) and all(map(same_bits, found, WANTED))


def hooks_left() -> int:
    """How many pairs of saved-tensor hooks are active; they are removed."""
    count = 0
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        count += 1
    return count


def wrong_after(stash: Stash) -> list[str]:
    """What a fault has left wrong with ``stash``, in words. It is used twice more, and closed."""
    found = [f"{hooks_left()} hook pairs left"] if _has_hooks() else []
    gc.collect()
    for _ in range(2):
        if not are_right(gradients(stash)):
            found.append("a wrong gradient")
    gc.collect()
    stash.close()
    stats = stash.stats()
    found += [f"{name}={getattr(stats, name)}" for name in ZEROS if getattr(stats, name)]
    if stats.written_bytes == 0:
        found.append("nothing moved")
    for tiers in stash._session.device_tiers:
        device = tiers.device
        if isinstance(device, TwinDevice):
            found += device.faults
            if device.pinned_bytes:
                found.append(f"{device.pinned_bytes} bytes pinned")
    if isinstance(stash._store, Disk):
        stash._store.close()
    return found


def _has_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def run_python(
    code: str, *arguments: object, seconds: float = 100, before: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in an interpreter that dumps every stack and ends when it hangs.

    Args:
        arguments: its ``sys.argv[1:]``.
        seconds: its watchdog's patience.
        before: a command that the interpreter's own is appended to.
    """
    watchdog = f"import faulthandler; faulthandler.dump_traceback_later({seconds}, exit=True)\n"
    here = Path(__file__).resolve().parent
    path = os.pathsep.join([str(here), str(here.parent), *filter(None, sys.path)])
    return subprocess.run(
        [*before, sys.executable, "-c", watchdog + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=seconds + 20,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
