"""Repeat ten programs of the gallery, or print the table of docs/gallery.md from the committed results.

    python benchmarks/gallery.py                  # the programs whose packages are installed
    python benchmarks/gallery.py smp_unet         # this one
    python benchmarks/gallery.py --table          # print the table of docs/gallery.md; run nothing

The ten are those of another library's code in scripts/gallery whose plain peak is the largest in the committed
results. ``scripts/soak_gallery.py`` runs all 25. Each program runs in six processes, a minute or two together.
The exit status is that of ``scripts/soak_gallery.py``: 1 if anything is not as promised.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import soak_gallery  # noqa: E402
from bench._markdown import markdown  # noqa: E402

__all__ = ["PROGRAMS", "Row", "main", "rows", "table"]

RESULTS = ROOT / "benchmarks/results/soak/gallery.txt"
FIRST_PART = "first table"
# Each program, and the packages that it needs: what pip installs, and what Python imports.
PROGRAMS = {
    "x_transformers_copy": {"x-transformers": "x_transformers"},
    "smp_unet": {"segmentation-models-pytorch": "segmentation_models_pytorch"},
    "higher_maml": {"higher": "higher"},
    "whisper_small": {"transformers": "transformers"},
    "open_clip_vit": {"open_clip_torch": "open_clip"},
    "deepxde_pinn": {"deepxde": "deepxde"},
    "gpt_trainer": {"accelerate": "accelerate", "transformers": "transformers"},
    "sentence_gradcache": {"sentence-transformers": "sentence_transformers"},
    "monai_unet": {"monai": "monai"},
    "neuraloperator_fno": {"neuraloperator": "neuralop"},
}
_ROW = re.compile(r"(\w+) +((?:(?:\d+|-) +){8})(.+)")
_COMMIT = re.compile(r"\bat ([0-9a-f]{7})\b")


class Row(NamedTuple):
    """One program's figures in one part of the results."""

    name: str
    peaks: tuple[str, ...]
    """MiB: plain, ``--disk``, budgets of 110% and 90% of plain's peak."""
    steps: tuple[str, ...]
    """Milliseconds, in the same order; ``-`` where the part says that its times mean nothing."""
    equal: str
    part: str
    """The commit that was measured, as the part's heading gives it."""


def rows(text: str) -> list[Row]:
    """Return the rows of ``text``, which has a heading before each part, in their order."""
    found, heading, in_table = [], "", False
    for line in text.splitlines():
        if match := _ROW.fullmatch(line):
            in_table = True
            commit = _COMMIT.search(heading)
            cells = match[2].split()
            timed = "times say nothing" not in heading
            found.append(
                Row(
                    match[1],
                    tuple(cells[::2]),
                    tuple(cells[1::2]) if timed else ("-",) * 4,
                    _equality(match[3]),
                    commit[1] if commit else FIRST_PART,
                )
            )
        else:
            heading = line if in_table else f"{heading} {line}"
            in_table = False
    return found


def _equality(verdict: str) -> str:
    if "plain does not repeat itself" in verdict:
        return "plain PyTorch differs from itself"
    return "no" if "other bits" in verdict or "exit status" in verdict else "yes"


def table(text: str) -> str:
    """Return the ten programs as Markdown: of each, the last row of ``text`` that has it."""
    last = {row.name: row for row in rows(text)}
    ways = ("plain", "disk", "110%", "90%")
    head = ("program", *(f"peak, {way}" for way in ways), *(f"step, {way}" for way in ways))
    lines = [
        (f"`{row.name}`", *row.peaks, *row.steps, row.equal, row.part)
        for row in (last[name] for name in PROGRAMS)
    ]
    return markdown((*head, "equal", "measured at"), lines)


def missing(name: str) -> list[str]:
    """Return the packages of a program that are not installed, as pip calls them."""
    packages = PROGRAMS[name].items()
    return [package for package, module in packages if importlib.util.find_spec(module) is None]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="PROGRAM", help="programs (default: all ten)")
    parser.add_argument("--table", action="store_true", help="print the table of docs/gallery.md")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - PROGRAMS.keys():
        parser.error(
            f"no such program: {', '.join(sorted(unknown))}; there are {', '.join(PROGRAMS)}"
        )
    if options.table:
        print(table(RESULTS.read_text(encoding="utf-8")))
        return 0
    print("peak in MiB and step in ms: plain, --disk, budgets of 110% and 90% of plain's peak")
    wrong = 0
    with tempfile.TemporaryDirectory() as directory:
        for name in options.names or PROGRAMS:
            if packages := missing(name):
                print(f"{name:22} skipped: pip install {' '.join(packages)}")
                continue
            result = soak_gallery.compare(soak_gallery.GALLERY / f"{name}.py", directory)
            wrong += bool(result["wrong"])
            print(soak_gallery.row(name, result), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
