"""Runs the checks without pytest: in one process as long as it lives, in a new one after what breaks it.

A failed call leaves some devices in a state that fails everything after it, and a check may hang. So a
process in which either occurred ends, and the next check begins in a fresh one.
"""

import argparse
import faulthandler
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src"
STICKY = ("CUDA error", "AcceleratorError", "CUBLAS_STATUS", "CUDNN_STATUS", "device-side assert")


def main() -> int:
    """Run all checks; returns 1 where one failed or did not end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write what was found to FILE as JSON")
    parser.add_argument("--seconds", type=float, default=240, help="end by then (240)")
    parser.add_argument("--only", nargs="*", help="these checks")
    parser.add_argument("--list", action="store_true", help="name the checks")
    parser.add_argument("--checks", default="gpu_checks", help="the module that has them")
    parser.add_argument("--check-seconds", type=int, default=60, help="of one check, at most (60)")
    parser.add_argument(
        "--simulated", metavar="CHANCE,SEED", help="on a simulated accelerator: see tests/simulated"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(SOURCE))
    if options.child is not None:
        return child(json.loads(options.child), options)
    names = options.only or list(import_module(options.checks).CHECKS)
    if options.list:
        print("\n".join(names))
        return 0
    child_options = ["--checks", options.checks, "--check-seconds", str(options.check_seconds)]
    if options.simulated:
        child_options += ["--simulated", options.simulated]
    found = parent(names, options.seconds, options.out, child_options)
    return int(any(each["result"] not in ("passed", "skipped") for each in found.values()))


def child(names: list[str], options: argparse.Namespace) -> int:
    """Run checks in this process until one may have broken the device; a line of JSON for each."""
    import torch

    import simulated
    from gpu_place import Place, Skip

    if options.simulated:
        chance, seed = options.simulated.split(",")
        simulated.register()
        torch.set_num_threads(1)
    checks = import_module(options.checks).CHECKS

    there = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if there else torch.device("cpu")
    for name in names:
        faulthandler.dump_traceback_later(options.check_seconds, exit=True)
        began, words = time.perf_counter(), ""
        stream = torch.accelerator.current_stream() if there else None
        if options.simulated:
            simulated.begin(float(chance), int(seed))
        try:
            with tempfile.TemporaryDirectory() as directory:
                checks[name](Place(device, Path(directory)))
            result = "passed"
        except Skip as reason:
            result, words = "skipped", str(reason)
        except BaseException:
            result, words = "failed", traceback.format_exc()
        if stream is not None:
            torch.accelerator.set_stream(stream)
        if options.simulated and (races := simulated.faults()):
            result, words = "failed", "\n".join([*dict.fromkeys(races), words])
        seconds = time.perf_counter() - began
        print(json.dumps([name, result, round(seconds, 2), words]), flush=True)
        gc.collect()  # what a check that failed has left must not be found in the midst of another
        if result == "failed" and any(sign in words for sign in STICKY):
            return 3
    return 0


def parent(
    names: list[str], seconds: float, out: Path | None, options: list[str]
) -> dict[str, dict[str, object]]:
    """Start children until every check has been tried or the time is over."""
    until = time.monotonic() + seconds
    found: dict[str, dict[str, object]] = {}

    def note(name: str, result: str, took: float, words: str) -> None:
        found[name] = {"result": result, "seconds": took, "words": words}
        print(f"{result:<8} {took:6.2f} s  {name}", flush=True)
        if words:
            print("    " + words.strip().replace("\n", "\n    "), flush=True)
        if out is not None:
            out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    while left := [name for name in names if name not in found]:
        if time.monotonic() > until:
            for name in left:
                note(name, "not run", 0.0, "no time was left")
            break
        status, error = _run(left, until, note, options)
        if tried := [name for name in left if name not in found]:
            if status != 3:  # it ended in the middle of the first that has not been reported
                note(tried[0], "ended" if status else "failed", 0.0, f"status {status}\n{error}")
    counts = {each["result"] for each in found.values()}
    print(
        ", ".join(
            f"{sum(e['result'] == c for e in found.values())} {c}" for c in sorted(map(str, counts))
        )
    )
    return found


def _run(
    names: list[str], until: float, note: Callable[..., None], options: list[str]
) -> tuple[int, str]:
    command = [sys.executable, str(Path(__file__).with_name("test_gpu.py"))]
    environ = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONUNBUFFERED": "1"}
    environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")])
    )
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*command, *options, "--child", json.dumps(names)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environ,
        )
        timer = threading.Timer(max(1.0, until - time.monotonic()), process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                try:
                    note(*json.loads(line))
                except ValueError:
                    print(line, end="", flush=True)
            process.wait()
        finally:
            timer.cancel()
            process.kill()
            process.stdout.close()
        errors.seek(0)
        return process.returncode, errors.read()[-4000:]


if __name__ == "__main__":
    sys.exit(main())
