"""The machine that tries mutants: it notices what a test notices, and what none does."""

import importlib.util
import subprocess
import sys
from pathlib import Path

from long_tests import takes_long

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts/soak_mutants.py"


def run(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=110
    )


def changes_in(source):
    path = ROOT / "scripts/mutation/changes.py"
    spec = importlib.util.spec_from_file_location("changes", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["changes"] = module
    spec.loader.exec_module(module)
    return {
        mutant.key.removeprefix("f.py::"): mutant.source
        for mutant in module.mutants_of("src/backstash/f.py", source)
    }


@takes_long
def test_the_picked_mutants_are_noticed():
    ended = run("--picked")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "12 mutants: 12 killed, 0 timed out, 0 has a reason, 0 survived" in ended.stdout


@takes_long
def test_a_mutant_that_no_test_notices_survives(tmp_path):
    picked = tmp_path / "picked.txt"
    picked.write_text(
        "stores/_extents.py::Extents._remove: if not members: -> if True: | tests/test_units.py\n"
    )
    ended = run("--picked", str(picked))
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "survived      stores/_extents.py::Extents._remove: if not members:" in ended.stdout
    assert "1 mutants: 0 killed, 0 timed out, 0 has a reason, 1 survived" in ended.stdout


def test_a_name_that_is_not_in_the_source_is_an_error(tmp_path):
    picked = tmp_path / "picked.txt"
    picked.write_text("_saved/block.py::gone: 1 -> 2 | tests/test_units.py\n")
    ended = run("--picked", str(picked))
    assert ended.returncode == 1 and "_saved/block.py::gone: 1 -> 2" in ended.stderr


def test_every_reason_is_for_a_mutant_that_there_is():
    ended = run("--stale")
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_what_is_changed():
    found = changes_in(
        "def f(x, lock, *, n=3):\n"
        '    """Words."""\n'
        "    with lock:\n"
        "        x.append(n)\n"
        "    if x and not n < 2:\n"
        "        raise ValueError('no')\n"
        "    return x\n"
    )
    assert set(found) == {
        "f: 3 -> 4",
        "f: with lock: -> if True:",
        "f: x.append(n) -> pass",
        "f: if x and (not n < 2): -> if False:",
        "f: if x and (not n < 2): -> if True:",
        "f: x and (not n < 2) -> not n < 2",
        "f: x and (not n < 2) -> x",
        "f: not n < 2 -> n < 2",
        "f: n < 2 -> n <= 2",
        "f: 2 -> 3",
        "f: raise ValueError('no') -> pass",
        "f: return x -> return None",
    }
    assert "if x:" in found["f: x and (not n < 2) -> x"]
    assert "n < 3" in found["f: 2 -> 3"] and "n=3" in found["f: 2 -> 3"]
    assert len(changes_in("x = 1\ny = 1 + 1\n")) == 4  # the same change again has a number
