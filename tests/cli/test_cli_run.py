"""`backstash run`: a script is what it is under plain Python; the stash is around it."""

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from backstash.cli import main
from backstash.cli._first_backward import FirstBackward
from backstash.plan import Plan, PlannedClass, StepFigures
from children import child
from long_tests import mostly_long, takes_long

# The import is for the plain runs: PyTorch's own first calls differ at times (_first_calls.py).
TRAIN = """
import torch, backstash
torch.manual_seed(0)
x = torch.randn(256, 256, requires_grad=True)
y = x
for _ in range(6):
    y = y.sin().exp().tanh()
loss = y.sum()
loss.backward()
print(loss.item().hex(), x.grad.double().sum().item().hex())
"""


def start(
    arguments: Sequence[str], directory: Path, stdin: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Python with ``arguments``, in ``directory``."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        input=stdin,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def under_stash(
    arguments: Sequence[str], directory: Path, *options: str, stdin: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """The same under ``backstash run``, with a disk tier in the directory and no summary."""
    options = options or ("--disk", str(directory), "--keep", "0", "--quiet")
    run = ["-m", "backstash", "run", *options, *arguments]
    return start(run, directory, stdin, **variables)


def write(path: Path, source: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))
    return path


def same_as_plain(
    arguments: Sequence[str], directory: Path, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run both ways; status and output must agree. Frames of runpy are not a script's own."""
    plain = start(arguments, directory, stdin)
    stashed = under_stash(arguments, directory, stdin=stdin)
    assert stashed.stdout == plain.stdout
    # With its line from Python 3.10's, which is not frozen.
    runpy_frame = r'  File "(?:<frozen runpy>|[^"]*/runpy\.py)", line \d+, in \w+\n(?:    .*\n)?'
    assert stashed.stderr == re.sub(runpy_frame, "", plain.stderr)
    assert stashed.returncode == plain.returncode
    return stashed


def test_script_sees_what_plain_python_shows(tmp_path: Path) -> None:
    write(
        tmp_path / "work/script.py",
        """
        import os, pickle, sys, threading
        import neighbour

        class Local: ...

        print(__name__, __file__, __spec__, __package__, type(__loader__).__name__, sys.argv)
        print(sys.path[0], neighbour.__file__, sys.stdin.read(), threading.active_count())
        print(sys.modules["__main__"].Local is Local, type(pickle.loads(pickle.dumps(Local()))))
        print(sorted(name for name in os.environ if name.startswith(("LD_", "GLIBC", "BACKSTASH"))))
        print(os.getcwd(), sys.flags, sys.warnoptions)
        """,
    )
    write(tmp_path / "work/neighbour.py", "")
    done = same_as_plain(["work/script.py", "--keep", "a b", "-m"], tmp_path, stdin="input")
    assert "['work/script.py', '--keep', 'a b', '-m']" in done.stdout and " input " in done.stdout
    (tmp_path / "link.py").symlink_to(tmp_path / "work/script.py")
    assert str(tmp_path / "work/neighbour.py") in same_as_plain(["link.py"], tmp_path).stdout


def test_module_sees_what_plain_python_shows(tmp_path: Path) -> None:
    source = """
        import sys
        print(__name__, __file__, __spec__.name, __package__, sys.argv, sys.path[0])
        """
    write(tmp_path / "package/__init__.py", "import sys\nprint(sys.argv)")
    write(tmp_path / "package/part.py", source)
    write(tmp_path / "package/__main__.py", source)
    part = same_as_plain(["-m", "package.part", "x", "--quiet"], tmp_path).stdout
    assert " package.part package [" in part and "'x', '--quiet']" in part
    assert " package.__main__ package [" in same_as_plain(["-m", "package"], tmp_path).stdout
    assert same_as_plain(["package"], tmp_path).stdout.startswith("__main__ ")


@pytest.mark.parametrize(
    ("last", "status"),
    [
        ("sys.exit(3)", 3),
        ("sys.exit()", 0),
        ("sys.exit('a message')", 1),
        ("raise SystemExit(True)", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGINT); signal.pause()", -signal.SIGINT),
        ("os._exit(7)", 7),
        ("atexit.register(print, 'at exit'); 1 / 0", 1),
        ("sys.excepthook = lambda *error: print('hook', *error[:2]); 1 / 0", 1),
    ],
)
def test_script_ends_as_in_plain_python(tmp_path: Path, last: str, status: int) -> None:
    head = "import atexit, os, signal, sys\nprint('before', flush=True)\n"
    (tmp_path / "script.py").write_text(head + last + "\n")
    assert same_as_plain(["script.py"], tmp_path).returncode == status


@pytest.mark.parametrize(
    "source",
    [
        """
        def inner():
            raise ValueError("inner")

        def outer():
            try:
                inner()
            except ValueError as error:
                raise RuntimeError("outer") from error

        outer()
        """,
        "if True print()\n",
        "import no_such_module_anywhere\n",
    ],
    ids=["chained", "syntax", "import"],
)
def test_tracebacks_are_those_of_plain_python(tmp_path: Path, source: str) -> None:
    write(tmp_path / "script.py", source)
    assert "Error" in same_as_plain(["script.py"], tmp_path).stderr


def test_traceback_of_a_module_is_that_of_plain_python(tmp_path: Path) -> None:
    write(tmp_path / "package/__init__.py", "")
    write(tmp_path / "package/part.py", "def inner():\n    return 1 / 0\n\ninner()\n")
    assert "in inner" in same_as_plain(["-m", "package.part"], tmp_path).stderr
    write(tmp_path / "package/__init__.py", "import no_such_module_anywhere")
    assert "__init__.py" in under_stash(["-m", "package.part"], tmp_path).stderr


def test_keyboard_interrupt_from_outside_is_a_death_by_signal(tmp_path: Path) -> None:
    write(tmp_path / "script.py", "import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    run = ["-m", "backstash", "run", "--disk", str(tmp_path), "--keep", "0", "script.py"]
    for number in (signal.SIGINT, signal.SIGTERM):
        with child(
            [sys.executable, *run],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(number)
            assert process.wait(30) == -number


@takes_long
def test_children_of_the_script_get_the_environment_back(tmp_path: Path) -> None:
    write(
        tmp_path / "script.py",
        """
        import os, subprocess, sys
        import torch
        if os.fork() == 0:
            sys.exit(0)
        os.wait()
        # torch itself adds some, once more of it is imported.
        show = "import os; print(sorted(i for i in os.environ.items() if i[0][:5] != 'TORCH'))"
        print(subprocess.run([sys.executable, "-c", show], capture_output=True, text=True).stdout)
        """,
    )
    plain = start(["script.py"], tmp_path)
    for malloc in ("auto", "glibc", "none"):
        options = ("--disk", str(tmp_path), "--malloc", malloc)
        stashed = under_stash(["script.py"], tmp_path, *options)
        assert stashed.stdout == plain.stdout
        assert stashed.stderr.count("backstash: nothing was saved") == 1, (
            "a forked child printed it too"
        )


def test_processes_that_spawn_import_the_script(tmp_path: Path) -> None:
    write(
        tmp_path / "script.py",
        """
        import multiprocessing

        def square(x):
            return x * x

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(square, [2, 3]))
        """,
    )
    assert same_as_plain(["script.py"], tmp_path).stdout == "[4, 9]\n"


@takes_long
def test_script_may_set_up_torch_before_importing_it(tmp_path: Path) -> None:
    write(
        tmp_path / "script.py",
        """
        import importlib.util, os
        assert importlib.util.find_spec("torch") is not None
        os.environ["OMP_NUM_THREADS"] = "1"
        import torch
        print(torch.get_num_threads(), type(torch.__loader__), torch.__spec__.loader is torch.__loader__)
        """,
    )
    assert same_as_plain(["script.py"], tmp_path).stdout.startswith("1 ")


ANOTHER_FINDER = """
import importlib.util, sys

class Asks:  # the others, as tools that watch imports do, and so us, who ask it
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        return importlib.util.find_spec(name)

sys.meta_path.insert(1, Asks())
"""


@pytest.mark.parametrize(
    "first",
    [
        "import torch",
        pytest.param("import backstash", marks=takes_long),
        pytest.param("from backstash import Stash", marks=takes_long),
        pytest.param("import backstash.graph", marks=takes_long),
        pytest.param("import importlib.util; importlib.util.find_spec('torch')", marks=takes_long),
        ANOTHER_FINDER,
    ],
    ids=[
        "torch",
        "backstash",
        "a name of backstash",
        "a part of backstash",
        "a look",
        "another finder",
    ],
)
def test_gradients_are_exact_and_the_figures_are_there(tmp_path: Path, first: str) -> None:
    write(tmp_path / "train.py", first + TRAIN)
    figures, scratch = tmp_path / "figures.json", tmp_path / "scratch"
    scratch.mkdir()
    options = ["--keep", "256KiB", "--disk", str(scratch), "--json", str(figures)]
    options += ["--inflight", "512KiB", "--prefetch", "300KiB"]
    stashed = under_stash(["train.py"], tmp_path, *options)
    assert stashed.returncode == 0, stashed.stderr
    assert stashed.stdout == start(["train.py"], tmp_path).stdout
    found = json.loads(figures.read_text())
    assert found["outcome"] == "finished"
    # Not exact: how many writes and reads are under way at once is up to the disk.
    assert 0 < found["stats"]["keep_peak_bytes"] <= 256 << 10
    assert 0 < found["stats"]["inflight_peak_bytes"] <= 512 << 10
    assert 0 < found["stats"]["ahead_peak_bytes"] <= 300 << 10
    assert found["stats"]["written_bytes"] > 0
    assert found["resident"]["peak_bytes"] >= found["resident"]["start_bytes"] > 0
    assert found["allocator"]["reason"]
    assert found["versions"]["torch"]
    assert list(scratch.iterdir()) == [], "nothing is left"
    for line in ("peak ", "next: "):
        assert f"backstash: {line}" in stashed.stderr


@pytest.mark.parametrize(
    ("last", "outcome"),
    [
        ("1 / 0", "ZeroDivisionError"),
        pytest.param("import sys; sys.exit(4)", "exit 4", marks=takes_long),
        pytest.param("raise KeyboardInterrupt", "SIGINT", marks=takes_long),
    ],
)
def test_summary_comes_after_an_error_too(tmp_path: Path, last: str, outcome: str) -> None:
    write(tmp_path / "train.py", TRAIN + last + "\n")
    plain = start(["train.py"], tmp_path)
    stashed = under_stash(["train.py"], tmp_path, "--disk", str(tmp_path))
    assert stashed.returncode == plain.returncode
    said = stashed.stderr.removeprefix(plain.stderr)
    assert stashed.stderr.startswith(plain.stderr) and said.count("\n") == 1, (
        "the traceback is in sight"
    )
    assert said.startswith(f"backstash: the script ended by {outcome} after ")


@pytest.mark.parametrize("name", mostly_long(["SIGINT", "SIGTERM", "SIGTERM twice"], "SIGINT"))
def test_one_signal_while_the_summary_is_made_is_ignored(tmp_path: Path, name: str) -> None:
    """By default Ctrl-C raises, as a handler of the script's may: `sys.exit` is what many call."""
    signal_name, _, twice = name.partition(" ")
    write(
        tmp_path / "train.py",
        TRAIN
        + f"""
import os, signal, sys
from backstash.cli import _session
if {signal_name == "SIGTERM"}:
    def handle(*_):
        print("handled", file=sys.stderr, flush=True)
        sys.exit(9)
    signal.signal(signal.SIGTERM, handle)
write_results = _session.write_results
def interrupted(*arguments):
    os.kill(os.getpid(), signal.{signal_name})
    if {bool(twice)}:
        os.kill(os.getpid(), signal.{signal_name})
    write_results(*arguments)
_session.write_results = interrupted
""",
    )
    ended = under_stash(["train.py"], tmp_path, "--disk", str(tmp_path))
    assert ended.returncode == 0  # how the script has ended
    assert "KeyboardInterrupt" not in ended.stderr
    assert ("backstash: next: " in ended.stderr) == (not twice)
    assert ("handled\n" in ended.stderr) == ("SystemExit: 9" in ended.stderr) == bool(twice)


STEPS = """
import torch, backstash
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(400, 400), nn.Tanh()) for _ in range(3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(400, 400)
for _ in range(7):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
print(loss.item().hex())
"""


def embedded(page: Path) -> dict[str, Any]:
    """The data of a page."""
    found = re.search(r'id="report">(.*?)</script>', page.read_text(encoding="utf-8"))
    assert found is not None
    report: dict[str, Any] = json.loads(found[1])
    return report


def test_report_is_a_page_of_the_run(tmp_path: Path) -> None:
    write(tmp_path / "train.py", STEPS)
    plain, page, figures = tmp_path / "plain.json", tmp_path / "out.html", tmp_path / "disk.json"
    first = under_stash(["train.py"], tmp_path, "--keep", "unlimited", "--json", str(plain))
    options = (
        "--disk",
        ".",
        "--keep",
        "0",
        "--report",
        str(page),
        "--compare",
        str(plain),
        "--json",
        str(figures),
    )
    second = under_stash(["train.py"], tmp_path, *options)
    assert first.stdout == second.stdout
    report, found = embedded(page), json.loads(figures.read_text())
    facts = {fact["label"]: fact["value"] for fact in report["facts"]}
    theirs = json.loads(plain.read_text())
    assert report["title"] == "train.py"
    assert facts["Peak memory"] == found["resident"]["over_start_bytes"]
    assert facts["Peak without a stash"] == theirs["resident"]["over_start_bytes"]
    ratio = found["steps"]["median_seconds"] / theirs["steps"]["median_seconds"]
    assert facts["Slowdown"] == pytest.approx(ratio)
    assert facts["Waited"] == found["stats"]["stall_seconds"]
    # Not one within the other: a write that has begun holds its memory after its graph has died.
    assert facts["Saved at once, at most"] > 0 and facts["In memory, at most"] > 0
    assert found["steps"]["count"] == theirs["steps"]["count"] == 7
    assert [mark["label"] for mark in report["curve"]["marks"]] == ["1", "2", "3", "4", "5"]
    assert any("first 5 of 7 steps" in note for note in report["notes"])
    assert {"0.1", "1.1", "2.1"} <= {row[0] for row in report["modules"]["rows"]}
    assert report["advice"][-1]["code"] == f"Stash(disk={str(tmp_path)!r})"
    parts = {part["name"]: part["bytes"] for part in report["split"]["parts"]}
    assert parts["went down"] == found["stats"]["written_bytes"]
    assert re.match(r"backstash: .* over the start where \S+plain.json has ", second.stderr)
    assert "\x1b" not in second.stderr, "a live line, where there is no terminal"
    drawn = report.get("graph_text", "")
    if shutil.which("dot"):
        kind, _, picture = report["graph"].partition(",")
        assert kind == "data:image/svg+xml;base64"
        drawn = base64.b64decode(picture).decode()
    assert "Linear" in drawn and "Tanh" in drawn, "the model was found, and its names"


@takes_long
def test_the_first_backward_is_drawn_and_what_stood_in_is_gone(tmp_path: Path) -> None:
    last = "assert torch.autograd.backward.__module__ == 'torch.autograd', torch.autograd.backward"
    write(tmp_path / "train.py", f"{TRAIN}{last}\nraise SystemExit(7)")
    page = tmp_path / "out.html"
    done = under_stash(["train.py"], tmp_path, "--disk", ".", "--report", str(page))
    assert done.returncode == 7, done.stderr
    report = embedded(page)
    shown = "graph" if shutil.which("dot") else "graph_text"
    assert shown in report and not any("no graph" in note for note in report["notes"])
    write(tmp_path / "train.py", TRAIN.replace("loss.backward()", "pass").replace("x.grad", "x"))
    under_stash(["train.py"], tmp_path, "--disk", ".", "--report", str(page))
    report = embedded(page)
    assert "graph" not in report
    assert "no graph: torch.autograd.backward was not called" in report["notes"]


def test_without_graphviz_the_page_has_the_graph_as_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    watching = FirstBackward()
    torch.ones(3, requires_grad=True).exp().sum().backward()
    assert list(watching.section) == ["graph_text"] and "Exp" in watching.section["graph_text"]
    assert watching.note.startswith("the graph as text: no command dot")


def test_what_a_report_cannot_know_it_says(tmp_path: Path) -> None:
    write(tmp_path / "train.py", TRAIN + "raise SystemExit(3)")
    page = tmp_path / "out.html"
    done = under_stash(["train.py", "a b"], tmp_path, "--disk", ".", "--report", str(page))
    assert done.returncode == 3
    report = embedded(page)
    unknown = {fact["label"]: fact["how"] for fact in report["facts"] if fact["value"] is None}
    assert unknown.keys() == {"Peak without a stash", "Slowdown"}
    how = unknown["Slowdown"].split("\n")
    assert how[0] == "backstash run --keep unlimited --json plain.json train.py 'a b'"
    assert how[1].startswith("backstash run --compare plain.json --disk .")
    assert report["notes"][0] == "The script did not finish: exit 3."
    assert any("Where a step ends is not known" in note for note in report["notes"])


@takes_long
def test_a_report_of_nothing_and_one_that_cannot_be_written(tmp_path: Path) -> None:
    write(tmp_path / "script.py", "import torch, os; os.rename('there', 'elsewhere')")
    (tmp_path / "there").mkdir()
    options = ("--disk", ".", "--report", "there/out.html")
    done = under_stash(["script.py"], tmp_path, *options)
    assert done.returncode == 0
    assert "backstash run: --report: [Errno 2]" in done.stderr
    (tmp_path / "there").mkdir()
    write(tmp_path / "script.py", "import torch")
    under_stash(["script.py"], tmp_path, *options)
    report = embedded(tmp_path / "there/out.html")
    assert "curve" not in report and "modules" not in report
    assert any("Nothing was recorded" in note for note in report["notes"])


def test_script_without_torch_says_so(tmp_path: Path) -> None:
    write(tmp_path / "script.py", "print(1)")
    stashed = under_stash(["script.py"], tmp_path, "--disk", str(tmp_path))
    assert stashed.stdout == "1\n"
    assert stashed.stderr == "backstash: the script did not import torch, nothing was held\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--disk", ".", "--keep", "2", "s.py"], "2 is 2 bytes; with a unit: `2GiB`"),
        (["--disk", ".", "--min-bytes", "-1", "s.py"], "--min-bytes"),
        (["--disk", ".", "--inflight", "x", "s.py"], "--inflight"),
        (
            ["--disk", ".", "--kep", "2GiB", "s.py"],
            "unknown argument '--kep'; did you mean --keep? options: --help, --budget",
        ),
        (
            ["--disk", ".", "missing.py"],
            "no script 'missing.py'; allowed: a Python file, or -m MODULE",
        ),
        (
            ["--disk", "missing", "s.py"],
            "'missing' is not a directory; allowed: an existing, writable",
        ),
        (["--disk", "."], "no script given"),
        (["--disk"], "--disk: expected one argument; `backstash run --help` has examples"),
        (["--keep", "1GiB", "s.py"], "give --disk DIR"),
        (["--budget", "1GiB", "--keep", "1GiB", "s.py"], "--budget and --keep exclude one another"),
        (["--budget", "half", "s.py"], "budget"),
        (["--plan", "missing.json", "s.py"], "no such file"),
        (["--disk", ".", "--save-plan", "p.json", "s.py"], "--save-plan needs a budget"),
        (["--keep", "1GiB", "--max-bytes", "1GiB", "s.py"], "give --disk DIR as well"),
        (["--disk", ".", "--malloc", "fast", "s.py"], "tcmalloc"),
        (["--disk", ".", "--json", "missing/x.json", "s.py"], "a file in an existing directory"),
        (["--disk", ".", "--report", "missing/x.html", "s.py"], "a file in an existing directory"),
        (["--disk", ".", "--compare", "missing.json", "s.py"], "that `backstash run --json` wrote"),
        (["--disk", ".", "--compare", "s.py", "s.py"], "is not the figures of a run"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_is_allowed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    write(tmp_path / "s.py", "print('ran')")
    monkeypatch.chdir(tmp_path)
    assert main(["run", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith("backstash run: ")
    assert words in output.err


def test_a_module_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = under_stash(["-m", "no.such.module"], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "backstash: 'no.such.module': there is no such module; allowed: what `python -m` takes\n"
    )


def test_without_options_what_fits_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "train.py", STEPS)
    figures = tmp_path / "run.json"
    done = under_stash(["train.py"], tmp_path, "--json", str(figures))
    assert done.stdout == start(["train.py"], tmp_path).stdout
    written = json.loads(figures.read_text())
    plan = written["plan"]
    assert written["stats"]["written_bytes"] == 0
    assert plan["state"] == "left alone"
    assert plan["budget_bytes"] > 0


def test_a_budget_is_planned_for_and_its_plan_used_again(tmp_path: Path) -> None:
    write(tmp_path / "train.py", STEPS.replace("range(7)", "range(12)"))
    figures, plan = tmp_path / "run.json", tmp_path / "plan.json"
    options = ("--disk", ".", "--budget", "20GiB", "--json", str(figures), "--save-plan", str(plan))
    done = under_stash(["train.py"], tmp_path, *options)
    assert done.returncode == 0, done.stderr
    assert json.loads(plan.read_text())["budget_bytes"] == 20 << 30
    assert {"predicted", "measured", "bound", "classes"} <= json.loads(figures.read_text())[
        "plan"
    ].keys()
    again = under_stash(["train.py"], tmp_path, "--disk", ".", "--plan", str(plan))
    assert again.returncode == 0, again.stderr
    assert again.stdout == done.stdout


GATED = """
import torch
from torch import nn
torch.manual_seed(0)
def block():
    return nn.Sequential(nn.Linear(300, 300), nn.GELU(), nn.Dropout(0.5))
model = nn.Sequential(*(block() for _ in range(3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(7):
    optimizer.zero_grad()
    loss = model(torch.randn(300, 300)).square().mean()
    loss.backward()
    optimizer.step()
print(loss.item())
"""


@takes_long
def test_the_page_has_the_plan_and_what_was_recomputed_and_packed(tmp_path: Path) -> None:
    write(tmp_path / "train.py", GATED)
    figures, plan, page = (tmp_path / name for name in ("run.json", "plan.json", "out.html"))
    each = 300 * 300 * 4
    choices = {  # the input and the masks; what GELU saves; what a Linear, and the last square, saves
        "*.* no operation #0 352 KiB": (("disk", 1), ("pack", 3)),
        "*.* AddmmBackward0 #0 352 KiB": (("disk", 3),),
        "*.* MulBackward0 #0 352 KiB": (("recompute", 2),),
        "MulBackward0 #0 352 KiB": (("recompute", 1),),
    }
    classes = []
    for name, runs in choices.items():
        count = sum(blocks for _, blocks in runs)
        classes.append(PlannedClass(name, count, count * each, runs, 0.0, "by hand"))
    Plan(1 << 20, "planned", tuple(classes), plain=StepFigures(1 << 20, 1.0)).save(plan)
    options = ("--disk", ".", "--report", str(page), "--json", str(figures), "--plan", str(plan))
    done = under_stash(["train.py"], tmp_path, *options, "--verbose")
    assert done.returncode == 0, done.stderr
    assert done.stdout == start(["train.py"], tmp_path).stdout
    report, stats = embedded(page), json.loads(figures.read_text())["stats"]
    freed = stats["packed_bytes"] - stats["payload_bytes"]
    # Of a class, what is saved first goes to the disk where its input has left before it was compared.
    assert stats["recomputed_bytes"] > 0 and stats["packed_bytes"] == 7 * 3 * each
    parts = {part["key"]: part["bytes"] for part in report["split"]["parts"]}
    assert (parts["recomputed"], parts["packed"]) == (stats["recomputed_bytes"], freed)
    whole = sum(part["bytes"] for part in report["split"]["parts"] if part["key"] != "left")
    assert whole == stats["eligible_bytes"]
    planned = {part["key"]: part["bytes"] for part in report["plan"]["parts"]}
    assert planned == {"disk": 4 * each, "recomputed": 3 * each, "packed": 3 * each}
    assert report["plan"]["classes"]["rows"][0][3] == "1 on disk, 3 packed"
    assert {"packed", "recomputed"} <= {tier["key"] for tier in report["curve"]["tiers"]}
    assert "Recomputed or unpacked in backward" in [fact["label"] for fact in report["facts"]]
    assert report["advice"][-1]["code"].startswith("Stash(plan=")
    assert "backstash: recomputed_bytes " in done.stderr
    assert "backstash: packed_bytes " in done.stderr
    assert "budget=1.00 MiB was exceeded" in done.stderr
