"""Six models within six budgets each: predictions first, then what was measured, compared with the other ways.

    python benchmarks/budget_cells.py [--tiny] [--regions] [--models gpt,lstm] [--disk DIR] --out FILE
    python benchmarks/budget_cells.py --device cuda --out FILE
    python benchmarks/budget_cells.py --models gpt --ways plain,keep=43384832,budget=548916089 --rounds 3
    python benchmarks/budget_cells.py --out FILE --draw PICTURE.svg

For each model one process measures a few steps, and plans for six budgets from them; the predictions are
written to FILE before anything else is run. Then every cell runs in a process of its own: each budget, plain
PyTorch, ``keep=`` at three sizes, and ``torch.utils.checkpoint`` around every block and around every other one.
With ``--regions`` also six budgets with all blocks given to ``Stash.recompute``, of which a plan takes some;
they are others, since the smallest one is.

``peak_bytes`` is the system's (``VmHWM``) over the last steps of a process; ``highest_bytes`` is that of all
steps from the second on, those that measure and correct included: it is what a budget promises. Seconds are
medians of the last steps. A cell's losses are compared with plain's. All cells stay in FILE; a model that it
has already is run again only when it is named.

Around its steps each process times the same few matrix products (``probe_seconds``, the median), since a shared
machine's speed may change from second to second: of the two figures for the time, "by the machine's speed" is
of steps over probes (``step_probes``: the median of steps, each over the mean of the two probes around it).

On an accelerator the peak is that of its tensors (``max_memory_allocated``), what moves goes to pinned host
memory, and seconds are the device's own, between two events. ``--device simulated`` is the one of the tests,
whose time is played: an operation and a copy take their bytes over a rate. What it shows is whether predictions
come true where no machine's noise is; it says nothing of any real device's speed. ``--device simulated=2e8``
has a link of so many bytes per second each way, for which compute has to wait.
"""

import argparse
import contextlib
import functools
import gc
import hashlib
import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from backstash import Stash
from backstash.cli._allocator import choose, find
from backstash.cli._resident import reset_resident_peak, resident_peak_bytes
from backstash.plan import budget_for
from bench._markdown import markdown

HERE = Path(__file__).resolve().parent

SHARES = (0.1, 0.25, 0.4, 0.6, 0.8, 1.05)  # between the smallest budget and plain's peak
KEEPS = (0.25, 0.5, 0.75)  # of the bytes that plain saves
SETTLED = (
    40  # steps at most until a plan is followed and measured, and made again where it was corrected
)
UNCHANGED = 4  # steps that it is followed then
TIMED = 7
PROBED = 36
PLANNED = ("budget", "regions")  # for the second all blocks are given to Stash.recompute


