"""The benchmarks run, small; the tables of README and the docs are what the committed results give."""

import importlib.util
import io
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from backstash.cli import main
from bench._command import _command
from bench._progress import progress
from bench._step_table import step_rows
from bench._step_worker import measure
from bench._table import table
from bench._variants import DEFAULT, VARIANTS
from bench._ways import WAYS, recipe
from bench._workloads import WORKLOADS
from long_tests import takes_long

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "benchmarks/results").glob("*.json"))
RESULTS = [path for path in FILES if "sections" in json.loads(path.read_text())]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


update_readme = load(ROOT / "benchmarks/update_readme.py")
gallery = load(ROOT / "benchmarks/gallery.py")


def bench(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """The results of a tiny benchmark."""
    out = tmp_path / "out.json"
    options = ["--tiny", "--repeats", "1", "--steps", "1", "--disk", str(tmp_path)]
    assert main(["bench", *arguments, *options, "--out", str(out)]) == 0
    assert sorted(tmp_path.iterdir()) == [out], "something was left in the directory"
    results: dict[str, Any] = json.loads(out.read_text())
    return results


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@takes_long
def test_a_stash_and_backstash_run_have_plain_s_gradients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = bench(tmp_path, "gpt", "--only", "plain,stash,run")
    (section,) = results["sections"]
    rows = {row.title: row for row in step_rows(section)}
    assert len(rows) == 3
    assert all(row.exact for row in rows.values())
    for key in ("stash", "run"):
        on_disk = rows[VARIANTS[key].title].on_disk
        assert on_disk is not None and on_disk > 0.5
    assert table(results) in capsys.readouterr().out


@takes_long
def test_small_benchmarks_run(tmp_path: Path) -> None:
    overhead, alive = bench(tmp_path, "overhead", "alive")["sections"]
    assert not any("failed" in run for run in overhead["runs"] + alive["runs"])
    assert {run["mode"] for run in alive["runs"]} == {"small", "keep", "disk"}


@takes_long
def test_plans_are_timed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["planning.py", "--tiny", "--models", "gpt,ode"]
    monkeypatch.setattr(sys, "argv", arguments)
    load(ROOT / "benchmarks/planning.py").main()
    head, _, *rows = capsys.readouterr().out.strip().split("\n")
    assert "seconds, median" in head and [row.split()[1] for row in rows] == ["gpt", "ode"]
    assert all(int(row.split("|")[2]) > 10 for row in rows), "blocks"


@takes_long
def test_stepping_in_backward_has_the_same_weights_and_a_lower_peak(tmp_path: Path) -> None:
    results = bench(tmp_path, "gradients")
    runs = {run["way"]: run for run in results["sections"][0]["runs"]}
    after, inside = runs["optimizer after backward"], runs["step_in_backward"]
    assert after["weights"] == inside["weights"]
    committed = json.loads((ROOT / "benchmarks/results/small.json").read_text())
    (kept,) = [each for each in committed["sections"] if each["kind"] == "gradients"]
    peaks: dict[str, list[int]] = {}
    for run in kept["runs"]:
        peaks.setdefault(run["way"], []).append(run["over_start_bytes"])
    # glibc keeps more of what was freed in one process than in another.
    inside_bytes, after_bytes = (
        statistics.median(peaks[way]) for way in ("step_in_backward", "optimizer after backward")
    )
    assert inside_bytes < after_bytes / 3
    assert "| step_in_backward |" in table(results)
    inside["weights"] = "other"
    assert "| differ |" in table(results)


def test_an_accelerator_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "xpu"]) == 2
    assert "--device xpu: PyTorch finds" in capsys.readouterr().err
    assert main(["bench", "gpt", "--device", "cpu", "--tiny"]) == 2
    assert "leave out 'gpt'" in capsys.readouterr().err


@takes_long
def test_limit_runs_or_says_why_not(tmp_path: Path) -> None:
    (section,) = bench(tmp_path, "limit")["sections"]
    if section["skipped"]:
        pytest.skip(section["skipped"])
    ends = {(run["variant"], run["inside"]): run for run in section["runs"]}
    assert ends["plain", True]["status"] == -9, "killed for its memory"
    assert ends["run", True]["status"] == 0
    assert ends["run", True]["losses"] == ends["plain", False]["losses"]


