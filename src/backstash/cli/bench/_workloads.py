"""The two models that are timed: a stack of GPT blocks, and a ResNet of Bottlenecks.

Both are written plainly, with one addition: `around` is called with each block and its input, so
that `torch.utils.checkpoint` can be put around a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["WORKLOADS", "Around", "ResNet", "Workload", "blocks_of", "call"]

Around = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and one batch for it."""

    model: nn.Module
    """Called with ``inputs`` and an :data:`Around`; returns the loss."""
    inputs: tuple[Tensor, ...]
    """One batch."""
    description: str
    """The model and the batch, in words."""


def call(block: nn.Module, x: Tensor) -> Tensor:
    """The :data:`Around` that only calls the block."""
    y: Tensor = block(x)
    return y


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules that an :data:`Around` is put around, in order."""
    blocks: Any = model.blocks
    return list(blocks)


class Block(nn.Module):
    """A pre-norm transformer block: causal attention, a feed-forward network, dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: batch x tokens x width."""
        x = x + self.dropout(self.out(self._attention(self.norm1(x))))
        y: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return y

    def _attention(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        heads = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, tokens, width)


class BlockStack(nn.Module):
    """Transformer blocks on random activations; the loss is the mean square of what comes out."""

    def __init__(self, blocks: int, width: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))

    def forward(self, x: Tensor, around: Around = call) -> Tensor:
        """``x``: batch x tokens x width. Returns the loss."""
        for block in self.blocks:
            x = around(block, x)
        return x.square().mean()


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut; normalised, with in-place ReLUs."""

    def __init__(self, inputs: int, middle: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * middle
        self.body = nn.Sequential(
            nn.Conv2d(inputs, middle, 1, bias=False),
            nn.BatchNorm2d(middle),
            nn.ReLU(inplace=True),
            nn.Conv2d(middle, middle, 3, stride, 1, bias=False),
            nn.BatchNorm2d(middle),
            nn.ReLU(inplace=True),
            nn.Conv2d(middle, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            project = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(project, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """``x``: batch x channels x height x width."""
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """A ResNet of Bottlenecks, with cross entropy over 1000 classes."""

    def __init__(self, depths: tuple[int, ...], middle: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, middle, 7, 2, 3, bias=False),
            nn.BatchNorm2d(middle),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        self.blocks = nn.ModuleList()
        inputs = middle
        for stage, depth in enumerate(depths):
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                self.blocks.append(Bottleneck(inputs, middle << stage, stride))
                inputs = 4 * (middle << stage)
        self.head = nn.Linear(inputs, 1000)

    def forward(self, images: Tensor, labels: Tensor, around: Around = call) -> Tensor:
        """``images``: batch x 3 x height x width; ``labels``: batch. Returns the loss."""
        x = self.stem(images)
        for block in self.blocks:
            x = around(block, x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def _gpt(blocks: int, width: int, batch: int, tokens: int) -> Workload:
    words = f"{blocks} GPT blocks of width {width}, batch {batch} x {tokens} tokens, float32"
    inputs = torch.randn(batch, tokens, width)
    return Workload(BlockStack(blocks, width, heads=max(1, width // 64)), (inputs,), words)


def _resnet(depths: tuple[int, ...], middle: int, batch: int, pixels: int) -> Workload:
    count = sum(depths)
    words = f"ResNet of {count} Bottlenecks, batch {batch} x 3 x {pixels} x {pixels}, float32"
    images, labels = torch.randn(batch, 3, pixels, pixels), torch.randint(1000, (batch,))
    return Workload(ResNet(depths, middle), (images, labels), words)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "gpt": lambda: _gpt(12, 512, 8, 512),
    "resnet": lambda: _resnet((3, 4, 6, 3), 64, 16, 160),
    "gpt-large": lambda: _gpt(24, 512, 8, 512),
    "gpt-long": lambda: _gpt(32, 256, 8, 1024),
    "gpt-tiny": lambda: _gpt(2, 64, 4, 64),
    "resnet-tiny": lambda: _resnet((1, 1), 8, 2, 32),
    "gpt-large-tiny": lambda: _gpt(4, 128, 64, 256),
}
"""From name to a function that builds the workload; seed torch before calling it."""