class Attention(nn.Module):
    """A block of a GPT; with ``gated``, of a Llama: RMSNorm and a gated MLP."""

    def __init__(self, width: int, heads: int, *, gated: bool = False, experts: int = 0) -> None:
        super().__init__()
        self.heads = heads
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.first, self.second = norm(width), norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(0.0 if gated else 0.1)
        self.experts = experts
        if experts:
            self.router = nn.Linear(width, experts)
            self.parts = nn.ModuleList(
                nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
                for _ in range(experts)
            )
        elif gated:
            self.gate, self.up = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
            self.down = nn.Linear(3 * width, width)
        else:
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gated = gated

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            each.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for each in self.qkv(self.first(x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        h = self.second(x)
        if self.experts:
            return x + self.mix(h)
        if self.gated:
            return x + self.down(functional.silu(self.gate(h)) * self.up(h))
        return x + self.dropout(self.down(functional.gelu(self.up(h))))

    def mix(self, h: Tensor) -> Tensor:
        """Each token through the two experts that the router likes best."""
        weights, chosen = self.router(h).softmax(-1).topk(2, -1)
        mixed = torch.zeros_like(h)
        for number, expert in enumerate(self.parts):
            where = (chosen == number).any(-1)
            share = (weights * (chosen == number)).sum(-1)[where]
            update = torch.zeros_like(h)
            update[where] = expert(h[where]) * share[:, None]
            mixed = mixed + update
        return mixed


class Residual(nn.Module):
    """Of a ResNet: two convolutions with BatchNorm."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.short = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.short(x))


class Recurrent(nn.Module):
    """One layer of an LSTM, unrolled by a cell."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = None, []
        for at in range(x.shape[1]):
            state = self.cell(x[:, at], state)
            outputs.append(state[0])
        return torch.stack(outputs, 1)


class UNet(nn.Module):
    """Its blocks on the way down hand their results across to those on the way up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width]

        def block(inside: int, outside: int) -> nn.Module:
            convolutions = nn.Conv2d(inside, outside, 3, 1, 1), nn.Conv2d(outside, outside, 3, 1, 1)
            first, second = convolutions
            groups = nn.GroupNorm(4, outside), nn.GroupNorm(4, outside)
            return nn.Sequential(first, groups[0], nn.SiLU(), second, groups[1], nn.SiLU())

        down = [block(a, b) for a, b in itertools.pairwise([3, *sizes])]
        up = [block(b + a, a) for a, b in reversed([*itertools.pairwise(sizes)])]
        self.blocks = nn.ModuleList(down + up)
        self.head = nn.Conv2d(width, 3, 1)

    def through(self, call: Callable[[int, nn.Module, Tensor], Tensor], x: Tensor) -> Tensor:
        across, levels = [], len(self.blocks) // 2 + 1
        for number, block in enumerate(self.blocks):
            if number >= levels:
                x = torch.cat([functional.interpolate(x, scale_factor=2.0), across.pop()], 1)
            x = call(number, block, x)
            if number < levels - 1:
                across.append(x)
                x = functional.max_pool2d(x, 2)
        return self.head(x)


class Chain(nn.Module):
    """Blocks one after the other."""

    def __init__(self, head: nn.Module, blocks: list[nn.Module], tail: nn.Module) -> None:
        super().__init__()
        self.head, self.blocks, self.tail = head, nn.ModuleList(blocks), tail

    def through(self, call: Callable[[int, nn.Module, Tensor], Tensor], x: Tensor) -> Tensor:
        x = self.head(x)
        for number, block in enumerate(self.blocks):
            x = call(number, block, x)
        return self.tail(x)


@dataclass(frozen=True)
class Size:
    """Of all six models."""

    batch: int
    length: int
    width: int
    """Of the models of text."""
    blocks: int
    layers: int
    """Of the LSTM."""
    residuals: tuple[tuple[int, int, int], ...]
    """Channels in and out and the stride of each block of the ResNet."""
    channels: int
    """Of the U-Net at its first level."""
    side: int
    """Of an image, in pixels."""
    rows: int
    """Of a batch of the LSTM, ``length // 4`` long."""
    images: int
    """Of a batch of the U-Net, and half of the ResNet's."""
    heads: int = 4
    dtype: torch.dtype = torch.float32


def residuals(width: int) -> tuple[tuple[int, int, int], ...]:
    return ((width, width, 1),) * 3 + ((width, 2 * width, 2), (2 * width, 2 * width, 1))


TINY = Size(4, 64, 128, 2, 2, ((8, 8, 1), (8, 16, 2)), 8, 16, 32, 4)
SMALL = Size(4, 64, 128, 6, 3, residuals(24), 8, 16, 32, 4)
FULL = Size(8, 256, 192, 6, 3, residuals(24), 32, 64, 64, 8)
# For an accelerator: some 10 GB saved in a step, of 0.1 s and more.
LARGE = Size(4, 2048, 2048, 16, 3, residuals(64), 64, 256, 256, 32, 16, torch.bfloat16)


def model(name: str, size: Size) -> tuple[Any, Callable[[], Tensor]]:
    """The model, and what gives it a batch."""
    width, side, words = size.width, size.side, 256
    if name in ("gpt", "llama", "experts"):
        makes = {
            "gpt": lambda: Attention(width, size.heads),
            "llama": lambda: Attention(width, size.heads, gated=True),
            "experts": lambda: Attention(width, size.heads, experts=4),
        }
        blocks = [makes[name]() for _ in range(size.blocks)]
        net = Chain(nn.Embedding(words, width), blocks, nn.Linear(width, words))
        return net.to(size.dtype), lambda: torch.randint(words, (size.batch, size.length))
    if name == "resnet":
        first, last = size.residuals[0][0], size.residuals[-1][1]
        end = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, 10))
        stages = [Residual(*each) for each in size.residuals]
        net = Chain(nn.Conv2d(3, first, 3, 1, 1), stages, end)
        shape: tuple[int, ...] = (2 * size.images, 3, side, side)
    elif name == "unet":
        net, shape = UNet(size.channels), (size.images, 3, side, side)
    else:
        assert name == "lstm", name
        layers: list[nn.Module] = [Recurrent(width) for _ in range(size.layers)]
        net = Chain(nn.Linear(width, width), layers, nn.Linear(width, words))
        shape = (size.rows, size.length // 4, width)
    return net.to(size.dtype), lambda: torch.randn(shape, dtype=size.dtype)


MODELS = ("gpt", "llama", "resnet", "unet", "lstm", "experts")


class Ground:
    """Where a step runs, and what measures it: the CPU, as it is here, or an accelerator."""

    device = torch.device("cpu")
    size = FULL

    def made(self) -> AbstractContextManager[Any]:
        """Within it new tensors are on the device, where it can make them."""
        return contextlib.nullcontext()

    def reset_peak(self) -> None:
        """From now on :meth:`peak_bytes` counts from the start."""
        reset_resident_peak()

    def peak_bytes(self) -> int:
        """Of the process."""
        return resident_peak_bytes()

    def now(self) -> Any:
        """A point in time."""
        return time.perf_counter()

    def seconds(self, since: Any, until: Any) -> float:
        """Between two of these."""
        return float(until - since)

    def probe(self) -> float:
        """Seconds of a fixed calculation, as a measure of this machine's speed; 0 where no machine has part."""
        began = time.perf_counter()
        for _ in range(PROBED):
            torch.mm(self._matrix, self._matrix)
        return time.perf_counter() - began

    @functools.cached_property
    def _matrix(self) -> Tensor:
        return torch.ones(512, 512)

    def stash(self, disk: str, **options: Any) -> Stash:
        """One that moves what it moves to the tier below."""
        return Stash(disk=disk, **options)


class Accelerator(Ground):
    """Its tensors' memory and its own time."""

    def __init__(self, name: str) -> None:
        name, _, link = name.partition("=")
        if name == "simulated":
            sys.path.insert(0, str(HERE.parent / "tests"))
            import simulated

            simulated.register()
            simulated.begin(0.01, 0)
            if link:
                simulated.rates(10e9, float(link), float(link))
        if name == "timed":
            import timed

            timed.register()
        self.size = SMALL if name == "simulated" else LARGE
        self.device = torch.device(name, 0)
        # A kernel that has no deterministic form would make losses differ that are not wrong.
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    def made(self) -> AbstractContextManager[Any]:
        return self.device if self.size is LARGE else contextlib.nullcontext()

    def reset_peak(self) -> None:
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        torch.accelerator.synchronize()
        return int(torch.accelerator.max_memory_allocated())

    def now(self) -> Any:
        event = torch.Event(self.device, enable_timing=True)
        torch.accelerator.current_stream().record_event(event)
        return event

    def seconds(self, since: Any, until: Any) -> float:
        for event in (since, until):
            event.synchronize()
        return float(since.elapsed_time(until)) / 1e3

    def probe(self) -> float:
        return 0.0

    def stash(self, disk: str, **options: Any) -> Stash:
        return Stash(host="48GiB" if self.size is LARGE else "8GiB", **options)


def ground_of(name: str) -> Ground:
    return Ground() if name == "cpu" else Accelerator(name)


def step_of(
    name: str, tiny: bool, way: str, ground: Ground | None = None
) -> Callable[[AbstractContextManager[Any]], str]:
    """One training step under a context; it returns the loss as a hexadecimal number."""
    ground = ground or Ground()
    device = ground.device
    torch.manual_seed(0)
    with ground.made():
        net, batch = model(name, TINY if tiny else ground.size)
    net.to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)

    named: set[nn.Module] = set()
    under: list[AbstractContextManager[Any]] = []

    def call(number: int, block: nn.Module, x: Tensor) -> Tensor:
        if way.startswith("regions") and block not in named and isinstance(under[0], Stash):
            named.add(block)
            under[0].recompute(block)
        if way == "checkpoint all" or (way == "checkpoint other" and number % 2):
            return checkpoint(block, x, use_reentrant=False)  # type: ignore[no-any-return]
        return block(x)  # type: ignore[no-any-return]

    def step(context: AbstractContextManager[Any]) -> str:
        with ground.made():
            x = batch().to(device)
        optimizer.zero_grad()
        under[:] = [context]
        with context:
            loss = net.through(call, x).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss).hex()

    return step


