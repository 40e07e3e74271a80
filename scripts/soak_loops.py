#!/usr/bin/env python3
"""Loops made at random, run plainly and by checkpoint_loop: outputs, gradients, buffers, random numbers.

    scripts/soak_loops.py                  3,000 of them
    scripts/soak_loops.py --from 7 --to 8  that of seed 7

Exits with 1 when one differs, or raises.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch

from random_loops import Program, differences


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed")
    parser.add_argument("--to", type=int, default=3000, help="the seed after the last")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", DeprecationWarning)
    wrong = 0
    with tempfile.TemporaryDirectory() as directory:
        for seed in range(options.first, options.to):
            try:
                found = ", ".join(differences(seed, Path(directory)))
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
            if found:
                wrong += 1
                program = Program(seed)
                print(f"seed {seed}: {found}\n    {program.budget}, {program.recipe}", flush=True)
    print(f"{options.to - options.first} loops, {wrong} differ or raise")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
