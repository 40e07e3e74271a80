"""The models of the accelerator's benchmark: a Llama-like stack, GPT-2 medium, ResNet-152, and small ones."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench._workloads import Around, BlockStack, ResNet, Workload, call

__all__ = ["DEVICE_WORKLOADS", "llama", "resnet_within"]

_152 = (3, 8, 36, 3)


class LlamaBlock(nn.Module):
    """Grouped-query attention with rotary positions and a gated feed-forward network, RMS norms, no bias."""

    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * groups * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: batch x tokens x width."""
        x = x + self.out(self._attention(self.norm1(x)))
        h = self.norm2(x)
        y: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return y

    def _attention(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q = self.q(x).view(batch, tokens, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(x).view(batch, tokens, 2, self.groups, self.size).permute(2, 0, 3, 1, 4)
        q, k = _rotated(q), _rotated(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(batch, tokens, width)


def _rotated(x: Tensor) -> Tensor:
    tokens, size = x.shape[-2:]
    rates = 10_000.0 ** (-torch.arange(0, size, 2, device=x.device) / size)
    angles = torch.arange(tokens, device=x.device)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class LlamaStack(nn.Module):
    """Llama-like blocks on random activations; the loss is the mean square of what comes out."""

    def __init__(self, blocks: int, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, groups, inner) for _ in range(blocks))

    def forward(self, x: Tensor, around: Around = call) -> Tensor:
        """``x``: batch x tokens x width. Returns the loss."""
        for block in self.blocks:
            x = around(block, x)
        return x.float().square().mean()


def llama(blocks: int, width: int, tokens: int, device: torch.device, batch: int = 1) -> Workload:
    """A stack in bfloat16: heads of 128, a key and value for every four of them."""
    heads = max(1, width // 128)
    with torch.device(device):
        model = LlamaStack(blocks, width, heads, max(1, heads // 4), width * 11 // 4)
        x = torch.randn(batch, tokens, width, dtype=torch.bfloat16)
    model = model.to(torch.bfloat16)
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    words = (
        f"Llama-like, {blocks} blocks of width {width} ({billions:.1f} B), bf16, {tokens} tokens"
    )
    return Workload(model, (x,), words)


def _gpt2(blocks: int, width: int, batch: int, tokens: int, device: torch.device) -> Workload:
    with torch.device(device):
        model = BlockStack(blocks, width, heads=max(1, width // 64))
        x = torch.randn(batch, tokens, width)
    words = (
        f"GPT-2-like, {blocks} blocks of width {width}, float32, batch {batch} x {tokens} tokens"
    )
    return Workload(model, (x,), words)


class _Torchvision(nn.Module):
    """torchvision's ResNet-152, with an :data:`Around` for each of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = importlib.import_module("torchvision.models").resnet152(weights=None)
        net = self.net
        stages = (net.layer1, net.layer2, net.layer3, net.layer4)
        self.blocks = [block for stage in stages for block in stage]

    def forward(self, images: Tensor, labels: Tensor, around: Around = call) -> Tensor:
        """``images``: batch x 3 x height x width; ``labels``: batch. Returns the loss."""
        net = self.net
        x = net.maxpool(net.relu(net.bn1(net.conv1(images))))
        for block in self.blocks:
            x = around(block, x)
        return F.cross_entropy(net.fc(net.avgpool(x).flatten(1)), labels)


def _resnet152() -> tuple[nn.Module, str]:
    """torchvision's model where it can be imported, otherwise :class:`ResNet`."""
    try:
        return _Torchvision(), "torchvision's ResNet-152"
    except Exception:  # not installed, or built for another torch
        return ResNet(_152, 64), "ResNet-152 of our own"


def resnet_within(batch: int, device: torch.device) -> Workload:
    """ResNet-152 in bfloat16, channels_last."""
    return _resnet(_152, 64, batch, 224, device, True)


def _resnet(
    depths: tuple[int, ...], middle: int, batch: int, pixels: int, device: torch.device, bf16: bool
) -> Workload:
    with torch.device(device):
        model: nn.Module = ResNet(depths, middle)
        words = f"ResNet of {sum(depths)} Bottlenecks"
        if depths == _152:
            model, words = _resnet152()
        images = torch.randn(batch, 3, pixels, pixels)
        labels = torch.randint(1000, (batch,))
    words += f", batch {batch} x 3 x {pixels} x {pixels}"
    if bf16:
        model = model.to(dtype=torch.bfloat16, memory_format=torch.channels_last)  # type: ignore[call-overload]
        images = images.to(dtype=torch.bfloat16, memory_format=torch.channels_last)
    words += ", bf16 channels_last" if bf16 else ", float32"
    return Workload(model, (images, labels), words)


DEVICE_WORKLOADS: dict[str, Callable[[torch.device], Workload]] = {
    "resnet152": lambda device: _resnet(_152, 64, 256, 224, device, False),
    "resnet152-bf16": lambda device: _resnet(_152, 64, 256, 224, device, True),
    "llama-4k": lambda device: llama(24, 2048, 4096, device, batch=2),
    "resnet152-64": lambda device: _resnet(_152, 64, 64, 224, device, False),
    "llama-4k-1": lambda device: llama(24, 2048, 4096, device),
    "llama-16k": lambda device: llama(24, 2048, 16_384, device),
    "gpt2-medium": lambda device: _gpt2(24, 1024, 8, 1024, device),
    "resnet-tiny": lambda device: _resnet((1, 1), 8, 8, 64, device, False),
    "resnet152-tiny": lambda device: _resnet(_152, 64, 1, 32, device, True),
    "llama-tiny": lambda device: llama(2, 256, 64, device),
}
"""From name to a function that builds the workload on a device; seed torch before calling it."""