def stash_of(way: str, disk: str, ground: Ground) -> Stash | None:
    kind, _, nbytes = way.partition("=")
    if kind == "keep":
        return ground.stash(disk, keep=int(nbytes))
    return ground.stash(disk, budget=int(nbytes)) if kind in ("budget", "regions") else None


def work(name: str, tiny: bool, way: str, disk: str, on: str = "cpu") -> dict[str, Any]:
    """Run one cell in this process."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ground = ground_of(on)
    step, stash = step_of(name, tiny, way, ground), stash_of(way, disk, ground)
    context: AbstractContextManager[Any] = stash if stash is not None else contextlib.nullcontext()
    losses, peaks = [], []

    def run() -> tuple[float, float, float]:
        probe = ground.probe()
        ground.reset_peak()
        began, processor = ground.now(), time.process_time()
        losses.append(step(context))
        seconds = ground.seconds(began, ground.now())
        peaks.append(ground.peak_bytes())
        return seconds, time.process_time() - processor, probe

    for _ in range(3):
        run()
    if stash is not None and stash.plan is not None:
        unchanged, before = 0, None
        for _ in range(SETTLED):
            run()
            plan = stash.plan
            assert plan is not None
            is_same = plan.measured is not None and plan.predicted == before
            unchanged, before = unchanged + 1 if is_same else 0, plan.predicted
            if unchanged == UNCHANGED:
                break
    timed = [run() for _ in range(TIMED)]
    probes = [*(probe for *_, probe in timed), ground.probe()]
    around = [(before + after) / 2 or 1.0 for before, after in itertools.pairwise(probes)]
    found: dict[str, Any] = {
        "way": way,
        "peak_bytes": max(peaks[-TIMED:]),
        "highest_bytes": max(peaks[1:]),
        "peaks_mib": [round(peak / 2**20, 1) for peak in peaks],
        "step_seconds": statistics.median(wall for wall, *_ in timed),
        "processor_seconds": statistics.median(processor for _, processor, _ in timed),
        "probe_seconds": statistics.median(probes),
        "step_probes": statistics.median(
            wall / probe for (wall, *_), probe in zip(timed, around, strict=True)
        ),
        "losses": hashlib.sha256("".join(losses[:6]).encode()).hexdigest()[:12],
        "load": os.getloadavg()[0],
    }
    if stash is not None:
        stats = stash.stats()
        found["written_bytes"] = stats.written_bytes
        if stash.plan is not None:
            found["plan"] = {**stash.plan.as_dict(), "classes": []}
        stash.close()
    return found


def predictions(name: str, tiny: bool, kind: str, disk: str, on: str = "cpu") -> dict[str, Any]:
    """Measure a few steps, and plan for six budgets; ``kind``: one of ``PLANNED``."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ground = ground_of(on)
    step = step_of(name, tiny, kind, ground)
    stash = ground.stash(disk, budget=1, name="measure")
    # The probe after a step is a part of it to the stash. While memory is sampled it takes longer.
    probes: dict[str, list[float]] = {"left alone": [], "planned": []}
    moved_bytes = 0
    for _ in range(20):
        step(stash)
        assert stash.plan is not None
        if stash.plan.trace is not None:
            break
        moved_bytes, before = stash.stats().written_bytes, moved_bytes
        state = "planned" if moved_bytes > before else "left alone"
        probes[state].append(ground.probe())
    plan = stash.plan
    assert plan is not None and plan.trace is not None and plan.plain is not None
    mean_probes = {
        # The first step takes what only a first one does, and so does the first that is left alone.
        kind: statistics.mean(probes[kind][1:] or probes["planned"][1:])
        for kind in probes
    }
    least, most = plan.smallest_budget_bytes or 0, plan.plain.peak_bytes
    saved = sum(block.nbytes for block in plan.trace.blocks)
    found = []
    for share in SHARES:
        each = plan.at(int(least + share * (budget_for(most) - least)))
        assert each.predicted is not None
        probe = mean_probes["left alone" if each.state == "left alone" else "planned"]
        found.append(
            {
                "budget_bytes": each.budget_bytes,
                "state": each.state,
                "peak_bytes": each.predicted.peak_bytes,
                "step_seconds": each.predicted.step_seconds - probe,
                "bound_seconds": each.bound.step_seconds - probe
                if each.bound is not None
                else None,
                "probe_seconds": probe,
            }
        )
    stash.close()
    return {
        "smallest_bytes": least,
        "plain_bytes": most,
        "saved_bytes": saved,
        "probe_seconds": mean_probes["planned"],
        "budgets": found,
    }