@takes_long
def test_limits_run_or_say_why_not(tmp_path: Path) -> None:
    results = bench(tmp_path, "limits")
    (section,) = results["sections"]
    if section["skipped"]:
        pytest.skip(section["skipped"])
    outside, inside = section["runs"]
    assert (inside["inside"], inside["status"]) == (True, 0)
    assert inside["losses"] == outside["losses"]
    assert 0 < inside["group_peak_bytes"] <= inside["limit_bytes"]
    assert "a step saves" in table(results)


@pytest.mark.parametrize("workload", ["gpt-tiny", "resnet-tiny"])
def test_every_way_has_the_same_gradients(tmp_path: Path, workload: str) -> None:
    task = {
        "workload": workload,
        "steps": 1,
        "warmup": 1,
        "directory": str(tmp_path),
        "min_bytes": 4096,
    }
    figures = {way: measure(task | {"way": way}) for way in WAYS}
    expected = figures["nothing"]
    for way, found in figures.items():
        assert found["gradients"] == expected["gradients"], way
        assert found["losses"] == expected["losses"], way
    assert figures["stash"]["stats"]["written_bytes"] > 0
    assert list(tmp_path.iterdir()) == []


def test_the_recipe_s_files_live_as_long_as_the_graph(tmp_path: Path) -> None:
    x = torch.randn(2000, requires_grad=True)
    with recipe(str(tmp_path)):
        y = x.sin().exp()
    assert len(list(tmp_path.iterdir())) == 2
    y.sum().backward()
    expected = x.detach().clone().requires_grad_()
    expected.sin().exp().sum().backward()
    assert torch.equal(x.grad, expected.grad)  # type: ignore[arg-type]
    del y
    assert list(tmp_path.iterdir()) == []


def test_default_variants_have_ways_and_workloads() -> None:
    assert set(DEFAULT) <= set(VARIANTS)
    assert {variant.way for variant in VARIANTS.values()} <= set(WAYS)
    assert {"gpt", "resnet", "gpt-tiny", "resnet-tiny"} <= set(WORKLOADS)


def step_section(**changed: Any) -> dict[str, Any]:
    run = {
        "repeat": 0,
        "step_seconds": [2.0, 4.0, 3.0],
        "losses": ["0x1p0"],
        "gradients": "ab",
        "resident_start_bytes": 100,
        "resident_peak_bytes": 300,
        "allocator": "none",
        "stats": None,
    }
    runs = [
        run | {"variant": "plain"},
        run | {"variant": "plain-tcmalloc", "allocator": "tcmalloc", "step_seconds": [2.5]},
        run | {"variant": "run", "allocator": "tcmalloc", "step_seconds": [3.3]} | changed,
    ]
    return {
        "kind": "step",
        "description": "a model",
        "steps": 3,
        "repeats": 1,
        "runs": runs,
        "skipped": {},
    }


def test_ratios_are_to_plain_and_to_plain_under_the_same_allocator() -> None:
    stats = {"written_bytes": 30, "eligible_bytes": 40}
    row = step_rows(step_section(resident_peak_bytes=150, stats=stats))[-1]
    assert row.ratio.median == pytest.approx(1.1)
    assert row.same_allocator is not None
    assert row.same_allocator.median == pytest.approx(1.32)
    assert (row.peak_bytes, row.peak_share, row.on_disk, row.exact) == (50, 0.25, 0.75, True)


@pytest.mark.parametrize("changed", [{"gradients": "cd"}, {"losses": ["0x1p1"]}])
def test_a_run_that_differs_is_reported(changed: dict[str, Any]) -> None:
    assert not step_rows(step_section(**changed))[-1].exact


def test_the_table_names_what_failed_and_what_was_skipped() -> None:
    section = step_section(failed="status 1: no room")
    section["skipped"] = {"run-jemalloc": "not installed"}
    limit = {"kind": "limit", "skipped": "no control groups", "runs": []}
    about: dict[str, Any] = {
        "machine": {"processor": "p", "cores": 2, "memory_bytes": 1, "kernel": "k", "libc": "l"},
        "versions": {"torch": "t"},
        "file_system": "ext4",
        "date": "2000-01-01",
        "disk": {"write_bytes_per_second": 3e9, "read_bytes_per_second": 4e9},
        "command": "backstash bench",
    }
    text = table(about | {"sections": [section, limit]})
    assert "`run` failed: status 1: no room" in text
    assert "`run-jemalloc` skipped: not installed" in text
    assert "skipped, no control groups" in text


