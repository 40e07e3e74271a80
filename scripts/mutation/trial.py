"""Trying mutants: which test runs which line, and the processes that run tests on a mutant."""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .changes import Mutant

__all__ = ["PACKAGE", "ROOT", "Coverage", "Trial", "the_map"]

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "src/backstash"
# Too slow, or about something else, to say anything about the files that are mutated.
_NOT_RUN = re.compile(
    r"operators|cli|examples|benchmarks|docs|distributed|models|compile|gpu|layout|mutants"
)
_QUICK = 16  # tests that are collected and run before the rest


@dataclass(slots=True)
class Coverage:
    """Which test runs which line."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Of each test, by its id."""
    lines: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    """File, line: the tests that run it."""

    def tests_of(self, mutant: Mutant, first: Iterable[str], budget_seconds: float) -> list[str]:
        """The tests worth running, in their order; those in ``first`` lead."""
        runs = self.lines.get(mutant.file, {})
        found = {test for line in mutant.lines for test in runs.get(line, ())}
        if not found and not any(line in runs for line in mutant.lines):
            return []
        if not found:  # a line that runs when the module is imported
            found = {test for tests in runs.values() for test in tests}
        leading = [test for test in first if test in found]
        rest = sorted(found.difference(leading), key=lambda test: self.seconds[test])
        chosen, total = [], 0.0
        for test in (*leading, *rest):
            total += self.seconds[test]
            if chosen and total > budget_seconds:
                break
            chosen.append(test)
        return chosen


def look(tests: list[str], into: Path) -> None:
    """Run ``tests`` under coverage; in a process of its own, because it imports the package."""
    import coverage
    import pytest

    cov = coverage.Coverage(data_file=None, source=[str(ROOT / PACKAGE)], config_file=False)
    seconds: dict[str, float] = {}

    class Contexts:
        @pytest.hookimpl(hookwrapper=True)
        def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
            cov.switch_context(item.nodeid)
            began = time.perf_counter()
            yield
            seconds[item.nodeid] = time.perf_counter() - began

    sys.path.insert(0, str(ROOT / "src"))
    os.environ["PYTHONPATH"] = str(ROOT / "src")
    cov.start()
    status = pytest.main(
        ["-q", "--no-header", "-p", "no:cacheprovider", *tests], plugins=[Contexts()]
    )
    cov.stop()
    if status:
        sys.exit("the tests do not pass as they are: mend them first")
    data = cov.get_data()
    lines = {
        os.path.relpath(file, ROOT): {
            line: [test for test in tests if test]
            for line, tests in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }
    into.write_text(json.dumps({"seconds": seconds, "lines": lines}))


class PackageCopy:
    """A copy of the package, in which one mutant at a time is tried."""

    mutant: Mutant
    outcome = ""
    failed = ""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._child = 0
        self._deadline = 0.0
        shutil.copytree(ROOT / "src", directory / "src")

    def begin(self, mutant: Mutant, tests: list[str], limit_seconds: float) -> None:
        """Start ``tests`` on ``mutant``."""
        self.mutant = mutant
        self._write(mutant.source)
        self._note = self._directory / "failed"
        self._note.unlink(missing_ok=True)
        self._deadline = time.monotonic() + limit_seconds
        sys.stdout.flush()
        self._child = os.fork()
        if not self._child:
            self._try(tests)

    def _write(self, source: str) -> None:
        path = self._directory / self.mutant.file
        path.write_text(source)
        for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            stale.unlink()

    def _try(self, tests: list[str]) -> None:
        """In the child: run them, and exit with 0 when all pass."""
        status = 1
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 30, 4 << 30))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            nowhere = os.open(os.devnull, os.O_RDWR)
            for number in range(3):
                os.dup2(nowhere, number)
            sys.path.insert(0, str(self._directory / "src"))
            os.environ["PYTHONPATH"] = str(self._directory / "src")
            import pytest

            note = self._note

            class Note:
                def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
                    if report.failed:
                        note.write_text(report.nodeid)

            options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:anyio"]
            # hypothesis is imported already: it need not be rewritten.
            options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
            options += ["--basetemp", str(self._directory / "tmp")]
            for batch in filter(None, (tests[:_QUICK], tests[_QUICK:])):
                status = int(pytest.main([*options, *batch], plugins=[Note()]))
                if status:
                    break
        finally:
            os._exit(status)

    def has_ended(self) -> bool:
        """Whether it has; ``outcome`` then says how, and ``failed`` which test failed."""
        done, status = os.waitpid(self._child, os.WNOHANG)
        if not done and time.monotonic() < self._deadline:
            return False
        self.outcome = "timed out" if not done else "killed" if status else "survived"
        try:
            os.killpg(self._child, signal.SIGKILL)  # and whatever it started
        except ProcessLookupError:
            pass
        if not done:
            os.waitpid(self._child, 0)
        self.failed = self._note.read_text() if self._note.exists() else ""
        self._write((ROOT / self.mutant.file).read_text())
        return True


