"""The command line as a whole: help, version, and what happens to a word it does not know."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import backstash
from backstash.cli import _session, main
from backstash.cli._advice import advice, next_step
from backstash.cli._summary import outcome, summary

COMMANDS = ("run", "summary", "profile", "plan", "doctor", "bench")


def test_without_a_command_help_is_printed_and_the_status_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 2
    text = capsys.readouterr().out
    assert "commands:" in text and "examples:" in text


@pytest.mark.parametrize(
    ("line", "next_command"),
    [
        ("rum --budget 6GiB 'my train.py'", "backstash run --budget 6GiB 'my train.py'"),
        ("--verson", "backstash --version"),
        ("--disk . train.py", "backstash run --disk . train.py"),
        ("train.py 3", "backstash run train.py 3"),
        ("nothing", "backstash --help"),
        ("run", "backstash run train.py"),
        ("plan", "backstash plan train.py"),
        ("run -m", "backstash run -m package.train"),
        ("run nothing", "torchrun ... -m backstash run ... SCRIPT"),
        ("run --budget", "backstash run --help"),
        ("run --budget 6 train.py", "6GiB"),
        ("plan --budget 4,6 train.py", "4GiB"),
        ("plan --budget 4GiB,half train.py", "backstash plan --help"),
        ("run --disk new/scratch train.py", "mkdir -p new/scratch"),
        ("run --disk train.py train.py", "backstash run --help"),
        ("doctor new", "mkdir -p new"),
        ("bench nothing", "backstash bench --help"),
    ],
)
def test_a_mistake_is_one_line_with_the_next_command(
    line: str,
    next_command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(shlex.split(line)) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1
    assert f"`{next_command}`" in error


def test_a_misspelt_option_is_answered_with_the_one_that_was_meant(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "--bugdet", "6GiB", "train.py"]) == 2
    assert "unknown argument '--bugdet'; did you mean --budget? " in capsys.readouterr().err
    assert main(["run", "-mtrain"]) == 2
    assert "unknown argument '-mtrain'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "noted"),
    [
        (
            "run train.py --lr 1 --budget 6GiB --x",
            "--budget after train.py goes to the script; options for backstash come before train.py",
        ),
        ("run -m train --disk=.", "--disk after train goes to the script"),
        (
            "run --disk . train.py --budget 6GiB --x --malloc=none",
            "--budget and --malloc after train.py goes to the script",
        ),
        ("run --quiet train.py --budget 6GiB", ""),
        ("run train.py --lr 1", ""),
    ],
)
def test_an_option_after_the_script_is_the_script_s_and_is_noted(
    line: str,
    noted: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    given = []
    monkeypatch.setattr("backstash.cli.run.replace_process", lambda *args: given.append(args[1]))
    main(shlex.split(line))
    ((_, *arguments),) = (script.words for script in given)
    assert arguments == line.partition("train")[2].removeprefix(".py").split()
    error = capsys.readouterr().err
    assert noted in error and bool(error) == bool(noted)


def test_help_about_a_command_is_the_command_s_own_with_examples(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    for command in COMMANDS:
        assert main([command, "--help"]) == 0
        own = capsys.readouterr().out
        assert "examples:" in own and own.count(f"backstash {command}") > 1
        assert f"\n  {command} " in overview
        assert main(["help", command]) == 0
        assert capsys.readouterr().out == own


def test_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--version", "-V"):
        assert main([option]) == 0
        assert capsys.readouterr().out.startswith(f"backstash {backstash.__version__}, torch ")


def test_python_m_backstash_is_the_command() -> None:
    command = [sys.executable, "-m", "backstash", "nonsense"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


WITHOUT_TORCH = """
import json, os, sys
from backstash.cli import main

def started(*_):
    raise SystemExit(0)

os.execve = started
statuses = {}
for line in json.loads(sys.argv[1]):
    statuses[line] = main(line.split())
    assert "torch" not in sys.modules, line
