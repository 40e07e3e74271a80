"""A stash's figures in a training log: W&B, TensorBoard and MLflow, whichever is installed.

``Stats.as_dict(prefix=...)`` is a flat dictionary of floats, which is what each of them takes:

    wandb.log(figures, step=step)
    writer.add_scalar(name, value, step)             # TensorBoard, for each
    mlflow.log_metrics(figures, step=step)

    python examples/log_figures.py --to tensorboard --steps 20

``--to print``, the default, needs none of them.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable

import torch
from torch import nn

from backstash import Stash

Log = Callable[[dict[str, float], int], object]


def to_print() -> Log:
    return lambda figures, step: print(
        step, *(f"{name}={value:g}" for name, value in figures.items())
    )


def to_wandb() -> Log:
    import wandb

    wandb.init(project="backstash", mode="offline")
    return lambda figures, step: wandb.log(figures, step=step)


def to_tensorboard() -> Log:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter()

    def log(figures: dict[str, float], step: int) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)

    return log


def to_mlflow() -> Log:
    import mlflow

    return lambda figures, step: mlflow.log_metrics(figures, step=step)


WRITERS = {"print": to_print, "wandb": to_wandb, "tensorboard": to_tensorboard, "mlflow": to_mlflow}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--to", choices=WRITERS, default="print")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="two steps")
    options = parser.parse_args()
    log = WRITERS[options.to]()
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    with tempfile.TemporaryDirectory() as scratch, Stash(disk=scratch) as stash:
        for step in range(2 if options.tiny else options.steps):
            loss = model(torch.randn(512, 256)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(stash.stats().as_dict(prefix="stash/"), step)


if __name__ == "__main__":
    main()