class Trial:
    """Mutants tried side by side, in processes forked from this one."""

    def __init__(self, coverage: Coverage, jobs: int, budget_seconds: float) -> None:
        self.coverage = coverage
        self.jobs = jobs
        self.budget_seconds = budget_seconds
        self.killers: dict[str, list[str]] = defaultdict(list)  # of each function, the latest first

    def of(self, mutants: Iterable[Mutant]) -> Iterator[tuple[Mutant, str, str]]:
        """Try each; yields it, how it ended, and the test that failed."""
        import hypothesis.strategies
        import numpy
        import pytest
        import torch._dynamo

        gc.freeze()
        del hypothesis, numpy, pytest, torch  # imported for the children
        assert len(os.listdir("/proc/self/task")) == 1, (
            "a process with threads is not forked safely"
        )
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        self._check_unchanged()
        todo = iter(mutants)
        with tempfile.TemporaryDirectory() as directory:
            free = [PackageCopy(Path(directory, str(number))) for number in range(self.jobs)]
            busy: list[PackageCopy] = []
            while True:
                while free and (mutant := next(todo, None)) is not None:
                    tests = self._tests(mutant)
                    if tests:
                        busy.append(free.pop())
                        busy[-1].begin(mutant, tests, self._limit(tests))
                    else:
                        yield mutant, "survived", "no test runs it"
                if not busy:
                    return
                time.sleep(0.01)
                for tried_in in [each for each in busy if each.has_ended()]:
                    busy.remove(tried_in)
                    free.append(tried_in)
                    self._learn(tried_in)
                    yield tried_in.mutant, tried_in.outcome, tried_in.failed

    def _check_unchanged(self) -> None:
        """The machine itself must not be what makes tests fail."""
        file = f"{PACKAGE}/units.py"
        unchanged = Mutant("nothing", file, frozenset(), (ROOT / file).read_text())
        with tempfile.TemporaryDirectory() as directory:
            tried_in = PackageCopy(Path(directory, "0"))
            tried_in.begin(
                unchanged, sorted(self.coverage.seconds, key=self.coverage.seconds.get)[:40], 300
            )
            while not tried_in.has_ended():
                time.sleep(0.01)
        if tried_in.outcome != "survived":
            sys.exit(f"tests fail with nothing changed: {tried_in.outcome} {tried_in.failed}")

    def _tests(self, mutant: Mutant) -> list[str]:
        return self.coverage.tests_of(mutant, self.killers[mutant.scope][:8], self.budget_seconds)

    def _limit(self, tests: list[str]) -> float:
        return 20 + 3 * sum(self.coverage.seconds[test] for test in tests)

    def _learn(self, tried_in: PackageCopy) -> None:
        killers = self.killers[tried_in.mutant.scope]
        if tried_in.failed:
            killers[:] = [tried_in.failed, *(each for each in killers if each != tried_in.failed)]


def the_map(tests: list[str], kept: Path | None) -> Coverage:
    """Which of ``tests`` (all, if empty) runs which line: from ``kept``, or found out and kept there."""
    with tempfile.TemporaryDirectory() as directory:
        path = kept or Path(directory, "map.json")
        if not path.exists():
            if not tests:
                tests = sorted(str(each) for each in Path("tests").rglob("test_*.py"))
                tests = [test for test in tests if not _NOT_RUN.search(test)]
            child = os.fork()
            if not child:
                look(tests, path)
                os._exit(0)
            if os.waitpid(child, 0)[1]:
                sys.exit("the tests do not pass as they are: mend them first")
        found = json.loads(path.read_text())
    lines = {
        file: {int(line): tests for line, tests in each.items()}
        for file, each in found["lines"].items()
    }
    return Coverage(found["seconds"], lines)
