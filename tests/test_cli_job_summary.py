"""What is said of the ranks of a job, from what each has left."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from backstash.cli._ending import tell
from backstash.cli._job_summary import job_summary, slowest
from backstash.cli._ranks import DIED, Ranks, join
from backstash.cli._verdict import NO_TORCH
from backstash.launcher import Job, JobDirectory

MIB = 1 << 20
ALLOCATOR = {"kind": "glibc", "library": None, "reason": "tuned"}


def record(
    outcome: str = "finished",
    *,
    peak: int = 500,
    waited: float = 0.0,
    pace: float | None = 0.5,
    notes: tuple[str, ...] = (),
    left: dict[str, Any] | None = None,
    devices: dict[str, int] | None = None,
) -> dict[str, Any]:
    """What a rank leaves that moved 100 MiB; ``peak`` is in MiB."""
    stats = {
        "written_bytes": 100 * MIB,
        "read_bytes": 90 * MIB,
        "host_peak_bytes": 30 * MIB if devices else 0,
        "disk_peak_bytes": 50 * MIB,
        "stall_seconds": waited,
        "notes": [],
        "left": left or {},
    }
    figures = {
        "seconds": 6.5,
        "outcome": outcome,
        "stats": stats,
        "steps": {"count": 12, "median_seconds": pace},
        "resident": {"peak_bytes": peak * MIB},
        "devices": devices or {},
        "allocator": ALLOCATOR,
        "notes": list(notes),
    }
    return {"figures": figures, "outcome": outcome}


def lines(
    records: dict[int, dict[str, Any]], processes: int | None = None, *, verbose: bool = False
) -> list[str]:
    job = Job(0, 0, len(records) if processes is None else processes, len(records))
    text = job_summary(job, records, verbose=verbose).splitlines()
    assert all(line.startswith("backstash: ") for line in text)
    return [line.removeprefix("backstash: ") for line in text]


def test_the_ranks_side_by_side() -> None:
    assert lines({0: record(), 1: record(peak=700, waited=1.25, pace=0.625)}) == [
        "ranks 0-1 of 2: the largest peak is rank 1's, 700 MiB; all peaks add up to 1.17 GiB",
        "the slowest is rank 1: 0.625 s a step, 0.5 s on the fastest; it waited 1.25 s for tensors to move",
        "rank  peak       moved  came back  waited  steps   a step  ended",
        "   0  500 MiB  100 MiB     90 MiB     0 s     12    0.5 s  finished",
        "   1  700 MiB  100 MiB     90 MiB  1.25 s     12  0.625 s  finished",
    ]


def test_ranks_that_wait_for_one_another_are_told_apart_by_what_they_waited_for() -> None:
    records = {0: record(pace=0.5, waited=0.5), 1: record(pace=0.505), 2: record(pace=0.5)}
    assert (
        lines(records)[1]
        == "steps take 0.505 s on all; rank 0 waited longest for tensors to move, 0.50 s"
    )
    assert lines({0: record(), 1: record()})[1].endswith("no rank waited for tensors to move")
    unseen = {0: record(pace=None), 1: record(pace=None, waited=2.0)}
    assert lines(unseen)[1] == "rank 1 waited longest for tensors to move, 2.00 s"
    assert slowest({rank: each["figures"] for rank, each in unseen.items()}) == 1


def test_a_peak_is_of_the_accelerator_where_tensors_of_one_were_moved() -> None:
    found = lines({0: record(), 1: record(devices={"cuda:1": 900 * MIB})})
    assert (
        "the largest peak is rank 1's, 900 MiB on cuda:1; all peaks add up to 1.37 GiB" in found[0]
    )
    assert "  900 MiB on cuda:1  " in found[4]


def test_a_failure_comes_first_and_nothing_after_the_table() -> None:
    records = {
        0: record("RuntimeError", notes=("a note",)),
        1: record(DIED),
        2: {"figures": None, "outcome": DIED},
        3: {"figures": None, "outcome": "exit 2"},
        4: record("SIGTERM"),
    }
    found = lines(records)
    assert found[0] == (
        "ranks 0-4 of 5: rank 0 ended by RuntimeError after 6.5 s; rank 1 died: its process is gone, and its "
        "last figures are of 6.5 s after its start, 12 steps; rank 2 died before it imported torch; rank 3 "
        "ended by exit 2"
    )
    assert [line.split()[0] for line in found[1:]] == ["rank", "0", "1", "2", "3", "4"]
    assert found[4].split() == ["2", "-", "-", "-", "-", "-", "-", "died"]


def test_what_several_ranks_say_is_said_once() -> None:
    small = {"is small": {"nbytes": MIB, "count": 2}}
    records = {
        0: record(notes=("the same",), left=small),
        1: record(notes=("the same", "its own"), left=small),
        2: record(notes=("the same",)),
    }
    assert lines(records, verbose=True)[-4:] == [
        "stayed     1.00 MiB in 2 saves: is small (ranks 0-1)",
        "allocator  glibc: tuned",
        "note: the same",
        "note: its own (rank 1)",
    ]


def test_ranks_of_other_machines_are_not_seen_and_that_is_said() -> None:
    found = lines({4: record(), 5: record()}, processes=8)
    assert found[0].startswith("ranks 4-5 of 8, those that were seen on this machine: the largest")


def test_scripts_without_torch_are_no_failure() -> None:
    nothing = {"figures": None, "outcome": NO_TORCH}
    assert lines({0: nothing, 1: nothing})[0] == "ranks 0-1 of 2: nothing was held"
    assert "largest" in lines({0: nothing, 1: record()})[0]


def options(tmp_path: Path, **given: Any) -> dict[str, Any]:
    return {
        "quiet": False,
        "verbose": False,
        "json": None,
        "report": None,
        "compare": None,
        **given,
    }


def test_the_files_of_a_part_of_a_job_have_its_ranks_in_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = options(tmp_path, quiet=True, json=str(tmp_path / "run.json"))
    tell(plan, Job(4, 0, 8, 2), {4: record(), 5: record(DIED)})
    assert {path.name for path in tmp_path.iterdir()} == {"run.ranks4-5.json", "run.rank5.json"}
    found = json.loads((tmp_path / "run.ranks4-5.json").read_text())
    assert (found["processes"], [each["rank"] for each in found["ranks"]]) == (8, [4, 5])
    assert capsys.readouterr() == ("", "")


def test_a_file_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = options(tmp_path, quiet=True, json=str(tmp_path / "gone/run.json"))
    tell(plan, Job(0, 0, 2, 2), {0: record(), 1: record()})
    assert capsys.readouterr().err.startswith("backstash run: --json: [Errno 2]")


def test_a_directory_that_cannot_be_shared_leaves_each_rank_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backstash.launcher._directory._root", lambda: str(tmp_path / "gone"))
    part = join(Job(0, 0, 2, 2))
    assert part["ranks"] is None
    assert part["alone"].startswith("each process tells of itself alone: [Errno 2]")
    ranks = Ranks(part)
    ranks.note(lambda: pytest.fail("nobody reads it"))
    assert ranks.leave({"outcome": "finished"}) == {0: {"outcome": "finished"}}


def test_figures_are_written_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("backstash.launcher._directory._root", lambda: str(tmp_path))
    ranks = Ranks(join(Job(0, 0, 2, 2)))
    asked: list[float] = []

    def figures() -> dict[str, Any]:
        asked.append(now[0])
        return {"at": now[0]}

    for now[0] in (1000.0, 1000.5, 1000.9, 1001.1, 1001.2):
        ranks.note(figures)
    assert asked == [1000.0, 1001.1]
    directory = JobDirectory.of(Job(0, 0, 2, 2), "run", str(tmp_path))
    assert directory._envelopes()[0]["content"] == {"figures": {"at": 1001.1}, "outcome": DIED}
    monkeypatch.setattr("os.getpid", lambda: 1)  # a process that the script has forked
    now[0] = 2000.0
    ranks.note(figures)
    assert len(asked) == 2


def test_of_no_job_there_is_no_directory() -> None:
    assert join(Job()) == {
        "job": {"rank": 0, "local_rank": 0, "processes": 1, "local_processes": 1},
        "ranks": None,
        "alone": None,
    }


def test_a_rank_that_leaves_while_a_step_is_noted_has_the_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backstash.launcher._directory._root", lambda: str(tmp_path))
    ranks, other = (Ranks(join(Job(rank, rank, 2, 2))) for rank in range(2))
    begun, go_on = threading.Event(), threading.Event()

    def figures() -> dict[str, Any]:
        begun.set()
        go_on.wait(20)
        return {}

    note = threading.Thread(target=ranks.note, args=[figures])
    leave = threading.Thread(target=ranks.leave, args=[{"outcome": "SIGTERM"}])
    note.start()
    assert begun.wait(20)
    leave.start()
    leave.join(0.2)  # where it does not wait, it has ended by now
    go_on.set()
    note.join(20)
    leave.join(20)
    monkeypatch.setattr("time.monotonic", lambda: 1e9)
    ranks.note(lambda: pytest.fail("it has left"))
    assert other.leave({"outcome": "finished"}) == {
        0: {"outcome": "SIGTERM"},
        1: {"outcome": "finished"},
    }
