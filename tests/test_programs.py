"""Random programs: plain PyTorch's gradients to the bit, or an error only where it raises too.

``scripts/soak_programs.py`` is the long form; ``BACKSTASH_PROGRAMS=1000 pytest tests/test_programs.py`` tries
that many instead of the few of the suite.
"""

import itertools
import os
import random
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from guards import GUARDS
from long_tests import mostly_long, takes_long
from programs.judge import Wrong, judge
from programs.run import Run
from programs.search import OPERATIONS, search
from programs.ways import WAYS

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import soak_programs

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # torch's own, of transforms and type casts
    # A busy machine needs minutes. By a thread, since an error raised by a signal could come in a
    # destructor of PyTorch's, which ends the process.
    pytest.mark.timeout(600, method="thread"),
]
WITNESSED = [name for name, guard in GUARDS.items() if guard.witness]
PROGRAMS = int(os.environ.get("BACKSTASH_PROGRAMS", "10"))


def test_random_programs(tmp_path):
    """Each in half of the ways, by turns; scripts/soak_programs.py takes all of them for each."""
    halves = [dict([*WAYS.items()][first::2]) for first in (0, 1)]
    turns, failing = itertools.cycle(halves), []

    def check(steps):
        ways = failing[0] if failing else next(turns)
        try:
            judge(steps, str(tmp_path), ways)
        except Exception:
            failing[:] = [ways]  # a smaller program is tried in these
            raise

    found = search(check, PROGRAMS, number=1, shrink=True, most=25)
    assert found.error is None, f"{found.error}\n{found.as_code()}"


FOUND = {
    "a whole and its parts": [
        ("sin", 0, 0),
        ("rows", 1, 0),
        ("square", 0, 0),
        ("t", 3, 0),
        ("sin", 0, 0),
    ],
    "changed, then saved again": [
        ("sin", 0, 0),
        ("change detached", 1, 0),
        ("sin", 1, 0),
        ("land", 0, 0),
    ],
    "backward changes what it got": [("own", 0, 0), ("sin", 1, 0), ("backward, kept", 1, 0)],
    "held, changed, freed": [
        ("sin", 0, 0),
        ("hold", 0, 0),
        ("sin", 0, 0),
        ("mul_", 1, 0),
        ("free", 0, 0),
    ],
    "second order through parts": [
        ("column", 0, 0),
        ("exp", 0, 0),
        ("differentiate", 0, 0),
        ("sin", 0, 0),
    ],
    "filled once it is saved, changes allowed": [("rrelu", 0, 0)],
    "nothing of what is changed, changes allowed": [
        ("nothing of it", 0, 0),
        ("sin", 0, 0),
        ("mul_", 1, 0),
    ],
    "what a subclass is made of begins where it began": [("two tensors", 0, 0)],
}


@pytest.mark.parametrize("name", FOUND)
def test_programs_by_name(tmp_path, name):
    """`judge` raises where a gradient is not plain PyTorch's."""
    judge(FOUND[name], str(tmp_path))


def is_missed(name, directory):
    """Whether random programs find within a few that a guard of the library is patched away."""
    guard = GUARDS[name]
    ways = {way: WAYS[way] for way in WAYS if re.search(guard.ways, way)}
    with guard.undone():
        found = search(
            lambda steps: judge(steps, directory, ways),
            guard.short,
            number=0,
            shrink=False,
            most=40,
        )
    return found.error is not None


@takes_long
@pytest.mark.parametrize("name", [name for name, guard in GUARDS.items() if guard.short])
def test_the_search_finds_what_is_undone(tmp_path, name):
    if not GUARDS[name].may_crash:
        assert is_missed(name, str(tmp_path))
        return
    program = "import sys, test_programs; sys.exit(not test_programs.is_missed(*sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, name, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT), done.stderr


@pytest.mark.parametrize("name", mostly_long(WITNESSED, *WITNESSED[::2]))
def test_a_program_that_cannot_do_without(tmp_path, name):
    guard = GUARDS[name]
    steps = list(guard.witness)
    judge(steps, str(tmp_path))
    with guard.undone(), pytest.raises(Wrong):
        judge(steps, str(tmp_path))


def test_the_language_reaches_what_it_is_for():
    """Of a fixed set of programs, enough raise, differentiate twice, and give gradients at all."""
    rng = random.Random(0)
    changed = gradients = illegal = 0
    for _ in range(200):
        steps = [(rng.choice(OPERATIONS), rng.randrange(8), rng.randrange(8)) for _ in range(20)]
        run = Run(nullcontext)
        results = run.run(steps)
        run.close()
        changed += "changed" in results
        gradients += any(isinstance(result, list) for result in results)
        illegal += sum(isinstance(result, str) for result in results) > len(results) // 2
    assert changed >= 40 and gradients >= 150 and illegal <= 40


def test_the_kept_result_has_each_guard_and_the_docs_count_them():
    root = Path(__file__).resolve().parent.parent
    rows = soak_programs.table(root / "benchmarks/results/soak/programs_undo.txt").splitlines()[2:]
    outcomes = [row.strip("| ").rpartition("|")[2].strip() for row in rows]
    noticed = [int(outcome) for outcome in outcomes if outcome.isdigit()]
    missed = sum(outcome.startswith("not within") for outcome in outcomes)
    not_searched = sum(outcome.startswith("not searched") for outcome in outcomes)
    assert len(noticed) + missed + not_searched == len(outcomes) == len(GUARDS)
    assert not any("no test is named" in outcome for outcome in outcomes)
    page = (root / "docs/explanation/attacks.md").read_text()
    assert f"removes one of {len(GUARDS)} safeguards" in page
    assert (
        f"{len(noticed)} of {len(GUARDS)}, after {min(noticed)} to {max(noticed)} programs" in page
    )
    assert f"They missed {missed}, and {not_searched} were not searched" in page