print(json.dumps(statuses), file=open("statuses.json", "w"))
"""


def test_no_torch_is_imported_before_it_is_needed(tmp_path: Path) -> None:
    """Importing it takes longer than all else that these do."""
    lines = dict(
        [
            ("", 2),
            ("--help", 0),
            ("--version", 0),
            ("rum", 2),
            *[(f"{command} --help", 0) for command in COMMANDS],
            *[(f"{command} --no-such-option", 2) for command in COMMANDS],
            ("summary", 2),
            ("summary missing.json", 2),
            ("run --keep 1GiB train.py", 2),
            ("run --host 1GiB train.py", 0),
            ("run --disk . --keep 2Q train.py", 2),
            ("run --disk . missing.py", 2),
            ("run --disk . --malloc fast train.py", 2),
            ("run --disk . train.py 3", 0),
            ("profile missing.py", 2),
            ("profile train.py", 0),
            ("plan --budget half train.py", 2),
            ("plan --disk . train.py", 0),
            ("doctor missing", 2),
            ("doctor --bytes 2Q", 2),
            ("bench gpt --repeats 0", 2),
            ("bench nothing", 2),
            ("bench --device cuda gpt", 2),
            ("bench --table missing.json", 2),
            ("help plan", 0),
        ]
    )
    (tmp_path / "train.py").write_text("print(1)")
    command = [sys.executable, "-c", WITHOUT_TORCH, json.dumps([*lines])]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "statuses.json").read_text()) == lines


def test_outcome_names_how_a_script_ended() -> None:
    ends = [None, SystemExit(), SystemExit(3), SystemExit("no"), KeyboardInterrupt(), OSError()]
    assert [outcome(end) for end in ends] == [
        "finished",
        "exit 0",
        "exit 3",
        "exit 1",
        "SIGINT",
        "OSError",
    ]


def run_of(state: str = "", **changed: Any) -> dict[str, Any]:
    """The figures of a run, as far as advice asks for them."""
    sizes = {"min_bytes": "auto", "inflight": "auto", "prefetch": "auto"}
    settings = {"keep": 0, "host": "auto", "disk": "/scratch", "max_bytes": None, **sizes}
    stats = {"notes": [], "written_bytes": 1, "recomputed_bytes": 0, "packed_bytes": 0}
    stats["stall_seconds"] = 0.0
    plan = {"state": state, "plain": {"peak_bytes": 1}, "smallest_budget_bytes": 0}
    return {
        "stats": stats | {key: changed[key] for key in stats if key in changed},
        "settings": settings | {key: changed[key] for key in settings if key in changed},
        "plan": plan | {key: changed[key] for key in plan if key in changed} if state else None,
        "seconds": 2.0,
        "allocator": {"kind": changed.get("allocator", "tcmalloc")},
        "script": ["train.py"],
    }


def test_summary_is_drawn_from_the_figures() -> None:
    with backstash.Stash() as stash:
        stats = stash.stats().as_json()
    stats |= {"written_bytes": 1 << 20, "eligible_bytes": 2 << 20, "deduplicated_bytes": 3 << 20}
    left = {"small": {"count": 2, "nbytes": 64}, "torch.func": {"count": 3, "nbytes": 0}}
    stats |= {"left": left, "notes": ("no direct I/O",)}
    text = summary(
        {
            "stats": stats,
            "resident": {"peak_bytes": 5 << 20, "start_bytes": 0, "over_start_bytes": 4 << 20},
            "seconds": 1.5,
            "settings": run_of()["settings"],
            "steps": {"count": 3, "median_seconds": 0.25},
            "outcome": "finished",
            "allocator": {"kind": "none", "library": "", "reason": "asked to"},
            "notes": ["a note"],
            "devices": {},
        },
        verbose=True,
    )
    assert "device " not in text and "host_peak_bytes" not in text
    for words in (
        "eligible_bytes         2.00 MiB",
        "deduplicated_bytes     3.00 MiB",
        "written_bytes          1.00 MiB",
        "stayed     64 B in 2 saves: small",
        "stayed     3 saves: torch.func",
        "5.00 MiB of the process at most, 4.00 MiB over the start; 1.5 s, finished",
        "none: asked to",
        "note: a note",
        "note: no direct I/O",
    ):
        assert words in text
    assert all(line.startswith("backstash: ") for line in text.splitlines())


def figures_of(outcome: str = "finished", **stats: Any) -> dict[str, Any]:
    with backstash.Stash() as stash:
        found = stash.stats().as_json()
    if stats.keys() - {"saves", "left"}:
        found["eligible_bytes"] = 1 << 30
    return {
        "stats": found | {"saves": 9} | stats,
        "resident": {"peak_bytes": 600 << 20, "start_bytes": 0, "over_start_bytes": 400 << 20},
        "seconds": 6.0,
        "steps": {"count": 4, "median_seconds": 1.5},
        "outcome": outcome,
        "allocator": {"kind": "none", "library": "", "reason": "asked to"},
        "notes": [],
        "devices": {},
        "settings": run_of()["settings"],
    }


MOVED = {"written_bytes": 900 << 20, "disk_peak_bytes": 200 << 20, "stall_seconds": 0.2}


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        (
            figures_of(**MOVED),
            "peak 600 MiB; 200 MiB at once at most was moved out of memory",
        ),
        (
            figures_of(**MOVED) | {"steps": {"count": 0, "median_seconds": None}},
            "peak 600 MiB; 200 MiB at once at most was moved out of memory",
        ),
        (
            figures_of(**MOVED | {"disk_peak_bytes": 4 << 20}),
            "peak 600 MiB; 4.00 MiB at once at most was moved out of memory",
        ),
        (
            figures_of(recomputed_bytes=99 << 20),
            "peak 600 MiB; saved tensors were recomputed, and none was moved",
        ),
        (
            figures_of(recomputed_bytes=99 << 20, packed_bytes=50 << 20),
            "peak 600 MiB; saved tensors were recomputed and packed, and none was moved",
        ),
        (
            figures_of(notes=("no room",)),
            "peak 600 MiB; nothing was moved: no room",
        ),
        (
            figures_of(notes=("kept in memory: the disk is full",), keep_peak_bytes=50 << 20),
            "peak 600 MiB; nothing was moved: kept in memory: the disk is full",
        ),
        (
            figures_of(keep_peak_bytes=50 << 20),
            "peak 600 MiB; nothing was moved: 50 MiB were saved at once at most, which --keep allows",
        ),
        (
            figures_of(**MOVED | {"host_peak_bytes": 3 << 30, "disk_peak_bytes": 0})
            | {"devices": {"cuda:0": 1 << 30, "cuda:1": 5 << 30}},
            "peak 5.00 GiB on cuda:1; 3.00 GiB at once at most was moved out of memory",
        ),
    ],
)
def test_the_first_line_says_whether_it_was_worth_it(figures: dict[str, Any], said: str) -> None:
    first, *others = summary(figures).splitlines()
    assert first == f"backstash: {said}" and len(others) == 2
    assert len(summary(figures, verbose=True).splitlines()) >= 7


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        (
            figures_of(**MOVED, left={"x": {"count": 1, "nbytes": 40 << 20}}),
            "a step took 1.5 s, 0.05 s of it waiting; 225 MiB moved, 10 MiB stayed in memory a step",
        ),
        (
            figures_of(
                **MOVED,
                stayed_bytes=20 << 20,
                left={
                    "x": {"count": 1, "nbytes": 40 << 20},
                    "not recomputed: y": {"count": 1, "nbytes": 80 << 20},
                },
            ),
            "a step took 1.5 s, 0.05 s of it waiting; 225 MiB moved, 15 MiB stayed in memory a step",
        ),
        (
            figures_of(**MOVED, recomputed_bytes=80 << 20)
            | {"steps": {"count": 0, "median_seconds": None}},
            "6.0 s, 0.2 s of them waiting; 900 MiB moved, 80 MiB recomputed",
        ),
        (
            figures_of(left={"a parameter": {"count": 1, "nbytes": 9 << 20}}),
            "a step took 1.5 s, 0 s of it waiting",
        ),
    ],
)
def test_the_second_line_has_figures_of_a_step(figures: dict[str, Any], said: str) -> None:
    assert summary(figures).splitlines()[1] == f"backstash: {said}"


def test_the_first_line_compares_with_another_run() -> None:
    other = figures_of() | {"file": "plain.json", "steps": {"count": 4, "median_seconds": 1.2}}
    other |= {"resident": {"over_start_bytes": 800 << 20}}
    assert summary(figures_of(**MOVED), other).splitlines()[0] == (
        "backstash: 400 MiB over the start where plain.json has 800 MiB, 50% of its memory over the start; "
        "1.25 of its step"
    )


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        (
            figures_of("ValueError", **MOVED),
            "the script ended by ValueError after 6.0 s; until then 900 MiB were moved out of memory; "
            "peak 600 MiB",
        ),
        (
            figures_of("exit 2"),
            "the script ended by exit 2 after 6.0 s; peak 600 MiB",
        ),
        (
            figures_of(left={"small": {"count": 3, "nbytes": 99}}),
            "peak 600 MiB; nothing was moved: nothing that is saved could move",
        ),
        (
            figures_of(saves=0),
            "nothing was saved for backward in this process (peak 600 MiB): processes that the script starts "
            "are not held; if they do the training, put the launcher in front: torchrun ... -m backstash run "
            "... SCRIPT",
        ),
    ],
)
def test_one_line_where_that_says_it_all(figures: dict[str, Any], said: str) -> None:
    assert summary(figures) == f"backstash: {said}"
    assert len(summary(figures_of("SIGTERM", **MOVED)).splitlines()) == 3
    large = {"a parameter": {"count": 3, "nbytes": 1 << 30}}
    assert len(summary(figures_of(left=large)).splitlines()) == 3


def test_a_failure_is_followed_by_its_notes() -> None:
    """They may say whether to run it again."""
    figures = figures_of("OutOfMemoryError", **MOVED)
    figures["stats"]["notes"] = ["step 3 ran out of device memory: run it again"]
    first, second = summary(figures).splitlines()
    assert first.startswith("backstash: the script ended by OutOfMemoryError")
    assert second == "backstash: note: step 3 ran out of device memory: run it again"


def test_summary_of_an_accelerator_says_what_is_in_host_memory_and_what_the_device_held() -> None:
    with backstash.Stash() as stash:
        stats = stash.stats().as_json()
    figures = {
        "stats": stats
        | {
            "saves": 1,
            "eligible_bytes": 2 << 20,
            "written_bytes": 1 << 20,
            "host_peak_bytes": 256 << 20,
        },
        "resident": {"peak_bytes": 5 << 20, "start_bytes": 0, "over_start_bytes": 4 << 20},
        "seconds": 1.5,
        "steps": {"count": 0, "median_seconds": None},
        "outcome": "finished",
        "allocator": {"kind": "none", "library": "", "reason": "asked to"},
        "notes": [],
        "devices": {"cuda:0": 7 << 20, "cuda:1": 8 << 20},
        "settings": run_of()["settings"],
    }
    text = summary(figures, verbose=True)
    assert "host_peak_bytes        256 MiB" in text and "disk_peak_bytes" not in text
    assert "device     cuda:0: 7.00 MiB at most" in text
    assert "device     cuda:1: 8.00 MiB at most" in text


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        (run_of(written_bytes=0), "Nothing needs to be done"),
        (run_of(written_bytes=0, recomputed_bytes=1), "A budget keeps a limit"),
        (run_of(written_bytes=0, keep=None), "since all of it may stay"),
        (run_of(), "moves as little as that takes: --budget SIZE"),
        (run_of(stall_seconds=1.0), "The script waited 1.0 s for the stash, 50% of its time. A"),
        (run_of(notes=["kept in memory: full"]), "with more space: --disk DIR"),
        (run_of("planned", notes=["kept in memory: full"]), "with more space: --disk DIR"),
        (run_of("measuring"), "Run longer"),
        (
            run_of("too small", smallest_budget_bytes=1),
            "The smallest that can is about 1 B: --budget 1MiB",
        ),
        (run_of("too small"), "other budgets would cost: backstash plan train.py"),
        (run_of("left alone", written_bytes=0), "Everything fits into the budget."),
        (run_of("planned", stall_seconds=1.0), "larger budgets would take: backstash plan"),
        (run_of("planned"), "other budgets would cost: backstash plan train.py"),
        (run_of("loaded", stall_seconds=1.0, plain=None), "To see what other budgets would cost"),
    ],
)
def test_a_run_is_advised_once_about_its_limit(figures: dict[str, Any], words: str) -> None:
    assert words in next_step(figures)
    limits = [each.code for each in advice(figures) if "Stash(" not in each.code]
    assert len(limits) == 1 + ("kept in memory: full" in figures["stats"]["notes"])


@pytest.mark.parametrize(("allocator", "moved"), [("own", 1), ("own", 0), ("tcmalloc", 1)])
def test_other_allocators_are_advised_where_glibc_has_moved(allocator: str, moved: int) -> None:
    found = advice(run_of(allocator=allocator, written_bytes=moved, keep="auto"))
    is_advised = any("--malloc tcmalloc" in each.code for each in found)
    assert is_advised == (allocator == "own" and moved > 0)
    assert found[-1].code == """Stash(keep="auto", disk='/scratch')"""


def test_what_devices_held_is_of_those_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory_stats(index: int) -> dict[str, int]:
        if index == 1:
            raise RuntimeError("the allocator of this device does not count")
        return {"allocated_bytes.all.peak": index} if index < 3 else {}

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "memory_stats", memory_stats)
    assert _session._device_peaks() == {"meta:2": 2}


def test_numpy_that_is_not_installed_is_as_in_plain_python(tmp_path: Path) -> None:
    missing = tmp_path / "numpy"
    missing.mkdir()
    (missing / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\")")
    (tmp_path / "script.py").write_text("import torch\ntorch.ones(2).exp()\n")
    paths = os.pathsep.join([str(tmp_path), str(Path(backstash.__file__).parents[1])])

    def said(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0
        return done.stderr

    assert said("-m", "backstash", "--version") == ""
    assert said("-m", "backstash", "run", "--quiet", "script.py") == said("script.py")


def test_of_several_notes_the_first_line_has_the_one_that_says_why_nothing_moved() -> None:
    first, *_, last = summary(
        figures_of(notes=("a tmpfs", "kept in memory: it is full"))
    ).splitlines()
    assert first.endswith("nothing was moved: kept in memory: it is full")
    assert last == "backstash: note: a tmpfs"