WAY = re.compile(r"plain|checkpoint (all|other)|(keep|budget|regions)=\d+")


def ways_of(predicted: dict[str, dict[str, Any]], tiny: bool) -> Iterator[str]:
    yield "plain"
    for kind, each in predicted.items():
        for budget in each["budgets"][2:3] if tiny else each["budgets"]:
            yield f"{kind}={budget['budget_bytes']}"
    if tiny:
        return
    for share in KEEPS:
        yield f"keep={int(share * predicted['budget']['saved_bytes'])}"
    yield from ("checkpoint all", "checkpoint other")


class Processes:
    """Where cells run: each in one of its own; an accelerator's, a model's one after the other in one.

    There the allocator counts a cell's peak whatever was before, and a process starts as long as a cell runs.
    """

    def __init__(self, command: list[str], environ: dict[str, str], is_shared: bool) -> None:
        self._command, self._environ, self._is_shared = command, environ, is_shared
        self._name, self._process, self._errors = "", None, tempfile.TemporaryFile("w+")
        self._process: subprocess.Popen[str] | None

    def answer(self, name: str, way: str) -> dict[str, Any] | str:
        """What a cell has found, or the end of what its process wrote."""
        if self._process is None or self._name != name:
            self.close()
            self._errors.seek(0)
            self._errors.truncate()
            self._name, self._process = (
                name,
                subprocess.Popen(
                    [*self._command, "--cells", name],
                    env=self._environ,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                    text=True,
                ),
            )
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(way + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if not (line and self._is_shared):
            self.close()
        if line:
            return json.loads(line)  # type: ignore[no-any-return]
        self._errors.seek(0)
        said = self._errors.read().strip().splitlines() or [f"exit status {process.returncode}"]
        return "\n".join(said[-20:])

    def close(self) -> None:
        """End the process that is there."""
        if self._process is not None:
            self._process.communicate()
            self._process = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tiny", action="store_true", help="small models, whose figures mean nothing, and few ways"
    )
    parser.add_argument(
        "--regions", action="store_true", help="each budget with blocks that may run again, too"
    )
    parser.add_argument("--models", help=f"which, with commas; default: {', '.join(MODELS)}")
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="where what moves goes")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, xpu, or simulated: see above")
    parser.add_argument("--out", type=Path, help="the results, as JSON")
    parser.add_argument("--draw", type=Path, metavar="PICTURE", help="only draw what --out has")
    parser.add_argument(
        "--seconds", type=float, help="begin no cell after so many; default: no limit"
    )
    parser.add_argument(
        "--cells", metavar="MODEL", help="only those of which standard input has a line, here"
    )
    parser.add_argument("--ways", help="run only these, with commas, in turns; print their medians")
    parser.add_argument("--rounds", type=int, default=3, help="of --ways; default: %(default)s")
    given = parser.parse_args()
    if given.cells:
        for line in sys.stdin:
            what, _, kind = (way := line.strip()).partition(" ")
            run, way = (predictions, kind) if what == "predict" else (work, way)
            found = run(given.cells, given.tiny, way, given.disk, given.device)
            print(json.dumps(found), flush=True)
            gc.collect()
            if torch.accelerator.is_available():
                torch.accelerator.empty_cache()
        return
    until = time.monotonic() + (float("inf") if given.seconds is None else given.seconds)
    if given.draw is not None:
        draw(json.loads(given.out.read_text())["models"], given.draw)
        return
    allocator = choose("auto", os.environ, find())
    command = [sys.executable, __file__, "--disk", given.disk, "--device", given.device]
    command += ["--tiny"] if given.tiny else []
    environ = os.environ | dict(allocator.environment)
    processes = Processes(
        command, environ, given.device.partition("=")[0] not in ("cpu", "simulated")
    )
    device = "" if given.device == "cpu" else f"--device {given.device} "
    regions = "--regions " if given.regions else ""
    results: dict[str, Any] = {"models": {}}
    if given.out is not None and given.out.exists():
        results = json.loads(given.out.read_text())
    results |= {
        "tiny": given.tiny,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, 1 thread used",
        "allocator": allocator.kind,
        "device": device_words(given.device),
        "command": f"python benchmarks/budget_cells.py {device}{regions}--out {given.out}",
    }

    def cell(name: str, way: str) -> dict[str, Any]:
        if time.monotonic() > until:
            return {"way": way, "failed": "no time was left"}
        found = processes.answer(name, way)
        return {"way": way, "failed": found} if isinstance(found, str) else found

    def keep() -> None:
        if given.out is not None:
            given.out.write_text(json.dumps(results, indent=1) + "\n")

    named = given.models.split(",") if given.models else MODELS
    if given.ways:
        ways = given.ways.split(",")
        unknown = [each for each in ways if not WAY.fullmatch(each)]
        if unknown:
            parser.error(f"--ways: unknown: {', '.join(unknown)}")
        for name in named:
            rounds = [[cell(name, way) for way in ways] for _ in range(given.rounds)]
            print(f"{name}\n\n{in_turns([*zip(*rounds, strict=True)])}\n", flush=True)
        processes.close()
        return
    for name in named:
        if name in results["models"] and not given.models:
            continue
        kinds = PLANNED if given.regions else PLANNED[:1]
        predicted = {kind: cell(name, f"predict {kind}") for kind in kinds}
        entry = results["models"][name] = {"predicted": predicted, "cells": []}
        keep()  # before anything is measured that it predicts
        failed = any("failed" in each for each in predicted.values())
        for way in ways_of(predicted, given.tiny) if not failed else ():
            entry["cells"].append(cell(name, way))
            keep()
        print(table(name, entry), flush=True)
    processes.close()
    results["summary"] = summary(results["models"])
    keep()
    print("\n".join(f"{name}: {value}" for name, value in results["summary"].items()))


