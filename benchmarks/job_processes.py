"""Measures what `job_simulation.py` starts from, and what processes really take that it is compared with.

    python benchmarks/job_processes.py --disk DIR --costs FILE        one process (two for the link, up to four
                                                                      for the disk)
    python benchmarks/job_processes.py --disk DIR --out FILE          one to four processes, on gloo

A step is so many equal blocks (linear, GELU, linear, LayerNorm) in float32, one thread a process, forward,
backward and the reduction of gradients; no optimizer. Each figure is the least of several steps, because a
machine that others use makes some of them longer and none shorter. glibc is set to give back what was freed,
so that resident memory is what is held: that makes every step slower, in the costs and in the processes alike.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from backstash import Stash
from backstash.cli._resident import reset_resident_peak, resident_bytes, resident_peak_bytes

WIDTH, ROWS, BLOCKS, STEPS = 256, 1024, 8, 4
ROUNDS = 3
WINDOW_BYTES = 16 << 20  # both, so that the windows are smaller than what a step saves
MICROBATCHES = 4
_GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}


class Block(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "checkpoint":
            out: torch.Tensor = checkpoint(self.layers, x, use_reentrant=False)
            return out
        made: torch.Tensor = self.layers(x)
        return made


def model_of(way: str, blocks: int = BLOCKS) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(way) for _ in range(blocks)))


def rows(count: int = ROWS) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))


def least(steps: Callable[[], float], count: int = STEPS) -> float:
    steps()
    return min(steps() for _ in range(count))


def seconds_of(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure_costs(disk: str) -> dict[str, float]:
    """Of one block, in this process."""
    warm_up()
    model, x = model_of("plain"), rows()
    start = resident_bytes()
    parts: dict[str, list[float]] = {"forward": [], "backward": [], "hooks": []}

    def step(hold: Any, into: str | None) -> None:
        with hold:
            began = time.perf_counter()
            loss = model(x.clone().requires_grad_()).square().mean()
            middle = time.perf_counter()
        loss.backward()
        ended = time.perf_counter()
        if into is not None:
            parts[into].append(ended - began)
        else:
            parts["forward"].append(middle - began)
            parts["backward"].append(ended - middle)

    holds = Stash(keep=None, disk=disk)  # room for all: nothing moves
    reset_resident_peak()
    step(nullcontext(), None)
    step(nullcontext(), None)  # in this one the first one's gradients are there already
    peak = resident_peak_bytes() - start
    for _ in range(2 * STEPS):
        step(nullcontext(), None)
        step(holds, "hooks")
    saved = holds.stats().eligible_bytes // (2 * STEPS)
    plain = min(map(sum, zip(parts["forward"], parts["backward"], strict=True)))
    holds.close()
    blocks_bytes = saved // BLOCKS
    link_bytes, link_seconds = link(disk)
    return {
        "forward_seconds": min(parts["forward"]) / BLOCKS,
        "backward_seconds": min(parts["backward"]) / BLOCKS,
        "hook_seconds": max(0.0, min(parts["hooks"]) - plain) / BLOCKS,
        "saved_bytes": blocks_bytes,
        "input_bytes": ROWS * WIDTH * 4,
        "gradient_bytes": sum(each.nbytes for each in model.parameters()) // BLOCKS,
        "rest_bytes": max(0, peak - saved - sum(each.nbytes for each in model.parameters())),
        **disk_costs(disk, 4 * saved),
        "link_bytes_per_second": link_bytes,
        "link_seconds": link_seconds,
    }


def disk_costs(directory: str, nbytes: int) -> dict[str, float]:
    """Bytes a second that one process alone moves, and the most that several together do."""
    together: dict[int, list[list[float]]] = {ranks: [] for ranks in (1, 2, 4)}
    for _ in range(ROUNDS):  # in turn, so that a slow minute is every one's
        for ranks, found in together.items():
            rows = run(ranks, {"what": "disk", "nbytes": nbytes // ranks}, directory)
            found.append([ranks * min(row[way] for row in rows) for way in ("write", "read")])
    best = {
        ranks: [max(each) for each in zip(*found, strict=True)] for ranks, found in together.items()
    }
    print(json.dumps({"write and read, by processes": best}))
    disk = [max(each) for each in zip(*best.values(), strict=True)]
    return {
        "process_write_bytes_per_second": best[1][0],
        "process_read_bytes_per_second": best[1][1],
        "disk_write_bytes_per_second": disk[0],
        "disk_read_bytes_per_second": disk[1],
    }


def measure_disk(directory: str, nbytes: int, ranks: int) -> dict[str, float]:
    """Bytes a second of this process's stash, which does nothing else, from when the first begins to when the
    last has ended: written, and read back."""
    one = torch.ones(1 << 20, requires_grad=True)
    blocks = [one.clone() for _ in range(max(1, nbytes >> 22))]  # 4 MiB each

    def together() -> float:
        if ranks > 1:
            dist.barrier()
        return time.perf_counter()

    with Stash(disk=directory, inflight="64MiB", prefetch="64MiB") as stash:
        first = [stash.pack(each) for each in blocks]  # space on the disk is allocated
        while first:
            stash.unpack(first.pop())
        before, began = stash.stats().written_bytes, together()
        packed = [stash.pack(each) for each in blocks]
        while stash.stats().inflight_bytes:
            time.sleep(5e-4)  # the processor is for those that write
        middle = together()
        written = stash.stats().written_bytes - before
        while packed:
            stash.unpack(packed.pop())
        ended = together()
    stash.close()
    return {"write": written / (middle - began), "read": written / (ended - middle)}


def link(directory: str) -> tuple[float, float]:
    """Bytes a second that one of two processes sends and receives in a ring, and a small one's seconds."""
    found = run(2, {"what": "link"}, directory)[0]
    return found["bytes_per_second"], found["seconds"]


