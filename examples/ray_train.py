"""Ray Train: data parallel workers, each with a stash of its own.

    pip install 'backstash[ray]'
    python examples/ray_train.py --workers 2 --disk /scratch

``train_loop_per_worker`` is any training loop: forward goes into the stash, all else is as without one. Ray
sets the ranks in the environment of each worker, as torchrun does, so that ``"auto"`` budgets are a worker's
share of its machine. The directory has to be one of the machine that the worker runs on. ``--plain`` trains
without a stash: the losses are the same to the last bit.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from backstash import Stash
from backstash.launcher import Job


def train_loop_per_worker(config: dict[str, Any]) -> dict[str, Any]:
    import ray.train
    from ray.train.torch import prepare_model

    width, job = config["width"], Job.now()
    torch.manual_seed(0)
    block = [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
    model = prepare_model(nn.Sequential(*block, *(nn.LayerNorm(width), nn.Linear(width, 1))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stash = Stash(disk=config["disk"], name=job.label) if config["disk"] else None
    generator = torch.Generator().manual_seed(job.rank)
    for _ in range(config["steps"]):
        x = torch.randn(config["rows"], width, generator=generator)
        with stash if stash is not None else nullcontext():
            loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        figures = {"loss": loss.item()}
        if stash is not None:
            figures |= stash.stats().as_dict("backstash/")
        ray.train.report(figures)
    if stash is not None:
        stash.close()
    return {**figures, "job": f"{job.processes} ranks, {job.local_processes} on this machine"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--plain", action="store_true", help="without a stash")
    parser.add_argument("--tiny", action="store_true", help="seconds, for a test")
    options = parser.parse_args()
    if options.tiny:
        options.steps, options.rows, options.width = 3, 256, 64

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer
    except ImportError as error:
        raise SystemExit(f"{error}: pip install 'backstash[ray]'") from None

    ray.init(num_cpus=options.workers, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as results:
        found = TorchTrainer(
            train_loop_per_worker,
            train_loop_config={**vars(options), "disk": "" if options.plain else options.disk},
            scaling_config=ScalingConfig(num_workers=options.workers),
            run_config=RunConfig(storage_path=results, name="backstash"),
        ).fit()
    ray.shutdown()
    figures = found.return_value  # of rank 0
    print(figures["job"])
    print("loss", figures["loss"].hex())
    if not options.plain:
        print(f"written {figures['backstash/written_bytes'] / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