def device_words(name: str) -> str:
    """What the device is called."""
    module = getattr(torch, name, None)
    return str(module.get_device_name()) if hasattr(module, "get_device_name") else name


def budgets_of(entry: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """What was predicted for each budget, and its cell; the probe's time is with both."""
    cells = {each["way"]: each for each in entry["cells"]}
    for kind, predicted in entry["predicted"].items():
        for each in predicted.get("budgets", ()):
            if (way := f"{kind}={each['budget_bytes']}") in cells:
                yield {"probe_seconds": predicted["probe_seconds"]} | each, cells[way]


def summary(models: dict[str, Any]) -> dict[str, Any]:
    """How many cells are as they should be."""
    cells = [each for entry in models.values() for each in entry["cells"]]
    pairs = [pair for entry in models.values() for pair in budgets_of(entry)]
    ran = [(before, after) for before, after in pairs if "failed" not in after]
    plain = {
        name: each.get("losses")
        for name, entry in models.items()
        for each in entry["cells"]
        if each["way"] == "plain"
    }
    return {
        "cells": len(cells),
        "failed": sum("failed" in each for each in cells),
        "losses unlike plain's": sum(
            each["losses"] != plain.get(name)
            for name, entry in models.items()
            for each in entry["cells"]
            if "failed" not in each
        ),
        "budgets": len(pairs),
        "said to be too small": sum(after["plan"]["state"] == "too small" for _, after in ran),
        "budgets exceeded that were not": sum(is_exceeded(before, after) for before, after in ran),
        "peak within 5% of the prediction": sum(
            abs(after["peak_bytes"] / before["peak_bytes"] - 1) <= 0.05 for before, after in ran
        ),
        "step within 10% of the prediction": sum(
            abs(after["step_seconds"] / before["step_seconds"] - 1) <= 0.1 for before, after in ran
        ),
        "step within 10% by the machine's speed": sum(
            abs(speedless(after) / speedless(before) - 1) <= 0.1 for before, after in ran
        ),
        "step within 10% of the prediction in the same process": sum(
            abs(after["step_seconds"] / predicted_seconds(after) - 1) <= 0.1 for _, after in ran
        ),
        "budgets over 5% slower than a smaller one": sum(
            is_slower_than_a_smaller_one(after, entry)
            for entry in models.values()
            for _, after in budgets_of(entry)
        ),
        "budgets where another way took no more memory and over 3% less time": sum(
            is_beaten(after, entry) for entry in models.values() for _, after in budgets_of(entry)
        ),
    }


def in_turns(ways: Sequence[Sequence[dict[str, Any]]]) -> str:
    """The medians of cells that ran in turns, those of one way together."""
    rows = []
    for cells in ways:
        done = [each for each in cells if "failed" not in each]
        name = str(cells[0]["way"])
        if len(done) < len(cells):
            rows.append([name, "failed", "", "", ""])
            continue
        peaks = [each["peak_bytes"] / 2**20 for each in done]
        steps = sorted(map(speedless, done))
        rows.append(
            [
                name,
                f"{statistics.median(peaks):.0f}",
                f"{max(each['highest_bytes'] for each in done) / 2**20:.0f}",
                f"{statistics.median(steps):.2f}",
                f"{steps[0]:.2f} to {steps[-1]:.2f}",
            ]
        )
    head = ("way", "peak, MiB", "highest of all", "step over probe", "from, to")
    return markdown(head, rows)


def speedless(each: dict[str, Any]) -> float:
    """The time of a step by that of the probe; in seconds, where no machine has part."""
    known = each.get("step_probes")
    return float(known or each["step_seconds"] / (each["probe_seconds"] or 1))


def predicted_seconds(cell: dict[str, Any]) -> float:
    """Seconds of a step by the plan that its process followed, without the probe before it, which is a part of
    the step to the stash."""
    predicted = cell["plan"]["predicted"]
    return predicted["step_seconds"] - cell["probe_seconds"] if predicted else float("nan")


def is_beaten(of: dict[str, Any], entry: dict[str, Any]) -> bool:
    """Whether plain PyTorch, ``keep=`` or checkpointing took at most this peak and over 3% less time."""
    return "failed" not in of and any(
        1.03 * speedless(each) < speedless(of)
        for each in entry["cells"]
        if "failed" not in each
        and each["peak_bytes"] <= of["peak_bytes"]
        and each["way"].partition("=")[0] not in PLANNED
    )


def is_slower_than_a_smaller_one(after: dict[str, Any], entry: dict[str, Any]) -> bool:
    """Whether a smaller budget of the same kind took over 5% less time."""
    kind, _, nbytes = after["way"].partition("=")
    return "failed" not in after and any(
        1.05 * speedless(other) < speedless(after)
        for _, other in budgets_of(entry)
        if "failed" not in other
        and other["way"].partition("=")[0] == kind
        and int(other["way"].partition("=")[2]) < int(nbytes)
    )


def is_exceeded(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether a budget was exceeded of which the stash had not said that it is too small."""
    return after["plan"]["state"] != "too small" and after["highest_bytes"] > before["budget_bytes"]


def table(name: str, entry: dict[str, Any]) -> str:
    """A line for each cell."""
    failed = [each["failed"] for each in entry["predicted"].values() if "failed" in each]
    lines = [f"{name}: {'failed: ' + failed[0] if failed else ''}"]
    expected = {after["way"]: before for before, after in budgets_of(entry) if "way" in after}
    for each in entry["cells"]:
        kind, _, nbytes = each["way"].partition("=")
        way = f"{kind} {int(nbytes) / 2**20:.1f} MiB" if nbytes else kind
        if "failed" in each:
            lines.append(f"  {way:20} failed: {each['failed']}")
            continue
        peak, highest = each["peak_bytes"] / 2**20, each["highest_bytes"] / 2**20
        line = f"  {way:20} peak {peak:6.1f} MiB (highest {highest:6.1f}), step {each['step_seconds']:.3f} s"
        if before := expected.get(each["way"]):
            line += f"; predicted {before['peak_bytes'] / 2**20:6.1f} MiB, {before['step_seconds']:.3f} s"
            line += f" ({speedless(each) / speedless(before) - 1:+.0%} by the machine's speed)"
            line += "; beaten" if is_beaten(each, entry) else ""
            line += "; EXCEEDED" if is_exceeded(before, each) else ""
            line += "; said to be too small" if each["plan"]["state"] == "too small" else ""
        lines.append(line)
    return "\n".join(lines)


LABELS = {"budget": "budget=", "regions": "budget=, recompute()", "keep": "keep="}


def draw(models: dict[str, Any], picture: Path) -> None:
    """Step time over peak, a panel for each model; the time is that at the usual speed of a panel's cells."""
    from matplotlib import pyplot

    columns = 3
    rows = -(-len(models) // columns)
    figure, panels = pyplot.subplots(rows, columns, figsize=(10, 3 * rows), squeeze=False)
    for panel, (name, entry) in zip(panels.flat, models.items(), strict=False):
        cells = [each for each in entry["cells"] if "failed" not in each]
        usual = statistics.median(each["probe_seconds"] or 1 for each in cells)
        for way, marker, line in (
            ("budget", "o", "-"),
            ("regions", "D", "-"),
            ("keep", "s", "--"),
            ("checkpoint", "^", ":"),
            ("plain", "*", ""),
        ):
            points = sorted(
                (each["peak_bytes"] / 2**20, speedless(each) * usual)
                for each in cells
                if each["way"].startswith(way)
            )
            if points:
                label = LABELS.get(way, way)
                panel.plot(*zip(*points, strict=True), marker=marker, linestyle=line, label=label)
        panel.set_title(name)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    for panel in panels[-1]:
        panel.set_xlabel("peak of the process [MiB]")
    for row in panels:
        row[0].set_ylabel("step [s], at one speed of the machine")
    panels[0][0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
