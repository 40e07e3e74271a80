"""Train a byte-level GPT on the Python standard library's own source.

Plain PyTorch: nothing in this file knows of backstash. Run it as it is, or within a budget:

    python examples/train_gpt.py
    backstash run --keep 32MiB --disk /scratch examples/train_gpt.py
"""

import argparse
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

BYTES = 256


class Block(nn.Module):
    """Attention, then a perceptron, each on a normalized copy of the stream that it adds to."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(-2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Predicts each byte of a text from those before it."""

    def __init__(self, layers: int, width: int, seq: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(BYTES, width), nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(Block(width, width // 32, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES)
        for table in (self.token, self.place):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.token(text) + self.place.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def read_corpus(most_bytes: int = 4_000_000) -> torch.Tensor:
    """The modules of the standard library, one after the other, as bytes."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
    if len(text) < 100_000:
        raise SystemExit("train_gpt.py: this Python keeps no source of its standard library")
    return torch.frombuffer(text[:most_bytes], dtype=torch.uint8)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on Python's own source.")
    parser.add_argument("--steps", type=int, default=36, help="training steps (default: 36)")
    parser.add_argument("--layers", type=int, default=8, help="transformer blocks (default: 8)")
    parser.add_argument("--width", type=int, default=128, help="a multiple of 32 (default: 128)")
    parser.add_argument("--batch", type=int, default=16, help="texts a step (default: 16)")
    parser.add_argument("--seq", type=int, default=512, help="bytes a text (default: 512)")
    parser.add_argument("--tiny", action="store_true", help="a toy of the same, for tests")
    if parser.parse_known_args()[0].tiny:
        parser.set_defaults(steps=4, layers=2, width=64, batch=8, seq=128)
    options = parser.parse_args()
    if options.width % 32:
        parser.error(f"--width must be a multiple of 32, not {options.width}")
    return options


def main() -> None:
    options = parse_arguments()
    torch.manual_seed(0)
    corpus = read_corpus()
    model = GPT(options.layers, options.width, options.seq)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, {len(corpus):,} bytes of text, {options.steps} steps")

    for step in range(1, options.steps + 1):
        start = time.perf_counter()
        places = torch.randint(len(corpus) - options.seq, (options.batch, 1))
        texts = corpus[places + torch.arange(options.seq + 1)].long()
        logits = model(texts[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item()!r} {time.perf_counter() - start:.3f} s", flush=True)


if __name__ == "__main__":
    main()