def measure_link() -> dict[str, float]:
    found = {}
    for name, numel in (("small", 1), ("large", 4 << 20)):
        x = torch.ones(numel)
        found[name] = least(lambda x=x: seconds_of(lambda: dist.all_reduce(x)))
    # Of two ranks, each sends and receives half of it twice: 2 (n - 1) / n of the bytes.
    return {"bytes_per_second": (16 << 20) / found["large"], "seconds": found["small"] / 2}


def warm_up() -> None:
    """What a process holds from its first step on, whatever it computes."""
    model_of("plain", 1)(rows(8)).sum().backward()


def measure_job(job: dict[str, Any], rank: int, disk: str) -> dict[str, float]:
    """One rank of a job: the least seconds of a step, and the most memory over the model's."""
    way, stages = job["way"], job["stages"]
    hold: Any = nullcontext()
    if way == "stash":
        hold = Stash(disk=disk, inflight=WINDOW_BYTES, prefetch=WINDOW_BYTES)
    if job["schedule"] == "data":
        model: nn.Module = model_of(way)
        if job["ranks"] > 1:
            model = DistributedDataParallel(model)
        x = rows()

        def step() -> None:
            with hold:
                loss = model(x.clone().requires_grad_()).square().mean()
            loss.backward()
    else:
        model = model_of(way, BLOCKS // stages)
        stage = PipelineStage(model, rank, stages, torch.device("cpu"))
        kind = ScheduleGPipe if job["schedule"] == "gpipe" else Schedule1F1B
        schedule = kind(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
        x = rows(ROWS * MICROBATCHES)

        def step() -> None:
            with hold:
                schedule.step(
                    *((x,) if rank == 0 else ()), **({"target": x} if rank == stages - 1 else {})
                )

    warm_up()
    start = resident_bytes()
    reset_resident_peak()
    found = least(lambda: seconds_of(step))
    peak = resident_peak_bytes() - start
    if way == "stash":
        hold.close()
    return {"step_seconds": found, "memory_bytes": peak}


def worker(rank: int, ranks: int, store: str, job: dict[str, Any], disk: str) -> None:
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    if job.get("what") == "link":
        found = measure_link()
    elif job.get("what") == "disk":
        found = measure_disk(disk, job["nbytes"], ranks)
    else:
        found = measure_job(job, rank, disk)
    print(json.dumps(found))
    if ranks > 1:
        dist.destroy_process_group()


def run(ranks: int, job: dict[str, Any], disk: str) -> list[dict[str, float]]:
    """What each process of a job printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory, "store"))
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--disk", disk, "--worker", json.dumps(one)],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for one in ([rank, ranks, store, job] for rank in range(ranks))
        ]
        outputs = [each.communicate()[0] for each in processes]
    if any(each.returncode for each in processes):
        raise SystemExit("a process failed")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def measured_jobs(disk: str, repeats: int) -> list[dict[str, Any]]:
    """Each job's slowest rank's seconds and largest rank's memory; of several repeats, the least seconds."""
    found = []
    shapes = [(ranks, "data", 1, 1) for ranks in (1, 2, 4)]
    shapes += [(2, "1f1b", 2, MICROBATCHES)]
    for ranks, schedule, stages, microbatches in shapes:
        for way in ("plain", "checkpoint", "stash"):
            job = {"ranks": ranks, "way": way, "blocks": BLOCKS, "schedule": schedule}
            job |= {"stages": stages, "microbatches": microbatches}
            job |= {"ranks_per_machine": ranks, "cores_per_machine": os.cpu_count()}
            job |= {"inflight_bytes": WINDOW_BYTES, "prefetch_bytes": WINDOW_BYTES}
            seen = [run(ranks, job, disk) for _ in range(repeats)]
            row = {
                "job": job,
                "step_seconds": min(max(each["step_seconds"] for each in one) for one in seen),
                "memory_bytes": max(each["memory_bytes"] for one in seen for each in one),
            }
            print(json.dumps(row), flush=True)
            found.append(row)
    return found


def main() -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--costs", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if _GIVES_BACK.items() - os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | _GIVES_BACK)
    if options.worker:
        worker(*json.loads(options.worker), options.disk)
        return 0
    machine = f"{os.cpu_count()} cores, {platform.release()}, torch {torch.__version__}"
    machine += f", load average before {os.getloadavg()[0]:.1f}"
    facts = {"machine": machine, "width": WIDTH, "rows": ROWS, "blocks": BLOCKS, "steps": STEPS}
    if options.costs is not None:
        costs = measure_costs(options.disk)
        print(json.dumps(costs, indent=2))
        options.costs.write_text(json.dumps(facts | {"costs": costs}, indent=2) + "\n")
    if options.out is not None:
        rows_found = measured_jobs(options.disk, options.repeats)
        options.out.write_text(json.dumps(facts | {"rows": rows_found}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
