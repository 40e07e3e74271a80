"""What ``Action("pack")`` and ``Action("recompute")`` leave to be held or moved of a step of each model of
``backstash bench``.

    python benchmarks/bytes_left.py                    # prints a table
    python benchmarks/bytes_left.py --tiny gpt unet    # small, or some of them

Counts bytes and takes no time: one forward pass each. With ``--check`` a backward too, whose gradients are
compared with plain PyTorch's.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import torch

from backstash import Action, Stash
from backstash.cli._machine import machine
from backstash.codecs import EXACT
from backstash.units import format_bytes
from bench._markdown import markdown
from bench._workloads import WORKLOADS

HEAD = ("model", "how", "saved", "recomputed", "packed", "to", "left of all")
HOW: dict[str, dict[str, Any]] = {
    "pack": {"codec": EXACT},
    "recompute": {"policy": lambda saved: Action("recompute")},
    "recompute, else pack": {"policy": lambda saved: Action("recompute"), "codec": EXACT},
}


def row(name: str, how: str, check: bool) -> tuple[str, ...]:
    """One line of the table."""
    torch.manual_seed(0)
    work = WORKLOADS[name]()
    small = 4 << 10 if name.endswith("-tiny") else 64 << 10
    # With a tier below, so that everything large is a block; nothing moves.
    stash = Stash(keep=None, disk=tempfile.gettempdir(), min_bytes=small, **HOW[how])
    torch.manual_seed(1)
    with stash:
        loss = work.model(*work.inputs)
    stats = stash.stats()
    if check:
        _compare(work, loss)
    stash.close()
    gone = stats.recomputed_bytes + stats.packed_bytes - stats.payload_bytes
    cells = (
        stats.eligible_bytes,
        stats.recomputed_bytes,
        stats.packed_bytes,
        stats.payload_bytes,
    )
    return (
        work.description,
        how,
        *map(format_bytes, cells),
        f"{1 - gone / stats.eligible_bytes:.1%}",
    )


def _compare(work: object, loss: torch.Tensor) -> None:
    parameters = list(work.model.parameters())  # type: ignore[attr-defined]
    found = torch.autograd.grad(loss, parameters)
    torch.manual_seed(1)
    expected = torch.autograd.grad(work.model(*work.inputs), parameters)  # type: ignore[attr-defined]
    assert all(map(torch.equal, found, expected))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["gpt", "llama", "resnet", "unet"])
    parser.add_argument("--tiny", action="store_true", help="the small models, for tests")
    parser.add_argument("--check", action="store_true", help="compare the gradients, too")
    options = parser.parse_args()
    names = [f"{name}-tiny" if options.tiny else name for name in options.models]
    print(markdown(HEAD, [row(name, how, options.check) for name in names for how in HOW]))
    about = machine()
    print(f"\n{time.strftime('%Y-%m-%d')}; {about.processor}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
