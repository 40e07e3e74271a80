"""Nothing is unpickled: what is on disk is bytes, and what the bytes are is in memory only."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import backstash

PACKAGE = Path(backstash.__file__).parent
UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
RUNS_SCRIPTS = PACKAGE / "cli" / "_importlib_bootstrap.py"  # what the user asked to run
SOURCES = sorted(PACKAGE.rglob("*.py"))


def dangerous(source: str) -> list[str]:
    """Imports and calls in ``source`` that turn bytes into objects or text into code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            names = []
        found += [name for name in names if name.split(".")[0] in UNPICKLERS]
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            safe = any(
                each.arg == "weights_only" and ast.unparse(each.value) == "True"
                for each in node.keywords
            )
            if called in ("eval", "exec") or (called.endswith("torch.load") and not safe):
                found.append(called)
            found += [each.arg for each in node.keywords if each.arg == "allow_pickle"]
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import numpy; numpy.load(f, allow_pickle=True)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "eval(text)",
        "def f():\n    import marshal",
    ],
)
def test_the_search_finds_what_it_is_for(source):
    assert dangerous(source)


def test_no_module_can_unpickle():
    found = {path.name: dangerous(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert found.pop(RUNS_SCRIPTS.name) == ["exec"]
    assert {name: what for name, what in found.items() if what} == {}


PROGRAM = """
import sys, tempfile
import torch
from backstash import Disk, Stash
from backstash.report import saved_report, timeline
from backstash.testing import TwinDevice, stash_on

model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)), torch.nn.Tanh())

def step(stash):
    with stash.record() as recording:
        with stash:
            loss = model(torch.randn(64, 64)).sum()
        loss.backward()
    assert stash.stats().written_bytes > 0
    timeline(recording).sections()
    stash.close()
    with saved_report(model) as saved:
        model(torch.randn(64, 64))
    saved.text()

def work():
    with tempfile.TemporaryDirectory() as directory:
        step(Stash(disk=Disk(directory, verify=True), min_bytes=0, inflight=0))
        step(stash_on(TwinDevice(), keep=0, host="16KiB", disk=directory, min_bytes=0))

found = []
sys.addaudithook(lambda event, args: found.append(args) if event == "pickle.find_class" else None)
work()
print("unpickled", found)
if "--prove" in sys.argv:
    import pickle, pathlib
    pickle.loads(pickle.dumps(pathlib.PurePath("x")))
    print("noticed", bool(found))
"""


def test_none_is_unpickled_while_it_works():
    """Python notifies an audit hook of every class that is unpickled; the last line proves that it does."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, "--prove"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "unpickled []\nnoticed True\n", done.stdout + done.stderr
