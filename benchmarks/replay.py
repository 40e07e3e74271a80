"""A step under ``Stash.recompute`` compared with plain PyTorch and ``torch.utils.checkpoint``.

    OMP_NUM_THREADS=1 python benchmarks/replay.py           # prints a table; a minute
    OMP_NUM_THREADS=1 python benchmarks/replay.py --tiny    # small, for tests

Each model is a few blocks, each of which is checkpointed or given to ``recompute``; so both hold a block's
input, and what one block saves while its backward runs. The ways take turns in one process, and gradients are
compared. Times are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backstash import Stash
from backstash.cli._machine import machine
from bench._markdown import markdown
from budget_cells import Attention

HEAD = ("model", "plain, ms", "checkpoint, ms", "recompute, ms", "recompute / checkpoint")
ROUNDS = 9


class Transformer(nn.Module):
    """A block of GPT."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.heads = 4
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.dropout(self.out(y.reshape(batch, tokens, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norms[1](x)))))


class Residual(nn.Module):
    """A block of a ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu_(self.norms[0](self.convs[0](x)))
        return F.relu_(self.norms[1](self.convs[1](y)).add_(x))


def level(width: int) -> nn.Module:
    """Return a block of a U-Net."""
    convolutions = [nn.Conv2d(width, width, 3, padding=1) for _ in range(2)]
    layers = [(each, nn.GroupNorm(4, width), nn.SiLU()) for each in convolutions]
    return nn.Sequential(*(layer for some in layers for layer in some))


class Unrolled(nn.Module):
    """An LSTM cell, called for each step of a sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)

    def forward(self, x: Tensor) -> Tensor:
        state, found = None, []
        for each in x:
            state = self.cell(each, state)
            found.append(state[0])
        return torch.stack(found)


def models(tiny: bool) -> dict[str, tuple[Callable[[], nn.Module], int, Tensor]]:
    """By name: what makes a block, how many, and what the first is given."""
    torch.manual_seed(0)
    width, scale = (16, 1) if tiny else (256, 8)
    return {
        "GPT, dropout": (lambda: Transformer(width, 0.1), 6, torch.randn(scale, 32 * scale, width)),
        "GPT": (lambda: Transformer(width, 0.0), 6, torch.randn(scale, 32 * scale, width)),
        "Llama": (
            lambda: Attention(width, 4, gated=True),
            6,
            torch.randn(scale, 32 * scale, width),
        ),
        "ResNet": (
            lambda: Residual(4 * scale),
            6,
            torch.randn(scale, 4 * scale, 6 * scale, 6 * scale),
        ),
        "U-Net": (
            lambda: level(4 * scale),
            6,
            torch.randn(scale, 4 * scale, 6 * scale, 6 * scale),
        ),
        "LSTM cell": (lambda: Unrolled(8 * scale), 2, torch.randn(5 * scale, 8 * scale, 8 * scale)),
    }


def row(name: str, make: Callable[[], nn.Module], blocks: int, x: Tensor, rounds: int) -> list[str]:
    torch.manual_seed(0)
    net, stash = nn.ModuleList(make() for _ in range(blocks)), Stash(min_bytes=0)

    def step(way: str) -> list[Tensor]:
        torch.manual_seed(1)
        y = x
        for block in net:
            y = checkpoint(block, y, use_reentrant=False) if way == "checkpoint" else block(y)
        return list(torch.autograd.grad(y.square().mean(), list(net.parameters())))

    seconds: dict[str, list[float]] = {way: [] for way in ("plain", "checkpoint", "recompute")}
    want = step("plain")
    for _ in range(rounds + 1):
        for way, each in seconds.items():
            handle = stash.recompute(*net) if way == "recompute" else None
            began = time.perf_counter()
            found = step(way)
            each.append(time.perf_counter() - began)
            if handle is not None:
                handle.remove()
            assert all(map(torch.equal, found, want)), (name, way)
    assert stash.stats().recomputed_bytes > 0
    plain, other, ours = (statistics.median(each[1:]) for each in seconds.values())
    return [name, *(f"{each * 1e3:.0f}" for each in (plain, other, ours)), f"{ours / other:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small models, for tests")
    options = parser.parse_args()
    rounds = 1 if options.tiny else ROUNDS
    rows = [row(name, *each, rounds) for name, each in models(options.tiny).items()]
    about = machine()
    print(f"{about.processor}, {about.cores} cores; torch {torch.__version__}, ", end="")
    print(f"{torch.get_num_threads()} thread(s)\n")
    print(markdown(HEAD, rows))


if __name__ == "__main__":
    main()
