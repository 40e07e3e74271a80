"""One process of the benchmark `gradients`: a few steps, with the optimizer after backward or inside it."""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from backstash.cli._resident import reset_resident_peak, resident_bytes, resident_peak_bytes
from backstash.hooks import step_in_backward

__all__ = ["WAYS", "main"]


def main() -> None:
    """Train as the only argument says, in JSON, and print the figures on the last line."""
    task = json.loads(sys.argv[1])
    torch.manual_seed(0)
    train = WAYS[task["way"]]
    train(*_stack(1, 64), 1)  # what torch loads for its first step is not counted
    model, x = _stack(task["layers"], task["width"])
    start_bytes = resident_bytes()
    reset_resident_peak()
    started = time.perf_counter()
    train(model, x, task["steps"])
    figures: dict[str, Any] = {
        "step_seconds": (time.perf_counter() - started) / task["steps"],
        "over_start_bytes": resident_peak_bytes() - start_bytes,
        "weights": _digest(model),
    }
    print(json.dumps(figures))


def _stack(layers: int, width: int) -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    return model, torch.randn(4, width)


def _sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4, foreach=False)


def _after_backward(model: nn.Module, x: Tensor, steps: int) -> None:
    optimizer = _sgd(model.parameters())
    for _ in range(steps):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _in_backward(model: nn.Module, x: Tensor, steps: int) -> None:
    with step_in_backward(_sgd, model):
        for _ in range(steps):
            model(x).sum().backward()


WAYS: dict[str, Callable[[nn.Module, Tensor, int], None]] = {
    "optimizer after backward": _after_backward,
    "step_in_backward": _in_backward,
}


def _digest(model: nn.Module) -> str:
    total = hashlib.sha256()
    for parameter in model.parameters():
        total.update(ctypes.string_at(parameter.data_ptr(), parameter.nbytes))
    return total.hexdigest()


if __name__ == "__main__":
    main()
