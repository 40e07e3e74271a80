#!/usr/bin/env python
"""PyTorch's own tests of autograd with every test under a stash, compared with plain and with hooks that copy.

    scripts/soak_upstream.py pytorch/test/test_autograd.py
    scripts/soak_upstream.py pytorch/test/test_autograd.py --only create_graph --ways disk
    BACKSTASH_UPSTREAM=pytorch/test/test_autograd.py scripts/soak upstream

The file is PyTorch's, of a checkout of it or of an unpacked source package (its folder has what it imports);
nothing of it is part of this project. Best is the version that is installed: of another one, more tests fail in
plain PyTorch, and those say nothing. Each way runs all tests in one process, with one stash for all of them:

    plain      without hooks: what fails here is not looked at
    hooks      PyTorch's saved_tensors_hooks(torch.clone, lambda copy: copy)
    disk       everything of one byte or more on disk, nothing in flight
    in flight  the same, with the default windows
    keep       in place, nothing moves

A test that passes in plain PyTorch, passes with the hooks, and fails under a stash is a new failure, and the
script fails. Of those that fail with any hooks, the ones that fail under a stash, too, are listed next to them.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

WAYS = ("plain", "hooks", "disk", "in flight", "keep")
PATIENCE_SECONDS = 300  # of one test


def context(way: str, directory: str) -> Any:
    """What each test runs in; the same object for all of them, entered again."""
    import torch

    from backstash import Stash

    if way == "hooks":
        return torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda copy: copy)
    if way == "disk":
        return Stash(disk=directory, min_bytes=1, inflight=0)
    if way == "in flight":
        return Stash(disk=directory, min_bytes=1)
    if way == "keep":
        return Stash(keep=None, disk=directory, min_bytes=1)
    return contextlib.nullcontext()


class Noted(unittest.TestResult):
    """Writes down each test's outcome as it ends, so that those before a crash are known."""

    def __init__(self, log: Any) -> None:
        super().__init__()
        self._log = log

    def startTest(self, test: unittest.TestCase) -> None:
        """Give it its time."""
        faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
        self._note(test, "begun")

    def addSuccess(self, test: unittest.TestCase) -> None:
        """It passed."""
        self._note(test, "passed")

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        """An assertion did not hold."""
        self._note(test, "failed", err)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        """An error was raised."""
        self._note(test, "failed", err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        """It says why."""
        self._note(test, "skipped")

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        """As upstream says."""
        self._note(test, "passed")

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        """Upstream says otherwise."""
        self._note(test, "failed")

    def _note(self, test: unittest.TestCase, outcome: str, err: Any = None) -> None:
        text = f"{err[0].__name__}: {err[1]}" if err is not None else ""
        name = test.id().split(".", 1)[-1]
        print(json.dumps([name, outcome, text]), file=self._log, flush=True)


def tests_of(path: Path) -> list[unittest.TestCase]:
    """Of the file, in its order."""
    sys.argv = [path.name]
    os.chdir(path.parent)
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: list[unittest.TestCase] = []

    def collect(suite: Any) -> None:
        for each in suite:
            collect(each) if isinstance(each, unittest.TestSuite) else found.append(each)

    collect(unittest.defaultTestLoader.loadTestsFromModule(module))
    return found


def worker(options: argparse.Namespace) -> int:
    """Run the tests that come after ``--after`` in one way."""
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    log_path = Path(options.log).absolute()
    tests = tests_of(options.file.absolute())
    names = [test.id().split(".", 1)[-1] for test in tests]
    first = names.index(options.after) + 1 if options.after else 0
    with tempfile.TemporaryDirectory() as directory, log_path.open("a") as log:
        hooks, result = context(options.way, directory), Noted(log)
        for test, name in zip(tests[first:], names[first:], strict=True):
            if not re.search(options.only, name):
                continue
            with contextlib.suppress(Exception), hooks:  # one that a test has popped
                test(result)
            _pop_what_is_left()
        faulthandler.cancel_dump_traceback_later()
        if options.way not in ("plain", "hooks"):
            stats = hooks.stats()
            figures = f"{stats.saves} saves, {stats.written_bytes} bytes down"
            print(json.dumps(["", "figures", figures]), file=log, flush=True)
    return 0


def _pop_what_is_left() -> None:
    import torch

    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def run(way: str, options: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """Each test's outcome in one way; a crash or a hang ends its test and no other."""
    outcomes: dict[str, tuple[str, str]] = {}
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        log.touch()
        after = ""
        while True:
            command = [sys.executable, __file__, str(options.file), "--only", options.only]
            command += ["--worker", "--way", way, "--log", str(log), "--after", after]
            ended = subprocess.run(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            last, how = "", ""
            for line in log.read_text().splitlines():
                name, outcome, text = json.loads(line)
                if outcome == "begun":
                    last, how = name, "begun"
                elif not (outcome == "passed" and outcomes.get(name, ("",))[0] == "failed"):
                    outcomes[name] = outcome, text  # of subtests and tearDown, the failure counts
                    how = "ended"
            if ended.returncode == 0:
                return outcomes
            if how != "begun" or last == after:
                raise SystemExit(
                    f"{way}: the process ended with {ended.returncode}\n{ended.stderr}"
                )
            outcomes[last] = "failed", f"the process ended with {ended.returncode}"
            with log.open("a") as file:
                print(json.dumps([last, *outcomes[last]]), file=file)
            after = last


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    file = os.environ.get("BACKSTASH_UPSTREAM")
    parser.add_argument("file", type=Path, nargs="?" if file else None, default=file and Path(file))
    parser.add_argument("--only", default="", help="a regular expression of the tests' names")
    parser.add_argument("--ways", nargs="+", choices=WAYS[2:], default=list(WAYS[2:]))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--log", help=argparse.SUPPRESS)
    parser.add_argument("--after", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options)
    if not options.file.is_file():
        parser.error(
            f"{options.file}: there is no such file; it is PyTorch's test/test_autograd.py"
        )
    plain, hooks = run("plain", options), run("hooks", options)
    passed = {name for name, (outcome, _) in plain.items() if outcome == "passed"}
    if not passed:
        print(f"no test of {options.file} passes in plain PyTorch")
        return 1
    _print("plain", plain)
    _print("hooks", hooks)
    wrong, found = 0, {}
    for way in options.ways:
        found[way] = run(way, options)
        _print(way, found[way])
        for name in sorted(passed):
            outcome, text = found[way].get(name, ("missing", ""))
            if outcome != "passed" and hooks[name][0] == "passed":
                wrong += 1
                print(f"    NEW: {name}: {_short(text)}")
    print("fail with the hooks, and how they fare under a stash:")
    for name in sorted(name for name in passed if hooks[name][0] != "passed"):
        fare = ", ".join(f"{way} {found[way].get(name, ('missing',))[0]}" for way in options.ways)
        print(f"    {name}: {fare}")
    print(f"{len(passed)} tests, {wrong} new failures")
    return int(bool(wrong))


def _print(way: str, outcomes: dict[str, tuple[str, str]]) -> None:
    counts = Counter(outcome for name, (outcome, _) in outcomes.items() if name)
    figures = outcomes.get("", ("", ""))[1]
    counted = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    print(f"{way:10} {counted}{'; ' + figures if figures else ''}", flush=True)


def _short(text: str) -> str:
    return " ".join(text.split()).partition(" To execute this test")[0][:160]


if __name__ == "__main__":
    sys.exit(main())
