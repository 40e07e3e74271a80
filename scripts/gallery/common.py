"""Train a program of the gallery, and print what the runner compares."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor

__all__ = ["Training", "train"]

# PyPI's torchvision is built for CUDA. With a torch for the CPU its import misses these two operators.
_operators = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _operators.define(f"{_name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")


class Training:
    """Losses and step times of one run; :meth:`end` prints them with a digest of the weights."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._digest = hashlib.sha256()
        self._ends: list[float] = []

    def step(self, loss: Tensor) -> None:
        """One step has ended."""
        self._digest.update(loss.detach().reshape(1).view(torch.uint8).numpy().tobytes())
        self._ends.append(time.perf_counter())

    def end(self, parameters: Iterable[Tensor]) -> None:
        """Print one line of JSON: the digest, the number of steps, and their median time after the fourth."""
        for each in parameters:
            self._digest.update(
                each.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            )
        seconds = [after - before for before, after in pairwise(self._ends)][4:]
        print(
            json.dumps(
                {
                    "digest": self._digest.hexdigest()[:16],
                    "steps": len(self._ends),
                    "step_seconds": median(seconds) if seconds else None,
                }
            )
        )


def train(
    parameters: Iterable[Tensor],
    loss_of: Callable[[], Tensor],
    steps: int = 12,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> None:
    """Minimize ``loss_of()`` for some steps, and print what the runner compares."""
    training, parameters = Training(), list(parameters)
    torch.manual_seed(1)
    optim = optimizer(parameters, lr=1e-4)
    for _ in range(steps):
        loss = loss_of()
        optim.zero_grad()
        loss.backward()
        optim.step()
        training.step(loss)
    training.end(parameters)
