#!/usr/bin/env python
"""Random networks of which parts are computed again, compared with plain PyTorch: every bit must agree.

    scripts/soak_recomputed.py                           # 1,500 networks
    scripts/soak_recomputed.py --networks 100 --seed 5000
    scripts/soak_recomputed.py --modules                 # whole modules are run again

Each is a random program of activations, normalizations, products, sums, casts, copies to other layouts, changes
in place and dropout between matrix products, in float32, float64 or under autocast, contiguous or
channels-last. Three steps each: gradients (some of second order, some twice from one graph), buffers and random
number states are compared. An error of the stash where plain PyTorch has none counts as a difference.
With ``--modules`` a network is two to four of these in a row, and some of them are run again in backward.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstash import Action, Stash
from backstash.testing import MemoryStore

STEPS = 3
PATIENCE_SECONDS = 5.0
SHAPES = ((6, 32), (16, 64), (4, 7, 33), (2, 8, 17), (2, 4, 6, 8), (3, 4, 5, 7))
OF_ONE: tuple[Callable[[Tensor], Tensor], ...] = (
    F.gelu,
    F.silu,
    F.mish,
    F.hardswish,
    F.elu,
    F.softplus,
    F.hardtanh,
    torch.relu,
    torch.tanh,
    torch.sigmoid,
    torch.sin,
    torch.cos,
    torch.abs,
    torch.neg,
    torch.square,
    torch.clone,
    Tensor.double,
    Tensor.bfloat16,
    Tensor.float,
    lambda t: F.leaky_relu(t, 0.1),
    lambda t: F.dropout(t, 0.3),
    lambda t: F.glu(torch.cat([t, t], -1), -1),
    lambda t: (t.abs() + 1).sqrt(),
    lambda t: (t * t + 1).rsqrt(),
    lambda t: (t.abs() + 0.1).log(),
    lambda t: 1 / (t.abs() + 0.5),
    lambda t: t.exp().clamp(max=5),
    lambda t: t.softmax(-1),
    lambda t: t * 2.5,
    lambda t: t.detach() * t,
    lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    lambda t: t.reshape(t.shape[0], -1).reshape(t.shape),
    lambda t: t.expand(2, *t.shape).mean(0),
    lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t,
)
IN_PLACE: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.relu_,
    torch.sigmoid_,
    torch.tanh_,
    lambda t: t.mul_(1.5),
    lambda t: t.add_(1),
    lambda t: F.silu(t, inplace=True),
)
OF_TWO: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    torch.mul,
    torch.add,
    torch.sub,
    torch.maximum,
    lambda a, b: a / (b.abs() + 1),
    lambda a, b: torch.add(a, b, alpha=0.3),
    lambda a, b: torch.cat([a, b], -1)[..., : a.shape[-1]],
    lambda a, b: torch.where(a > 0, a, b),
    lambda a, b: a * b.mean(-1, keepdim=True),
    lambda a, b: torch.addcmul(a, a, b),
    lambda a, b: torch.lerp(a, b, 0.3),
)
KINDS = ("product",) * 5 + ("one",) * 7 + ("two",) * 3 + ("in place", "scale") + ("norm",) * 3


class Network(nn.Module):
    """A random program over one tensor; the last three values make the loss."""

    def __init__(self, rng: random.Random, shape: Sequence[int]) -> None:
        super().__init__()
        width = shape[-1]
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(width, width) * 0.3) for _ in range(4)
        )
        self.norms = nn.ModuleList(
            [
                nn.LayerNorm(width, eps=rng.choice([1e-5, 1e-3, 1e-12])),
                nn.LayerNorm(width, bias=False),
                nn.LayerNorm(width, elementwise_affine=False),
                nn.RMSNorm(width),
            ]
        )
        if len(shape) > 2:
            batch = nn.BatchNorm1d if len(shape) == 3 else nn.BatchNorm2d
            self.norms += [nn.GroupNorm(1, shape[1]), batch(shape[1])]
            self.norms[-1].train(rng.random() < 0.7)
            self.norms[-1].bias.requires_grad_(rng.random() < 0.7)
        self.steps = [
            (rng.choice(KINDS), rng.random(), rng.randrange(3), rng.randrange(3))
            for _ in range(rng.randint(3, 10))
        ]

    def values(self, x: Tensor) -> list[Tensor]:
        """What the steps make."""
        values = [x @ self.weights[0]]
        for kind, which, first, second in self.steps:
            t, other = (values[-1 - min(back, len(values) - 1)] for back in (first, second))
            weight = self.weights[int(which * 4)]
            if kind == "product":
                values.append(t @ weight.to(t.dtype))
            elif kind == "scale":
                values.append(t * weight[0].to(t.dtype))
            elif kind == "one":
                values.append(OF_ONE[int(which * len(OF_ONE))](t))
            elif kind == "two":
                values.append(OF_TWO[int(which * len(OF_TWO))](t, other.to(t.dtype)))
            elif kind == "norm":
                values.append(self.norms[int(which * len(self.norms))](t.to(weight.dtype)))
            else:
                values[-1] = IN_PLACE[int(which * len(IN_PLACE))](values[-1])
        return values

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        last = (v.float() @ torch.ones(v.shape[-1]) for v in self.values(x)[-3:])
        return sum((v.square().mean() for v in last), torch.zeros(()))


class Part(Network):
    """A network that gives its last value."""

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of ``x``."""
        return self.values(x)[-1].to(x.dtype)


