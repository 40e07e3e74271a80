#!/usr/bin/env python
"""What `backstash run` adds to a script's start, and what the command line alone takes.

    benchmarks/startup.py                   # 11 processes of each kind, in turn
    benchmarks/startup.py --repeats 3 --out startup.json

Each is a process of its own. Seconds are those of the processor (user and system), which a busy
machine changes less than those of the clock; the clock's are next to them. "To the first line" is
until the script's first line after `import torch` runs; "MiB" is the most memory that the process has held by
then. Medians; the least and the most in brackets.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NOW = "import resource, time\nused = resource.getrusage(resource.RUSAGE_SELF)\n"
PRINT = "print(used.ru_utime + used.ru_stime, time.clock_gettime(time.CLOCK_BOOTTIME), used.ru_maxrss)\n"
FIRST_LINE = NOW + PRINT
SCRIPTS = {"with torch": f"import torch\n{FIRST_LINE}", "without torch": FIRST_LINE}


def kinds(directory: str) -> dict[str, list[str]]:
    """The commands, by what they are called."""
    backstash = [sys.executable, "-m", "backstash"]
    run = [*backstash, "run"]
    to_disk = [*run, "--disk", directory]
    found = {
        "backstash --help": [*backstash, "--help"],
        "backstash --version": [*backstash, "--version"],
    }
    for command in ("run", "profile", "doctor", "bench"):
        found[f"backstash {command} --help"] = [*backstash, command, "--help"]
    found["backstash run --kep 2GiB"] = [*backstash, "run", "--kep", "2GiB", "script.py"]
    for name in SCRIPTS:
        script = os.path.join(directory, f"{name.replace(' ', '_')}.py")
        found[f"python, {name}"] = [sys.executable, script]
        found[f"backstash run, {name}"] = [*run, script]
        found[f"backstash run --quiet, {name}"] = [*run, "--quiet", script]
        found[f"backstash run --disk DIR, {name}"] = [*to_disk, script]
    return found


def measure(command: list[str]) -> dict[str, float]:
    """The seconds of one process."""
    began = time.clock_gettime(time.CLOCK_BOOTTIME)
    before = os.times()
    output = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False
    ).stdout
    after = os.times()
    used = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    figures = {"cpu": used, "clock": time.clock_gettime(time.CLOCK_BOOTTIME) - began}
    if command[-1].endswith("torch.py"):
        cpu, clock, kib = map(float, output.split()[:3])
        figures |= {
            "cpu to the first line": cpu,
            "clock to the first line": clock - began,
            "MiB": kib / 1024,  # getrusage(2) reports KiB
        }
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=11, help="processes of each kind (11)")
    parser.add_argument("--out", type=Path, help="write all figures to this file, as JSON")
    parser.add_argument("--only", default="", help="the kinds whose name has this in it (all)")
    options = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, source in SCRIPTS.items():
            Path(directory, f"{name.replace(' ', '_')}.py").write_text(source, encoding="utf-8")
        commands = {name: each for name, each in kinds(directory).items() if options.only in name}
        for turn in range(options.repeats + 1):
            for name, command in commands.items():
                figures = measure(command)
                if turn:  # the first also writes bytecode
                    results.setdefault(name, []).append(figures)
    for name, runs in results.items():
        shown = []
        for key in runs[0]:
            values = [each[key] for each in runs]
            shown.append(
                f"{key} {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
            )
        print(f"{name:<36} {'; '.join(shown)}")
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
