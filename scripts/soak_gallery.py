#!/usr/bin/env python
"""Train programs of other libraries plainly and under ``backstash run``, and compare bits and peak memory.

    scripts/soak_gallery.py                    # every program of scripts/gallery; half an hour
    scripts/soak_gallery.py --only unet --json out.json

Each program runs in processes of its own: plainly three times, with ``--disk``, and with budgets of 110% and
90% of the plain peak. The exit status is 1 if a digest of losses and weights differs, if a peak exceeds the
largest plain one by more than 2% and 8 MiB although something was moved, if a budget is exceeded that the plain
run keeps, or if a program fails. "nothing moved" in the table names the ways in which the stash moved nothing:
what their peaks and steps differ by is the memory of the package's own code, and noise. A peak is the largest
resident memory of the process, by the operating system.

Needs ``pip install '.[fast,gallery]'``, in an environment of its own: PyPI's torchvision is built for CUDA.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GALLERY = Path(__file__).with_name("gallery")
MIB = 1 << 20
ALLOWED_PART, ALLOWED_BYTES = 0.02, 8 * MIB


def run(program: Path, options: list[str] | None, directory: str) -> dict[str, Any]:
    """Run a program in a process, plainly if ``options`` is ``None``: its figures, with its peak in bytes."""
    figures = os.path.join(directory, "figures.json")
    command = [sys.executable]
    if options is not None:
        command += ["-m", "backstash", "run", *options, "--disk", directory, "--json", figures]
    process = subprocess.Popen(
        [*command, str(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"},
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    lines = [line for line in output.splitlines() if line.startswith('{"digest"')]
    if process.returncode or not lines:
        return {"error": f"exit status {process.returncode}"}
    found = json.loads(lines[-1]) | {"peak_bytes": usage.ru_maxrss << 10}
    if options is not None:
        with open(figures) as file:
            written = json.load(file)
        found["moved_bytes"] = written["stats"]["written_bytes"]
        if "plan" in written:
            found["state"] = written["plan"]["state"]
    return found


def compare(program: Path, directory: str) -> dict[str, Any]:
    """Run a program in every way: the figures of each, and what is wrong with them."""
    plain = [run(program, None, directory) for _ in range(3)]
    failed = [each["error"] for each in plain if "error" in each]
    if failed:
        return {"plain": {"error": failed[0]}, "wrong": [f"plain: {failed[0]}"]}
    peak = int(statistics.median(each["peak_bytes"] for each in plain))
    digests = {each["digest"] for each in plain}
    result: dict[str, Any] = {"plain": plain[0] | {"peak_bytes": peak}, "wrong": []}
    ways = {
        "disk": ([], None),
        "110%": (["--budget", str(peak * 11 // 10)], peak * 11 // 10),
        "90%": (["--budget", str(peak * 9 // 10)], peak * 9 // 10),
    }
    largest = max(
        each["peak_bytes"] for each in plain
    )  # peaks of one program differ by some per cent
    most = largest + max(largest * ALLOWED_PART, ALLOWED_BYTES)
    for way, (options, budget) in ways.items():
        result[way] = found = run(program, options, directory)
        if "error" in found:
            result["wrong"].append(f"{way}: {found['error']}")
            continue
        if len(digests) == 1 and found["digest"] not in digests:
            result["wrong"].append(f"{way}: other bits")
        if found["peak_bytes"] > most and found["moved_bytes"]:
            result["wrong"].append(f"{way}: peak {found['peak_bytes'] / peak:.2f} of plain's")
        if budget is not None and peak <= budget < found["peak_bytes"]:
            result["wrong"].append(f"{way}: exceeds a budget that plain keeps")
    if len(digests) > 1:
        result["wrong"].append("plain does not repeat itself")
    return result


def row(name: str, result: dict[str, Any]) -> str:
    """One line of the table."""
    cells = []
    for way in ("plain", "disk", "110%", "90%"):
        found = result.get(way, {})
        peak = f"{found['peak_bytes'] / MIB:.0f}" if "peak_bytes" in found else "-"
        seconds = found.get("step_seconds")
        cells.append(f"{peak:>5} {f'{seconds * 1000:.0f}' if seconds else '-':>5}")
    idle = [way for way in result if way != "wrong" and result[way].get("moved_bytes") == 0]
    said = "; ".join(result["wrong"]) or "as promised"
    return f"{name:22} {'  '.join(cells)}  {said}{f' (nothing moved: {chr(44).join(idle)})' * bool(idle)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="REGEX", help="programs that match")
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE")
    options = parser.parse_args()
    results = {}
    print("peak in MiB and step in ms: plain, --disk, budgets of 110% and 90% of plain's peak")
    with tempfile.TemporaryDirectory() as directory:
        for program in sorted(GALLERY.glob("*.py")):
            if program.stem == "common" or not re.search(options.only, program.stem):
                continue
            results[program.stem] = compare(program, directory)
            print(row(program.stem, results[program.stem]), flush=True)
    wrong = sum(bool(each["wrong"]) for each in results.values())
    print(f"{len(results) - wrong} of {len(results)} as promised")
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
