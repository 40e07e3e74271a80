"""Draw the autograd graph of a GPT whose saved tensors are partly on disk, and of a product.

Nothing is read back from disk to draw it. The text and the .dot need no other program; the pictures
(those in docs/how-to/see-what-is-saved.md) need Graphviz's command ``dot``:

    python examples/draw_graph.py [--tiny] [--disk DIR] [--out DIR]
"""

import argparse
import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backstash import Stash
from backstash.graph import label_modules
from backstash.report import Drawing, draw
from train_gpt import GPT


def forward(model: nn.Module, seq: int, stash: Stash) -> Tensor:
    """The loss on a text, under ``stash``; the graph's nodes are labelled with their modules."""
    text = torch.arange(4 * (seq + 1)).view(4, seq + 1) % 251
    with label_modules(model), stash:
        logits = model(text[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def draw_product() -> Drawing:
    """The first example of PyTorch's tutorial on saved tensors: ``y = a * b`` saves both of them."""
    a = torch.rand(5, requires_grad=True)
    b = torch.ones(5, requires_grad=True)
    return draw(a * b, {"a": a, "b": b})


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the autograd graph of a GPT.")
    parser.add_argument("--layers", type=int, default=12, help="transformer blocks (default: 12)")
    parser.add_argument("--seq", type=int, default=256, help="bytes a text (default: 256)")
    parser.add_argument("--tiny", action="store_true", help="a toy of the same, for tests")
    parser.add_argument("--disk", metavar="DIR", help="where the stash goes (default: a new one)")
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="for the pictures")
    if parser.parse_known_args()[0].tiny:
        parser.set_defaults(layers=3, seq=64)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    model = GPT(options.layers, 128, options.seq)
    with tempfile.TemporaryDirectory() as scratch:
        stash = Stash(keep="8MiB", disk=options.disk or scratch, min_bytes="32KiB")
        loss = forward(model, options.seq, stash)
        drawing = draw(loss, model)
        read_bytes = stash.stats().read_bytes
        loss.backward()  # drawing has changed nothing
        stash.close()

    print(drawing)
    for place in drawing.places:
        print(f"{place.where}: {place.count} saved tensors, {place.nbytes:,} bytes")
    print(f"{read_bytes:,} bytes were read back to draw it")
    for ending in ("txt", "dot", "svg", "html") if shutil.which("dot") else ("txt", "dot"):
        print("wrote", drawing.save(options.out / f"graph-gpt.{ending}"))
    if shutil.which("dot"):
        print("wrote", draw_product().save(options.out / "graph-product.svg"))


if __name__ == "__main__":
    main()
