#!/usr/bin/env python
"""Whether the first call of a vector function says the same as the second, in fresh processes.

    scripts/soak_first_calls.py                  # 100 processes of each kind, some 6 minutes
    scripts/soak_first_calls.py --processes 20

Without backstash some do not: PyTorch's packages hold an MKL whose first call, made by two threads
at once, may be of low accuracy (https://github.com/pytorch/pytorch/issues/188792). It is shown here
because every comparison with plain PyTorch across processes encounters it. With ``import torch, backstash``
none may differ: then this ends with status 1.
"""

from __future__ import annotations

import argparse
import collections
import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src"
# A product first: it wakes the threads, so that they come to the vector function together.
PROGRAM = """
import torch
torch.manual_seed(0)
x = torch.rand(400, 400) * 0.9 + 0.05
torch.nn.Linear(400, 400)(x)
x + x
first, second = x.NAME(), x.NAME()
print((first - second).div(second).abs().max().item())
"""
FUNCTIONS = ("sqrt", "tanh", "exp", "log")


def first_is_off_by(name: str, first_line: str) -> float:
    """How far the first call was from the second, relative to it, in a process of its own."""
    program = first_line + PROGRAM.replace("NAME", name)
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", program]
    output = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, check=True
    ).stdout
    return float(output)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", type=int, default=100, help="of each kind (default 100)")
    count = parser.parse_args().processes
    off: dict[str, list[float]] = collections.defaultdict(list)
    kinds = {"plain PyTorch": "", "import torch, backstash": "import torch, backstash\n"}
    for turn in range(count):
        for kind, first_line in kinds.items():
            off[kind].append(first_is_off_by(FUNCTIONS[turn % len(FUNCTIONS)], first_line))
    for kind, each in off.items():
        wrong = [one for one in each if one]
        worst = f", by up to {max(wrong):.0e} of the value" if wrong else ""
        print(f"{kind}: the first call differed in {len(wrong)} of {count} processes{worst}")
    return int(any(off["import torch, backstash"]))


if __name__ == "__main__":
    raise SystemExit(main())
