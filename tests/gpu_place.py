"""Where the checks of an accelerator run: on one, on a simulated one, or on the CPU with a twin in its place.

All but the first have tiny sizes.
"""

import contextlib
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import simulated
from backstash import Stash
from backstash.testing import TwinDevice, stash_on

MIB = 1 << 20


class Skip(Exception):
    """Raised by a check that has nothing to check here; its words say why."""


@dataclass(frozen=True, slots=True)
class Place:
    """A device and a directory."""

    device: torch.device
    """The accelerator, or the CPU."""
    directory: Path
    """Empty; a check may write there."""

    @property
    def is_real(self) -> bool:
        """Whether there is an accelerator, simulated or not: with memory and streams of its own."""
        return self.device.type != "cpu"

    @property
    def is_small(self) -> bool:
        """Whether sizes are tiny: what is there computes on the CPU."""
        return self.device.type in ("cpu", "simulated") or "CUDA_ON_CPU" in os.environ

    @property
    def allocator(self) -> str:
        """PyTorch's name for what gives out the device's memory; empty where there is but one."""
        return torch.cuda.get_allocator_backend() if self.device.type == "cuda" else ""

    @property
    def width(self) -> int:
        """Of layers, and the rows of what goes through them."""
        return 128 if self.is_small else 1024

    def size(self, mib: int) -> int:
        """So many MiB, or what takes their place where sizes are tiny."""
        return mib * (MIB // 64 if self.is_small else MIB)

    def pinned_bytes(self) -> int:
        """What PyTorch's allocator has of the host's pinned memory, in use or not."""
        if self.device.type == "simulated":
            return simulated.pinned_bytes()
        return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])

    def stash(self, **options: Any) -> Stash:
        """A stash for this device's tensors; sizes in MiB."""
        for name in ("keep", "host", "inflight", "prefetch"):
            if isinstance(options.get(name), int):
                options[name] = self.size(options[name])
        if self.is_small:
            options["min_bytes"] = 1024
        if self.is_real:
            return Stash(**options)
        return stash_on(TwinDevice(chance=0.5), **options)

    def only_real(self) -> None:
        """For checks that a twin cannot stand in for."""
        if not self.is_real:
            raise Skip("needs an accelerator")

    @property
    def prelude(self) -> str:
        """What a program in another process begins with, to have the device."""
        if self.device.type != "simulated":
            return ""
        here = str(Path(__file__).parent)
        return f"import sys\nsys.path.insert(0, {here!r})\nimport simulated\nsimulated.register()\n"

    def forget_races(self) -> None:
        """Those so far were the program's own, made on purpose."""
        if self.device.type == "simulated":
            simulated.faults()

    @contextlib.contextmanager
    def at_most(self, nbytes: int) -> Iterator[None]:
        """The device has no more memory than what tensors take now, and so much."""
        gc.collect()
        torch.accelerator.empty_cache()
        limit = self.allocated() + nbytes
        if self.is_small and self.device.type == "cuda":
            limit += 20 * MIB  # a segment of PyTorch's allocator
        whole = torch.accelerator.get_memory_info(self.device)[1]
        if self.device.type == "simulated":
            simulated.limit(limit)
        elif self.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(limit / whole)
        else:
            raise Skip("needs a limit on the device's memory")
        try:
            yield
        finally:
            if self.device.type == "simulated":
                simulated.limit(whole)
            else:
                torch.cuda.set_per_process_memory_fraction(1.0)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_real:
            torch.accelerator.synchronize(self.device)

    def allocated(self) -> int:
        """Bytes that tensors take on the device."""
        self.synchronize()
        return int(torch.accelerator.memory_allocated(self.device)) if self.is_real else 0

    def model(self, dtype: torch.dtype = torch.float32, layers: int = 8) -> nn.Sequential:
        """A stack of linear layers with GELU and a norm."""
        torch.manual_seed(0)
        width = self.width
        made = [
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
            for _ in range(layers)
        ]
        return nn.Sequential(*made).to(self.device, dtype)

    def batch(self, dtype: torch.dtype = torch.float32, rows: int = 2) -> torch.Tensor:
        """What the model takes: ``rows`` times its width."""
        torch.manual_seed(1)
        return torch.randn(rows * self.width, self.width, device=self.device, dtype=dtype)

    def gradients(
        self,
        model: nn.Module,
        x: torch.Tensor,
        hold: contextlib.AbstractContextManager[Any] | None = None,
        backwards: int = 1,
    ) -> list[torch.Tensor]:
        """Of one step, forward under ``hold``."""
        model.zero_grad()
        with hold if hold is not None else contextlib.nullcontext():
            loss = model(x).float().square().mean()
        for left in reversed(range(backwards)):
            loss.backward(retain_graph=bool(left))
        self.synchronize()
        return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def same(found: list[torch.Tensor], true: list[torch.Tensor], where: str) -> None:
    """Assert that both are equal to the bit; the message says where and how far off."""
    assert len(found) == len(true), f"{where}: {len(found)} gradients, expected {len(true)}"
    for number, (one, other) in enumerate(zip(found, true, strict=True)):
        if not torch.equal(one, other):
            wrong = int((one != other).sum())
            far = float((one - other).abs().max())
            raise AssertionError(
                f"{where}: gradient {number} of {len(true)}, shape {tuple(one.shape)}: "
                f"{wrong} of {one.numel()} elements differ, by up to {far:g}; NaN: {bool(one.isnan().any())}"
            )
