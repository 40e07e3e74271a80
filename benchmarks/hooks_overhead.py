"""What hooks cost: ours compared with torch's bare ones and with a traced graph.

    python benchmarks/hooks_overhead.py                     measure, and write results/hooks_overhead.json
    python benchmarks/hooks_overhead.py --tiny --out FILE   seconds; the figures mean nothing

Times are of the processor, in microseconds, on one thread: medians of repeats in which the variants take
turns; ratios are medians of the repeats' own ratios to the bare hook, so that a slow moment weighs on both.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from backstash.hooks import capture, clip_gradients, watch_gradients

__all__ = ["main"]

OUT = Path(__file__).resolve().parent / "results" / "hooks_overhead.json"
Variant = Callable[[], AbstractContextManager[Any]]


class Block(nn.Module):
    """A residual block of a small convolutional network, with in-place ReLUs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + x)


def blocks(count: int) -> nn.Sequential:
    return nn.Sequential(*(Block(16) for _ in range(count))).eval()


def identities(count: int) -> nn.Sequential:
    """Nothing but module calls: hooks are nearly all of the time."""
    return nn.Sequential(*(nn.Identity() for _ in range(count)))


@contextmanager
def bare_forward(model: nn.Module, names: list[str]) -> Iterator[dict[str, torch.Tensor]]:
    """The dict and the hook that one writes by hand."""
    kept: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            kept[name] = output.detach()

        return hook

    modules = dict(model.named_modules())
    handles = [modules[name].register_forward_hook(keep(name)) for name in names]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def bare_gradient(model: nn.Module, register: str, hook: Callable[..., Any]) -> Iterator[None]:
    handles = [getattr(parameter, register)(hook) for parameter in model.parameters()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def traced(model: nn.Module, names: list[str]) -> nn.Module:
    """The other way to features: a graph traced by torch.fx that returns the nodes of ``names``."""
    graph_module = torch.fx.symbolic_trace(model, concrete_args=None)
    wanted, nodes = set(names), {}
    for node in graph_module.graph.nodes:
        if node.op == "call_module" and node.target in wanted:
            nodes[node.target] = node
        if node.op == "output":
            node.args = (nodes,)
    graph_module.recompile()
    return graph_module


def timed(
    run: Callable[[], Any], variants: dict[str, Variant], repeats: int, calls: int
) -> dict[str, Any]:
    """Microseconds a call of ``run`` under each variant, and ratios to the one called ``bare``."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats + 1):
        for name, enter in variants.items():
            with enter() as entered:
                target = entered if callable(entered) else run
                target()
                begun = time.process_time()
                for _ in range(calls):
                    target()
                if repeat:  # the first round warms up
                    times[name].append((time.process_time() - begun) / calls * 1e6)
    return {
        name: {
            "microseconds": round(statistics.median(found), 2),
            "ratio": round(
                statistics.median(a / b for a, b in zip(found, times["bare"], strict=True)), 4
            ),
        }
        for name, found in times.items()
    }


def forward_cases(tiny: bool) -> dict[str, Any]:
    """Forwards with an output hook on every leaf module."""
    cases = {}
    count, few, repeats = (4, 2, 2) if tiny else (16, 10, 41)
    for label, model, x, calls in (
        ("convolutions", blocks(count), torch.randn(2, 16, 32, 32), few),
        ("identities", identities(10 * count), torch.randn(4), 20 * few),
    ):
        names = [n for n, m in model.named_modules() if n and not list(m.children())]
        if label == "convolutions":  # fx does not see a module's call inside a leaf
            names = [n for n in names if not n.endswith("relu")]
        graph = traced(model, names)

        def run(model: nn.Module = model, x: torch.Tensor = x) -> Any:
            return model(x)

        variants: dict[str, Variant] = {
            "none": contextlib.nullcontext,
            "bare": lambda model=model, names=names: bare_forward(model, names),
            "capture": lambda model=model, names=names: capture(model, names),
            "fx graph": lambda graph=graph, x=x: contextlib.nullcontext(lambda: graph(x)),
        }
        with torch.no_grad():
            cases[f"forward of {label}"] = {
                "hooks": len(names),
                "variants": timed(run, variants, repeats, calls),
            }
    return cases


def backward_cases(tiny: bool) -> dict[str, Any]:
    """Steps of a chain of small layers with a hook on every parameter."""
    count, calls, repeats = (4, 2, 2) if tiny else (64, 10, 41)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(count)))
    x = torch.randn(32, 64)

    def run() -> None:
        model.zero_grad()
        model(x).sum().backward()

    after = "register_post_accumulate_grad_hook"
    idle: dict[str, Variant] = {
        "none": contextlib.nullcontext,
        "bare": lambda: bare_gradient(model, after, lambda parameter: None),
        "watch, not reporting": lambda: _idle_watch(model, run),
    }
    clip: dict[str, Variant] = {
        "none": contextlib.nullcontext,
        "bare": lambda: bare_gradient(model, "register_hook", lambda g: g.clamp(-1.0, 1.0)),
        "clip": lambda: clip_gradients(model, value=1.0),
    }
    hooks = 2 * count
    return {
        "watch": {"hooks": hooks, "variants": timed(run, idle, repeats, calls)},
        "clip": {"hooks": hooks, "variants": timed(run, clip, repeats, calls)},
    }


@contextmanager
def _idle_watch(model: nn.Module, run: Callable[[], None]) -> Iterator[None]:
    with watch_gradients(model, every=10**9, to=None):
        run()  # the one that is reported
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="seconds; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="where the JSON goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {
        "command": " ".join(
            ["python", "benchmarks/hooks_overhead.py", *(["--tiny"] if options.tiny else [])]
        ),
        "machine": {
            "cpus": os.cpu_count(),
            "architecture": platform.machine(),
            "system": platform.system(),
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "cases": {**forward_cases(options.tiny), **backward_cases(options.tiny)},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
