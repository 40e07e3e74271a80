#!/usr/bin/env python
"""Steps of one process in turns: plain PyTorch, checkpoints, and a stash at the same peaks, on an accelerator.

    python benchmarks/interleaved.py --device cuda --seconds 300 --out FILE.json
    python benchmarks/interleaved.py --tiny --out FILE.json                      on the CPU, to try it

For each model: every way runs some steps, until a plan has settled. Then its gradients are compared with plain
PyTorch's, bit for bit, and its peak is measured. The budgets are the peaks of ``torch.utils.checkpoint`` around
a quarter to all of the blocks. After that all ways take turns, in another order in each round: two steps each,
timed between two events. At the end the profiler counts, in two steps of each, kernels, events, waits and the
seconds in which the device computes. FILE grows as it goes.

``seconds`` are medians of the device's time for a step; ``host_seconds`` are the host's, until it has begun all
of a step's work. The host waits for nothing in between, as in a training loop that reads no loss.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import random
import re
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from backstash import Stash
from bench._markdown import markdown
from bench._workloads import Bottleneck
from budget_cells import TINY, Chain, Ground, ground_of, model

MODELS = ("gpt", "llama", "resnet152")
QUARTERS = (1, 2, 3, 4)
SETTLED = 14  # steps at most until a plan is followed and measured
BEFORE, TIMED = 3, 2  # steps of a way in each round
_OF_EVENTS = (
    "EventRecord",
    "StreamWaitEvent",
    "EventQuery",
    "Synchronize",
    "LaunchKernel",
    "Memcpy",
)
_KEPT = (
    "mm",
    "addmm",
    "bmm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "convolution",
)


def resnet152(*, tiny: bool) -> tuple[nn.Module, Callable[[], Tensor]]:
    """The model, and what gives it a batch."""
    width, counts, batch, side = (8, (1, 1, 1, 1), 2, 32) if tiny else (64, (3, 8, 36, 3), 256, 224)
    blocks: list[nn.Module] = []
    inside = width
    for level, count in enumerate(counts):
        for number in range(count):
            stride = 2 if level and not number else 1
            blocks.append(Bottleneck(inside, width << level, stride))
            inside = 4 * width << level
    head = nn.Sequential(
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    )
    tail = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))
    dtype = torch.float32 if tiny else torch.bfloat16
    net = Chain(head, blocks, tail).to(dtype, memory_format=torch.channels_last)

    def batch_of() -> Tensor:
        x = torch.randn(batch, 3, side, side, dtype=dtype)
        return x.contiguous(memory_format=torch.channels_last)

    return net, batch_of


class Work:
    """One model, its optimizer and its batch.

    Args:
        name: of the model.
        ground: where it runs.
        tiny: whether it is a small one.
    """

    def __init__(self, name: str, ground: Ground, *, tiny: bool) -> None:
        torch.manual_seed(0)
        self.ground = ground
        with ground.made():
            net, batch = (
                resnet152(tiny=tiny)
                if name == "resnet152"
                else model(name, TINY if tiny else ground.size)
            )
            self.batch = batch().to(ground.device)
        self.net: Any = net.to(ground.device)
        self.blocks: list[nn.Module] = list(self.net.blocks)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-5)

    def backward(self, way: Way, context: AbstractContextManager[Any]) -> None:
        """Forward and backward."""
        self.optimizer.zero_grad()
        with context:
            loss = self.net.through(way.call, self.batch).float().square().mean()
        loss.backward()

    def step(self, way: Way, context: AbstractContextManager[Any]) -> None:
        self.backward(way, context)
        self.optimizer.step()

    def gradients(self) -> list[Tensor]:
        return [each.grad.clone() for each in self.net.parameters() if each.grad is not None]


class Unavailable(Exception):
    """A way cannot be run here."""


class Way:
    """One way to run a step.

    Args:
        name: in the results.
        number: how many of the blocks it recomputes.
    """

    is_exact = True
    """Whether its gradients have to be plain PyTorch's."""

    def __init__(self, name: str, number: int = 0) -> None:
        self.name, self.number = name, number

    def call(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        """Call a block."""
        return block(x)  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def turn(self, work: Work) -> Iterator[AbstractContextManager[Any]]:
        """A turn of several steps: the context of each."""
        yield contextlib.nullcontext()

    def settle(self, work: Work) -> None:
        """Run what comes before the first turn."""
        with self.turn(work) as context:
            for _ in range(BEFORE):
                work.step(self, context)


class Checkpoint(Way):
    """``torch.utils.checkpoint`` around the first blocks."""

    options: dict[str, Any] = {}  # noqa: RUF012

    def call(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        if number >= self.number:
            return block(x)  # type: ignore[no-any-return]
        return checkpoint(block, x, use_reentrant=False, **self.options)  # type: ignore[no-any-return]


class Selective(Checkpoint):
    """Checkpoints that keep the results of products, convolutions and attention."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(name, number)
        kept = [getattr(torch.ops.aten, each).default for each in _KEPT]
        self.options = {"context_fn": functools.partial(create_selective_checkpoint_contexts, kept)}


class SaveOnCpu(Way):
    """``torch.autograd.graph.save_on_cpu``."""

    @contextlib.contextmanager
    def turn(self, work: Work) -> Iterator[AbstractContextManager[Any]]:
        yield _Each(
            lambda: torch.autograd.graph.save_on_cpu(pin_memory=work.ground.device.type == "cuda")
        )


class CheckpointOnHost(Checkpoint):
    """Checkpoints whose inputs are in pinned host memory, as with ``offload=True`` in transformers 5
    (``PreTrainedModel.activation_checkpointing_enable``)."""

    def call(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        on_host = torch.autograd.graph.save_on_cpu(
            pin_memory=x.device.type == "cuda", device_type=x.device.type
        )
        with on_host:
            return super().call(number, block, x)


class Trl(Way):
    """``OffloadActivations`` of TRL, if it is installed; it needs an accelerator."""

    @contextlib.contextmanager
    def turn(self, work: Work) -> Iterator[AbstractContextManager[Any]]:
        try:
            from trl.models.activation_offloading import OffloadActivations
        except ImportError as missing:
            raise Unavailable(str(missing)) from None
        if work.ground.device.type == "cpu":
            raise Unavailable("TRL needs an accelerator")
        yield OffloadActivations()


class Compiled(Way):
    """Blocks compiled with ``torch.compile``, whose partitioner may save half of what it would
    (``activation_memory_budget=0.5``). Compiled operations round differently from plain ones."""

    is_exact = False

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._compiled: dict[int, Any] = {}

    def call(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        if number not in self._compiled:
            self._compiled[number] = torch.compile(block)
        return self._compiled[number](x)  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def turn(self, work: Work) -> Iterator[AbstractContextManager[Any]]:
        with torch._functorch.config.patch(activation_memory_budget=0.5):
            yield contextlib.nullcontext()


class Recompute(Way):
    """``Stash.recompute`` of the first blocks."""

    @contextlib.contextmanager
    def turn(self, work: Work) -> Iterator[AbstractContextManager[Any]]:
        with Stash(keep="1TiB") as stash, stash.recompute(*work.blocks[: self.number]):
            yield contextlib.nullcontext()


class Budget(Way):
    """A stash within a budget. Each turn follows the plan that the first steps made.

    Args:
        name: in the results.
        nbytes: the budget.
        disk: where a CPU's tensors go.
    """

    def __init__(self, name: str, nbytes: int, disk: str) -> None:
        super().__init__(name)
        self._nbytes, self._disk = nbytes, disk
        self.plan: Any = None

    def settle(self, work: Work) -> None:
        stash = work.ground.stash(self._disk, budget=self._nbytes)
        before = None
        for _ in range(SETTLED):
            work.step(self, stash)
            plan = stash.plan
            assert plan is not None
            if plan.measured is not None and plan.predicted == before:
                break
            before = plan.predicted
        self.plan = stash.plan
        stash.close()

    @contextlib.contextmanager
    def turn(self, work: Work) -> Iterator[AbstractContextManager[Any]]:
        stash = work.ground.stash(self._disk, plan=self.plan)
        try:
            yield stash
        finally:
            stash.close()


class _Each(AbstractContextManager[None]):
    """A context that makes another one each time."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._inside: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        self._inside.append(self._make())
        self._inside[-1].__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._inside.pop().__exit__(*raised)


def first_ways(blocks: int) -> list[Way]:
    """The ways whose peaks are no budget's."""
    some = [blocks * each // 4 for each in QUARTERS]
    return [
        Way("plain"),
        *(Checkpoint(f"checkpoint {each} of {blocks}", each) for each in some),
        Selective("selective checkpoint", blocks),
        CheckpointOnHost("checkpoint on the host", blocks),
        SaveOnCpu("save_on_cpu"),
        Trl("TRL OffloadActivations"),
        Compiled("compiled, activation budget 0.5"),
        *(Recompute(f"recompute {each} of {blocks}", each) for each in (some[1], some[3])),
    ]


def budgets(found: dict[str, dict[str, Any]], disk: str) -> list[Way]:
    """A budget for the peak of each checkpoint, and one that fits."""
    ways: list[Way] = [
        Budget(f"budget, {name}", each["peak_bytes"], disk)
        for name, each in found.items()
        if name.startswith("checkpoint") and "peak_bytes" in each
    ]
    return [*ways, Budget("budget that fits", found["plain"]["peak_bytes"] * 6 // 5, disk)]


def settle(way: Way, work: Work, plain: Way) -> dict[str, Any]:
    """Run a way for the first time: its peak, and whether its gradients are plain PyTorch's."""
    ground = work.ground
    gc.collect()
    try:
        way.settle(work)
        with way.turn(work) as context:
            for _ in range(BEFORE):
                work.step(way, context)
            ground.reset_peak()
            work.step(way, context)
            peak = ground.peak_bytes()
            torch.manual_seed(1)
            work.backward(plain, contextlib.nullcontext())
            want = work.gradients()
            torch.manual_seed(1)
            work.backward(way, context)
            equal = all(map(torch.equal, work.gradients(), want))
    except torch.OutOfMemoryError:
        return {"failed": "out of memory"}
    except Unavailable as why:
        return {"failed": str(why)}
    found = {"peak_bytes": peak, "equal": equal, "is_exact": way.is_exact}
    if isinstance(way, Budget) and way.plan is not None:
        found["plan"] = {**way.plan.as_dict(), "classes": []}
    return found


def turn(way: Way, work: Work) -> list[tuple[float, float]]:
    """The device's and the host's seconds for each of some steps."""
    ground, took = work.ground, []
    with way.turn(work) as context:
        for _ in range(BEFORE):
            work.step(way, context)
        for _ in range(TIMED):
            began, host = ground.now(), time.perf_counter()
            work.step(way, context)
            host = time.perf_counter() - host
            took.append((ground.seconds(began, ground.now()), host))
    return took


def profiled(way: Way, work: Work) -> dict[str, Any]:
    """Of a step: kernels, events, waits, and the seconds that the device computes."""
    with way.turn(work) as context:
        for _ in range(BEFORE):
            work.step(way, context)
        with torch.profiler.profile() as profile:
            for _ in range(TIMED):
                work.step(way, context)
            if work.ground.device.type != "cpu":
                torch.accelerator.synchronize()
    counts: Counter[str] = Counter()
    busy = 0.0
    for event in profile.events():
        if event.device_type != torch.autograd.DeviceType.CPU:
            counts["on the device"] += 1
            busy += event.time_range.elapsed_us()
        for kind in _OF_EVENTS:
            counts[kind] += kind in event.name and event.name.startswith(("cuda", "hip"))
    return {"busy_seconds": busy / TIMED / 1e6, **{k: n / TIMED for k, n in counts.items()}}


def rows(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    table = []
    plain = statistics.median(found["plain"]["seconds"]) if found["plain"].get("seconds") else 0.0
    for name, each in found.items():
        if "failed" in each or not each.get("seconds"):
            table.append([name, each.get("failed", "not timed"), "", "", "", ""])
            continue
        seconds, host = (statistics.median(each[key]) for key in ("seconds", "host_seconds"))
        table.append(
            [
                name,
                f"{each['peak_bytes'] / 2**30:.2f}",
                f"{seconds:.4f}",
                f"{seconds / plain:.3f}" if plain else "",
                f"{host:.4f}",
                "yes" if each["equal"] else "NO" if each["is_exact"] else "no (compiled)",
            ]
        )
    return table


HEAD = ("way", "peak, GiB", "step, s", "of plain", "host, s", "gradients equal")


def measure(
    name: str, options: argparse.Namespace, until: float, write: Callable[..., None]
) -> None:
    """Measure one model until a point in time. ``write`` gets the results so far."""
    ground = ground_of(options.device)
    work = Work(name, ground, tiny=options.tiny)
    found: dict[str, dict[str, Any]] = {}
    plain, *others = first_ways(len(work.blocks))
    ways = [plain, *(each for each in others if re.search(options.ways, each.name))]
    kept = []
    with tempfile.TemporaryDirectory(dir=options.disk) as disk:
        for listed in (lambda: ways, lambda: budgets(found, disk)):
            for way in listed():
                if time.monotonic() > until:
                    break
                found[way.name] = settle(way, work, plain)
                if "failed" not in found[way.name]:
                    kept.append(way)
                write(name, found)
        share = max(10.0, (until - time.monotonic()) * 0.3)  # for the profiles
        order = random.Random(0)
        done = 0
        while time.monotonic() < until - share or not done:
            for way in order.sample(kept, len(kept)):
                for seconds, host in turn(way, work):
                    found[way.name].setdefault("seconds", []).append(seconds)
                    found[way.name].setdefault("host_seconds", []).append(host)
            write(name, found)
            done += 1
            if options.rounds and done >= options.rounds:
                break
        for way in kept:
            if time.monotonic() > until:
                break
            found[way.name]["profile"] = profiled(way, work)
            write(name, found)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="cuda, simulated, or cpu (default)")
    parser.add_argument("--models", default=",".join(MODELS), help="default: %(default)s")
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="for all (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=0, help="at most; 0: as many as there is time for"
    )
    parser.add_argument(
        "--ways", default="", metavar="REGEX", help="of those without a budget, these"
    )
    parser.add_argument("--disk", help="directory for a CPU's tensors")
    parser.add_argument("--tiny", action="store_true", help="small models, for tests")
    parser.add_argument("--out", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    began, names = time.monotonic(), options.models.split(",")
    results: dict[str, Any] = {"torch": torch.__version__, "device": options.device, "models": {}}
    if options.device == "cuda":
        results["name"] = torch.cuda.get_device_name()

    def write(name: str, found: dict[str, Any]) -> None:
        results["models"][name] = found
        if options.out is not None:
            options.out.write_text(json.dumps(results, indent=1) + "\n")

    for number, name in enumerate(names):
        share = options.seconds * (number + 1) / len(names)
        measure(name, options, began + share, write)
        gc.collect()
        print(f"{name}\n\n{markdown(HEAD, rows(results['models'][name]))}\n", flush=True)
    wrong = [
        f"{name}: {way}"
        for name, found in results["models"].items()
        for way, each in found.items()
        if each.get("equal") is False and each["is_exact"]
    ]
    for each in wrong:
        print(f"{each}: gradients differ from plain PyTorch's")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
