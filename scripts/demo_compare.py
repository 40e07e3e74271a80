"""Run one training script plainly and under ``backstash run``, and compare the two.

Memory is what the operating system accounts to each process (``ru_maxrss``). A run of no steps,
both ways, shows how much of it the start takes: the interpreter, PyTorch, the model. Exits with
status 1 if the loss of any step differs in any bit. Where one does, the plain run is made once more:
PyTorch does not always repeat its own first step on the CPU (``backstash._torch.mkl`` says why).
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = "examples/train_gpt.py"
STEP = re.compile(r"step (\d+) loss (\S+) (\S+) s$")
MAXRSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024
MIB = 1 << 20


@dataclass(frozen=True)
class Run:
    """What one run of the script came to."""

    losses: list[float]
    step_seconds: list[float]
    peak_bytes: int

    @property
    def median_seconds(self) -> float:
        """The median step, without the first, which also warms up."""
        return statistics.median(self.step_seconds[1:] or self.step_seconds)


def run(label: str, command: list[str]) -> Run:
    """Run ``command`` to its end, showing each step as it comes."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    losses, seconds = [], []
    for line in process.stdout:
        if match := STEP.match(line):
            losses.append(float(match[2]))
            seconds.append(float(match[3]))
            show(label, line.strip(), len(losses))
    if losses and sys.stdout.isatty():
        print()
    _, status, usage = os.wait4(process.pid, 0)
    process.stdout.close()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"demo: {' '.join(command)}: ended with status {process.returncode}")
    return Run(losses, seconds, usage.ru_maxrss * MAXRSS_UNIT_BYTES)


def show(label: str, line: str, step: int) -> None:
    """One line that moves on a terminal; elsewhere a line for every sixth step."""
    if sys.stdout.isatty():
        print(f"\r\033[K{label:<16}  {line}", end="", flush=True)
    elif step % 6 == 0:
        print(f"{label:<16}  {line}", flush=True)


@contextmanager
def disk_directory(chosen: str | None) -> Iterator[str]:
    """The caller's directory, or one in the checkout for as long as it is needed."""
    if chosen is not None:
        yield str(Path(chosen).absolute())
        return
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="demo-", dir=ROOT / "build") as directory:
        yield directory


def table(plain: Run, stashed: Run, starts: tuple[Run, Run], stats: dict[str, int]) -> list[str]:
    """The two runs side by side."""
    seconds = plain.median_seconds, stashed.median_seconds
    peaks = plain.peak_bytes, stashed.peak_bytes
    over = plain.peak_bytes - starts[0].peak_bytes, stashed.peak_bytes - starts[1].peak_bytes
    steps, written = len(plain.losses), stats["written_bytes"]
    rows = [
        ("", "plain", "backstash run", ""),
        ("loss of step 1", repr(plain.losses[0]), repr(stashed.losses[0]), ""),
        (f"loss of step {steps}", repr(plain.losses[-1]), repr(stashed.losses[-1]), ""),
        ("step, median", *(f"{each:.3f} s" for each in seconds), ratio(*seconds)),
        ("resident memory at its peak", *map(mib, peaks), ratio(*peaks)),
        ("  over a run of no steps", *map(mib, over), ratio(*over)),
        ("written to disk", mib(0), mib(written), f"{mib(written // steps)} a step"),
    ]
    return [f"{name:<28}{left:>20}{right:>20}  {note}".rstrip() for name, left, right, note in rows]


def mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:,.0f} MiB"


def ratio(plain: float, stashed: float) -> str:
    return f"{stashed / plain:.2f} x" if plain > 0 else ""


def differing(plain: Run, stashed: Run) -> list[str]:
    """The steps whose losses are not the same number to the last bit."""
    pairs = enumerate(zip(plain.losses, stashed.losses, strict=False), start=1)
    found = [
        f"step {step}: plain {left!r} ({left.hex()}), backstash {right!r} ({right.hex()})"
        for step, (left, right) in pairs
        if left.hex() != right.hex()
    ]
    if len(plain.losses) != len(stashed.losses):
        found.append(f"plain took {len(plain.losses)} steps, backstash {len(stashed.losses)}")
    return found


def settled(plain: Run, stashed: Run, again: Callable[[], Run]) -> Run:
    """The plain run to compare with: another one, if it differs and does not repeat itself."""
    if not differing(plain, stashed):
        return plain
    print("The losses differ. Plain PyTorch once more:", flush=True)
    if not (own := differing(plain, second := again())):
        return plain
    print("Plain PyTorch did not repeat itself (pytorch/pytorch#188792):", *own[:1], sep="\n")
    return second


def compare(directory: str, arguments: list[str]) -> int:
    report = Path(directory) / f"backstash-demo-{os.getpid()}.json"
    options = ["--keep", "32MiB", "--disk", directory]
    plainly = [sys.executable, SCRIPT]
    backstash = [sys.executable, "-m", "backstash", "run", *options]
    print(f"python {' '.join([SCRIPT, *arguments])}", flush=True)
    plain = run("plain", [*plainly, *arguments])
    print(f"backstash run {' '.join([*options, SCRIPT, *arguments])}", flush=True)
    try:
        stashed = run("backstash run", [*backstash, "--json", str(report), SCRIPT, *arguments])
        stats = json.loads(report.read_text(encoding="utf-8"))["stats"]
    finally:
        report.unlink(missing_ok=True)
    plain = settled(plain, stashed, lambda: run("plain again", [*plainly, *arguments]))
    starts = (
        run("plain", [*plainly, *arguments, "--steps", "0"]),
        run("backstash run", [*backstash, "--quiet", SCRIPT, *arguments, "--steps", "0"]),
    )
    print("", *table(plain, stashed, starts, stats), "", sep="\n")
    if wrong := differing(plain, stashed):
        print("THE LOSSES DIFFER:", *wrong, sep="\n")
        return 1
    print(f"The losses of all {len(plain.losses)} steps are equal to the last bit.")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__.partition("\n")[0])
    parser.add_argument("--disk", metavar="DIR", help="a directory on a disk (default: one here)")
    parser.add_argument("--tiny", action="store_true", help="a toy of the same, for tests")
    options = parser.parse_args()
    if options.disk is not None and not os.path.isdir(options.disk):
        parser.error(f"--disk {options.disk} is not a directory")
    with disk_directory(options.disk) as directory:
        os.chdir(ROOT)
        return compare(directory, ["--tiny"] if options.tiny else [])


if __name__ == "__main__":
    raise SystemExit(main())
