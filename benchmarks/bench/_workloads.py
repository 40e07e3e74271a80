"""The models that are timed: GPT blocks, Llama-like blocks, a ResNet of Bottlenecks, a U-Net.

They are written plainly, with one addition: `around` is called with each block and its input, so
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


class LlamaBlock(nn.Module):
    """A block as in Llama: root-mean-square norms, rotated queries and keys, a gated feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        middle = 8 * width // 3
        self.gate = nn.Linear(width, middle, bias=False)
        self.up = nn.Linear(width, middle, bias=False)
        self.down = nn.Linear(middle, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: batch x tokens x width."""
        x = x + self.out(self._attention(self.norm1(x)))
        h = self.norm2(x)
        y: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return y

    def _attention(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        heads = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        q, k = _rotated(q), _rotated(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, tokens, width)


def _rotated(x: Tensor) -> Tensor:
    """Rotary position embedding; ``x``: batch x heads x tokens x width."""
    tokens, width = x.shape[-2:]
    speeds = 10_000 ** -(torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(tokens), speeds)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class BlockStack(nn.Module):
    """Transformer blocks on random activations; the loss is the mean square of what comes out."""

    def __init__(self, blocks: int, width: int, heads: int, kind: Any = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind(width, heads) for _ in range(blocks))

    def forward(self, x: Tensor, around: Around = call) -> Tensor:
        """``x``: batch x tokens x width. Returns the loss."""
        for block in self.blocks:
            x = around(block, x)
        return x.square().mean()


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with a shortcut; normalised, with in-place ReLUs."""

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


class DoubleConv(nn.Module):
    """Two 3x3 convolutions, each normalised and followed by a ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        """``x``: batch x channels x height x width."""
        y: Tensor = self.body(x)
        return y


class UNet(nn.Module):
    """A U-Net with max-pooling and transposed convolutions; binary cross entropy at each pixel."""

    def __init__(self, levels: int, width: int) -> None:
        super().__init__()
        widths = [width << level for level in range(levels)]
        self.down = nn.ModuleList(
            DoubleConv(a, b) for a, b in zip([3, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(DoubleConv(2 * each, each) for each in reversed(widths[:-1]))
        self.blocks = nn.ModuleList([*self.down, *self.up])
        self.grow = nn.ModuleList(
            nn.ConvTranspose2d(2 * each, each, 2, 2) for each in reversed(widths[:-1])
        )
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, images: Tensor, masks: Tensor, around: Around = call) -> Tensor:
        """``images``: batch x 3 x height x width; ``masks``: batch x 1 x height x width. Returns the loss."""
        x, skipped = images, list[Tensor]()
        for block in self.down:
            x = around(block, F.max_pool2d(x, 2) if skipped else x)
            skipped.append(x)
        skipped.pop()
        for grow, block in zip(self.grow, self.up, strict=True):
            x = around(block, torch.cat((skipped.pop(), grow(x)), 1))
        return F.binary_cross_entropy_with_logits(self.head(x), masks)


def _gpt(blocks: int, width: int, batch: int, tokens: int) -> Workload:
    words = f"{blocks} GPT blocks of width {width}, batch {batch} x {tokens} tokens, float32"
    inputs = torch.randn(batch, tokens, width)
    return Workload(BlockStack(blocks, width, heads=max(1, width // 64)), (inputs,), words)


def _llama(blocks: int, width: int, batch: int, tokens: int) -> Workload:
    words = f"{blocks} Llama-like blocks of width {width}, batch {batch} x {tokens} tokens, float32"
    model = BlockStack(blocks, width, max(1, width // 64), LlamaBlock)
    return Workload(model, (torch.randn(batch, tokens, width),), words)


def _unet(levels: int, width: int, batch: int, pixels: int) -> Workload:
    words = f"U-Net of {levels} levels from width {width}, batch {batch} x 3 x {pixels} x {pixels}, float32"
    masks = (torch.rand(batch, 1, pixels, pixels) > 0.5).float()
    return Workload(UNet(levels, width), (torch.randn(batch, 3, pixels, pixels), masks), words)


def _resnet(depths: tuple[int, ...], middle: int, batch: int, pixels: int) -> Workload:
    count = sum(depths)
    words = f"ResNet of {count} Bottlenecks, batch {batch} x 3 x {pixels} x {pixels}, float32"
    images, labels = torch.randn(batch, 3, pixels, pixels), torch.randint(1000, (batch,))
    return Workload(ResNet(depths, middle), (images, labels), words)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "gpt": lambda: _gpt(12, 512, 8, 512),
    "llama": lambda: _llama(12, 512, 8, 512),
    "resnet": lambda: _resnet((3, 4, 6, 3), 64, 16, 160),
    "unet": lambda: _unet(4, 16, 8, 128),
    "gpt-large": lambda: _gpt(24, 512, 8, 512),
    "gpt-long": lambda: _gpt(32, 256, 8, 1024),
    "gpt-tiny": lambda: _gpt(2, 64, 4, 64),
    "llama-tiny": lambda: _llama(2, 64, 4, 64),
    "unet-tiny": lambda: _unet(2, 8, 2, 32),
    "resnet-tiny": lambda: _resnet((1, 1), 8, 2, 32),
    "gpt-large-tiny": lambda: _gpt(4, 128, 64, 256),
}
"""From name to a function that builds the workload; seed torch before calling it."""