def test_without_plain_there_is_nothing_to_compare_with() -> None:
    section = step_section()
    section["runs"] = section["runs"][1:]
    with pytest.raises(LookupError, match="no run of 'plain'"):
        step_rows(section)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "unknown benchmark 'nothing'; allowed: gpt, llama"),
        (["--only", "plain,fast"], "'fast'; allowed: plain, "),
        (["--repeats", "0"], "a whole number of at least 1"),
        (["--table", "missing.json"], "a file that --out wrote"),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error


def test_the_command_that_is_kept_names_no_directory() -> None:
    given = ["gpt", "--disk", "/home/me", "--out=/home/me/x.json", "--repeats", "5"]
    assert _command(given) == "backstash bench gpt --disk DIR --out x.json --repeats 5"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_committed_results_are_real_and_can_be_drawn(path: Path) -> None:
    results = json.loads(path.read_text())
    assert not any(section["tiny"] for section in results["sections"])
    assert table(results).startswith(results["sections"][0].get("description", ""))


@pytest.mark.parametrize("page", update_readme.PAGES)
def test_pages_have_the_tables_that_the_results_give(page: str) -> None:
    text = (ROOT / page).read_text()
    assert "-->\n| " not in text and "end of table" in text
    assert update_readme.updated(text) == text, "run python benchmarks/update_readme.py"


def test_a_table_is_drawn_between_its_markers(tmp_path: Path) -> None:
    results = {
        "sections": [{"kind": "limit", "skipped": "why", "runs": []}],
        "machine": {"processor": "p", "cores": 2, "memory_bytes": 1, "kernel": "k", "libc": "l"},
        "versions": {"torch": "t"},
        "file_system": "ext4",
        "date": "2000-01-01",
        "disk": {"write_bytes_per_second": 3e9, "read_bytes_per_second": 4e9},
        "command": "backstash bench limit",
    }
    (tmp_path / "r.json").write_text(json.dumps(results))
    text = "a\n<!-- table: r.json -->\nold\n<!-- end of table -->\nb\n"
    drawn = update_readme.updated(text, tmp_path)
    assert "old" not in drawn
    assert drawn.startswith(
        "a\n<!-- table: r.json -->\nWork larger than its memory: skipped, why\n"
    )
    assert drawn.endswith("<!-- end of table -->\nb\n")
    assert update_readme.updated(drawn, tmp_path) == drawn


def test_startup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    arguments = ["startup.py", "--repeats", "1", "--only", "without torch", "--out", str(out)]
    monkeypatch.setattr("sys.argv", arguments)
    assert load(ROOT / "benchmarks/startup.py").main() == 0
    found = json.loads(out.read_text())
    runs = ["python, without torch", "backstash run, without torch"]
    others = ["--quiet", "--disk DIR"]
    assert list(found) == [*runs, *(f"backstash run {each}, without torch" for each in others)]
    for (figures,) in found.values():
        assert 0 < figures["clock to the first line"] < figures["clock"]
    assert all(name in capsys.readouterr().out for name in runs[:1])


def test_verification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    arguments = ["verification.py", "--disk", str(tmp_path), "--workloads", "gpt-tiny"]
    monkeypatch.setattr("sys.argv", [*arguments, "--pairs", "1", "--out", str(out)])
    assert load(ROOT / "benchmarks/verification.py").main() == 0
    pairs = json.loads(out.read_text())["gpt-tiny"]
    assert len(pairs) == 2
    for pair in pairs:  # the moves are the same: only what is asked of them is not
        assert pair["verified"]["written_bytes"] == pair["unverified"]["written_bytes"] > 0
    assert "the 1 after it" in capsys.readouterr().out