class Chain(nn.Module):
    """Networks one after another, of which some are ``again`` to be run in backward."""

    def __init__(self, rng: random.Random, shape: Sequence[int]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(rng, shape) for _ in range(rng.randint(1, 3)))
        self.last = Network(rng, shape)
        self.weights = self.last.weights
        self.again = [each for each in (*self.parts, self.last) if rng.random() < 0.7]

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        for part in self.parts:
            x = part(x)
        return self.last(x)  # type: ignore[no-any-return]


def gradients(
    network: nn.Module, x: Tensor, stash: Any, step: int, how: dict[str, bool]
) -> list[Tensor]:
    """Of one step, from one graph twice; and the random numbers' state."""
    torch.manual_seed(step)
    parameters = [each for each in network.parameters() if each.requires_grad]
    with torch.autocast("cpu", torch.bfloat16, enabled=how["autocast"]):
        if stash is None:
            loss = network(x)
        else:
            with stash:
                loss = network(x)
    options = {"allow_unused": True}
    first = torch.autograd.grad(
        loss, parameters, retain_graph=True, create_graph=how["second"], **options
    )
    if how["second"]:
        again = [each for each in first if each is not None and each.requires_grad]
        loss = sum((each.float().square().sum() for each in again), torch.zeros(()))
    second = torch.autograd.grad(loss, parameters, **options) if loss.requires_grad else ()
    return [each for each in (*first, *second) if each is not None] + [torch.get_rng_state()]


def same(one: Tensor, other: Tensor) -> bool:
    """To the bit."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    left, right = (each.detach().contiguous().view(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(left, right)


def judge(seed: int, said: Counter[str], *, modules: bool = False) -> str:
    """What is wrong with one network; ``""``: nothing."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    shape = rng.choice(SHAPES)
    network = Chain(rng, shape) if modules else Network(rng, shape)
    if rng.random() < 0.15:
        network = network.double()
    dtype = network.weights[0].dtype
    x = torch.randn(shape, dtype=dtype)
    if len(shape) == 4 and rng.random() < 0.4:
        x = x.to(memory_format=torch.channels_last)
    autocast = rng.random() < 0.25 and dtype == torch.float32
    how = {"autocast": autocast, "second": rng.random() < 0.3}
    before = {name: value.clone() for name, value in network.state_dict().items()}
    try:
        plain = [gradients(network, x, None, step, how) for step in range(STEPS)]
    except RuntimeError:  # a change in place that it needs, mostly
        said["refused by plain PyTorch"] += 1
        return ""
    after = {name: value.clone() for name, value in network.state_dict().items()}
    network.load_state_dict(before)
    policy = rng.choice(
        [
            *([None, None] if modules else []),
            lambda saved: Action("recompute"),
            lambda saved: Action("recompute") if saved.index % 3 else None,
            lambda saved: Action("recompute" if saved.index % 2 else "pack"),
        ]
    )
    where = rng.choice(
        [
            {"disk": MemoryStore(), "keep": None},
            {"disk": MemoryStore(), "keep": "4KiB"},
            {"disk": MemoryStore(), "inflight": 0},
            {"disk": MemoryStore(), "inflight": 0, "prefetch": 0},
            {},
        ]
    )
    stash = Stash(policy=policy, min_bytes=rng.choice([0, 256]), **where)
    if isinstance(network, Chain):
        stash.recompute(*network.again)
    for step in range(STEPS):
        try:
            found = gradients(network, x, stash, step, how)
        except Exception as error:
            return f"step {step}: {error!r}, where plain PyTorch goes on"
        if len(found) != len(plain[step]) or not all(map(same, found, plain[step])):
            return f"step {step}: other bits"
    for name, value in network.state_dict().items():
        if not same(value, after[name]):
            return f"{name} is another than plain PyTorch's"
    patience = time.monotonic() + PATIENCE_SECONDS
    while (stats := stash.stats()).blocks and time.monotonic() < patience:
        time.sleep(0.01)  # a worker's last call may still refer to one
    if stats.blocks:
        return f"{stats.blocks} blocks are left"
    said["networks"] += 1
    said["blocks' bytes"] += stats.eligible_bytes
    said["recomputed bytes"] += stats.recomputed_bytes
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", type=int, default=1500, help="how many; default 1500")
    parser.add_argument("--modules", action="store_true", help="run whole modules again")
    parser.add_argument("--seed", type=int, default=0, help="of the first; default 0")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    said: Counter[str] = Counter()
    failed = 0
    for seed in range(options.seed, options.seed + options.networks):
        wrong = judge(seed, said, modules=options.modules)
        if wrong:
            failed += 1
            print(f"seed {seed}: {wrong}", flush=True)
    print(", ".join(f"{name} {count:,}" for name, count in said.items()))
    print(f"{failed} differ")
    return 1 if failed or not said["recomputed bytes"] else 0


if __name__ == "__main__":
    sys.exit(main())