@takes_long
def test_the_bytes_of_packing_and_recomputing_are_counted_and_the_gradients_equal():
    command = [sys.executable, "benchmarks/bytes_left.py", "--tiny", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    shares = [float(line.split("|")[-2].strip(" %")) for line in done.stdout.split("\n")[2:14]]
    packed, recomputed, both = shares[::3], shares[1::3], shares[2::3]
    assert packed[0] < 95 and packed[1] <= 100 and packed[2] < 90 and packed[3] < 90
    assert all(each < 80 for each in recomputed)
    assert all(map(float.__ge__, recomputed, both))


@takes_long
def test_replays_are_timed_next_to_checkpoints_and_the_gradients_equal():
    command = [sys.executable, "benchmarks/replay.py", "--tiny"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert [line.split("|")[1].strip() for line in run.stdout.splitlines() if "|" in line][2:] == [
        "GPT, dropout",
        "GPT",
        "Llama",
        "ResNet",
        "U-Net",
        "LSTM cell",
    ]


@takes_long
def test_what_is_made_ahead_of_need_is_timed_and_the_gradients_equal():
    command = [sys.executable, "benchmarks/made_ahead.py", "--tiny", "--pairs", "1", "unet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = [line.split("|")[1:-1] for line in done.stdout.split("\n")[2:4]]
    assert [row[1].strip() for row in rows] == ["recompute", "pack"]


@takes_long
def test_steps_of_changing_shapes_have_the_same_gradients_under_each_allocator(
    tmp_path: Path,
) -> None:
    out = tmp_path / "shapes.json"
    command = [sys.executable, "benchmarks/changing_shapes.py", "--disk", str(tmp_path)]
    command += ["--steps", "10", "--malloc", "none,glibc", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert set(rows) == {"none", "glibc"}
    assert rows["none"]["gradient"] == rows["glibc"]["gradient"]
    assert all(row["peak_bytes"] >= row["end_bytes"] > 0 for row in rows.values())


@takes_long
def test_ranks_that_share_a_disk_are_measured_at_the_same_time(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/shared_disk.py", "--disk", str(tmp_path)]
    command += ["--ranks", "1", "2", "--seconds", "0.1", "--mib", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")][2:]
    assert [row[0].strip("| ") for row in rows] == ["1", "2"]
    assert rows[0][1] == rows[0][2] == rows[0][3] and "0 B" not in done.stdout
    assert list(tmp_path.iterdir()) == []


@takes_long
def test_what_fits_is_timed_next_to_plain_steps():
    command = [sys.executable, "benchmarks/left_alone.py", "--tiny", "--pairs", "1", "gpt"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (row,) = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| gpt")]
    assert int(row[1]) > 10 and float(row[2]) > 0 and float(row[3]) > 0


@takes_long
def test_ways_take_turns_and_their_gradients_are_plain_ones(tmp_path: Path) -> None:
    out = tmp_path / "turns.json"
    command = [sys.executable, "benchmarks/interleaved.py", "--tiny", "--models", "resnet152"]
    command += ["--rounds", "1", "--ways", "selective|checkpoint 2|recompute 4|on the host|TRL"]
    command += ["--disk", str(tmp_path), "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["models"]["resnet152"]
    assert [*found] == [
        "plain",
        "checkpoint 2 of 4",
        "selective checkpoint",
        "checkpoint on the host",
        "TRL OffloadActivations",
        "recompute 4 of 4",
        "budget, checkpoint 2 of 4",
        "budget, checkpoint on the host",
        "budget that fits",
    ]
    assert found.pop("TRL OffloadActivations") == {"failed": "TRL needs an accelerator"}
    for name, each in found.items():
        assert each["equal"] and len(each["seconds"]) == len(each["host_seconds"]) == 2, name
        assert "busy_seconds" in each["profile"], name


@takes_long
def test_cells_of_budgets_are_predicted_and_measured(tmp_path: Path) -> None:
    out = tmp_path / "cells.json"
    command = [sys.executable, "benchmarks/budget_cells.py", "--tiny", "--models", "gpt"]
    command += ["--disk", str(tmp_path), "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    plain, within = found["models"]["gpt"]["cells"]
    assert within["losses"] == plain["losses"]
    assert found["summary"]["cells"] == 2 and found["summary"]["budgets"] == 1
    assert found["summary"]["failed"] == found["summary"]["losses unlike plain's"] == 0
    is_over = within["highest_bytes"] > int(within["way"].partition("=")[2])
    is_said = within["plan"]["state"] == "too small"
    assert found["summary"]["budgets exceeded that were not"] == (is_over and not is_said)


GALLERY_TEXT = """\
peak in MiB and step in ms: plain, --disk, budgets of 110% and 90% of plain's peak
one                     1000   100    500   200    900   150    800   160  as promised
two                     2000    10    500    20    900    15    800     -  disk: other bits; 110%: peak 1.05
three                    300     1    100     2    200     3    150     4  plain does not repeat itself
1 of 3 as promised

One of them again at abcdef1 (so that the
times say nothing).
one                     1001   110    510   210    910   160    810   170  as promised (nothing moved: 110%)

And one at abcdef2:
two                     2001    11    501    21    901    16    801     -  as promised
"""


def test_a_program_s_last_row_is_in_the_gallery_s_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gallery, "PROGRAMS", {"two": {}, "one": {}, "three": {}})
    rows = gallery.table(GALLERY_TEXT).splitlines()[2:]
    assert rows == [
        "| `two` | 2001 | 501 | 901 | 801 | 11 | 21 | 16 | - | yes | abcdef2 |",
        "| `one` | 1001 | 510 | 910 | 810 | - | - | - | - | yes | abcdef1 |",
        "| `three` | 300 | 100 | 200 | 150 | 1 | 2 | 3 | 4 | plain PyTorch differs from itself | first table |",
    ]
    assert [row.equal for row in gallery.rows(GALLERY_TEXT)][:2] == ["yes", "no"]


def test_the_gallery_s_page_shows_the_committed_results() -> None:
    text = gallery.RESULTS.read_text(encoding="utf-8")
    assert gallery.table(text) in (ROOT / "docs/gallery.md").read_text(encoding="utf-8")
    plain = {row.name: int(row.peaks[0]) for row in gallery.rows(text) if row.part == "first table"}
    assert len(plain) == 25
    programs = ROOT / "scripts/gallery"
    others = [
        name
        for name in sorted(plain, key=plain.__getitem__, reverse=True)
        if not re.match('"""(Torch alone|PyTorch)', (programs / f"{name}.py").read_text())
    ]
    assert list(gallery.PROGRAMS) == others[:10]


def test_a_program_without_its_packages_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(gallery.PROGRAMS, "smp_unet", {"no-such-package": "no_such_package"})
    assert gallery.main(["smp_unet"]) == 0
    assert "skipped: pip install no-such-package" in capsys.readouterr().out


@takes_long
def test_cells_are_played_on_a_device_without_data() -> None:
    """Twice the same, to the last digit, and what Python calls take is in it."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("there is no C++ compiler")
    command = [sys.executable, "benchmarks/timed_cells.py", "--tiny", "--models", "gpt", "--cell"]
    found = []
    for way in ("plain", "plain", "checkpoint=2", "budget=12000000"):
        done = subprocess.run([*command, way], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert found[0] == found[1] and found[0]["seconds"] > 0
    assert found[2]["calls"] > 100, "of PyTorch's checkpoint"
    assert found[3]["peak_bytes"] > 0 and found[3]["state"] != "measuring"


@takes_long
def test_the_host_s_time_is_measured_where_the_device_takes_none() -> None:
    """Each way of a small GPT; the calls are the package's, so plain PyTorch has none."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("there is no C++ compiler")
    command = [sys.executable, "benchmarks/host_time.py", "--tiny", "--models", "gpt"]
    command += ["--budgets", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("| ")][2:]
    found = {row[0].strip(): [float(each) for each in row[1:]] for row in rows}
    assert list(found) == ["plain", "checkpoint", "recompute", "budget 1 GiB"]
    assert all(seconds > 0 for each in found.values() for seconds in each[:3])
    assert found["plain"][3:] == [0, 0] and min(found["recompute"][3:]) > 10


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_on_a_terminal_and_a_line_each_elsewhere() -> None:
    terminal, log = Terminal(), io.StringIO()
    for stream in (terminal, log):
        with progress(stream) as say:
            say("one")
            say("two")
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().endswith("two\r\x1b[K")
    assert log.getvalue() == "one\ntwo\n"
