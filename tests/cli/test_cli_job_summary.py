"""The summary of the ranks of a job, from the files that each has written."""

import json
from pathlib import Path
from typing import Any

import pytest

from backstash.cli import main
from backstash.cli._ending import write_results
from backstash.cli._job_summary import job_summary
from backstash.cli._rank_files import of_this_machine, ran_together
from backstash.launcher import Job

MIB = 1 << 20
SETTINGS = {
    "budget": None,
    "plan": None,
    "keep": 0,
    "host": "auto",
    "disk": "/scratch",
    "max_bytes": None,
    "min_bytes": "auto",
    "inflight": "auto",
    "prefetch": "auto",
}
ALLOCATOR = {"kind": "glibc", "library": None, "reason": "tuned"}


def figures(
    rank: int = 0,
    outcome: str = "finished",
    *,
    processes: int = 2,
    local_rank: int | None = None,
    local_processes: int | None = None,
    peak: int = 500,
    waited: float = 0.0,
    pace: float | None = 0.5,
    ended: float = 1000.0,
    seconds: float = 6.5,
    notes: tuple[str, ...] = (),
    left: dict[str, Any] | None = None,
    devices: dict[str, int] | None = None,
) -> dict[str, Any]:
    """The figures of a rank that moved 100 MiB; ``peak`` is in MiB."""
    job = {
        "rank": rank,
        "local_rank": rank if local_rank is None else local_rank,
        "processes": processes,
        "local_processes": processes if local_processes is None else local_processes,
    }
    moved = ("written", "read", "eligible", "host_peak", "disk_peak", "keep_peak", "inflight_peak")
    stats = {
        **{f"{name}_bytes": 0 for name in (*moved, "ahead_peak", "deduplicated", "recomputed")},
        **{f"{name}_stall_seconds": 0.0 for name in ("pack", "unpack")},
        "packed_bytes": 0,
        "payload_bytes": 0,
        "prefetch_hits": 0,
        "prefetch_misses": 0,
        "saves": 24,
        "written_bytes": 100 * MIB,
        "read_bytes": 90 * MIB,
        "eligible_bytes": 100 * MIB,
        "host_peak_bytes": 30 * MIB if devices else 0,
        "disk_peak_bytes": 50 * MIB,
        "stall_seconds": waited,
        "notes": [],
        "left": left or {},
    }
    return {
        "job": job,
        "command": "backstash run train.py",
        "script": ["train.py"],
        "ended_unix_seconds": ended,
        "seconds": seconds,
        "outcome": outcome,
        "stats": stats,
        "steps": {"count": 12, "median_seconds": pace},
        "resident": {"peak_bytes": peak * MIB, "over_start_bytes": 100 * MIB},
        "devices": devices or {},
        "allocator": ALLOCATOR,
        "notes": list(notes),
        "settings": SETTINGS,
    }


def lines(*found: dict[str, Any], verbose: bool = False) -> list[str]:
    text = job_summary({each["job"]["rank"]: each for each in found}, verbose=verbose).splitlines()
    assert all(line.startswith("backstash: ") for line in text)
    return [line.removeprefix("backstash: ") for line in text]


def test_the_ranks_side_by_side() -> None:
    assert lines(figures(), figures(1, peak=700, waited=1.25, pace=0.625)) == [
        "ranks 0-1 of 2: the largest peak is rank 1's, 700 MiB; all peaks add up to 1.17 GiB",
        "the slowest is rank 1, 0.625 s a step; rank 1 waited longest for tensors to move, 1.25 s",
        "rank  peak       moved  came back  waited  steps   a step  ended",
        "   0  500 MiB  100 MiB     90 MiB     0 s     12    0.5 s  finished",
        "   1  700 MiB  100 MiB     90 MiB  1.25 s     12  0.625 s  finished",
    ]


def test_who_waited_is_named_where_steps_are_not_known() -> None:
    found = lines(figures(waited=0.5), figures(1, pace=0.505))
    assert found[1] == (
        "the slowest is rank 1, 0.505 s a step; rank 0 waited longest for tensors to move, 0.50 s"
    )
    assert lines(figures(), figures(1))[1].endswith("no rank waited for tensors to move")
    found = lines(figures(pace=None), figures(1, pace=None, waited=2.0))
    assert found[1] == "rank 1 waited longest for tensors to move, 2.00 s"
    assert found[3].split()[-2:] == ["-", "finished"]


def test_a_peak_is_of_the_accelerator_where_tensors_of_one_were_moved() -> None:
    found = lines(figures(), figures(1, devices={"cuda:1": 900 * MIB}))
    assert (
        "the largest peak is rank 1's, 900 MiB on cuda:1; all peaks add up to 1.37 GiB" in found[0]
    )
    assert "  900 MiB on cuda:1  " in found[4]


def test_a_failure_comes_first_and_nothing_after_the_table() -> None:
    found = lines(
        figures(0, "RuntimeError", notes=("a note",)), figures(1, "SIGTERM"), figures(3, "exit 2")
    )
    assert found[0] == (
        "ranks 0-1,3 of 2: rank 0 ended by RuntimeError after 6.5 s; rank 3 ended by exit 2 after 6.5 s"
    )
    assert [line.split()[0] for line in found[1:]] == ["rank", "0", "1", "3"]


def test_what_several_ranks_say_is_said_once() -> None:
    small = {"is small": {"nbytes": MIB, "count": 2}}
    found = lines(
        figures(0, notes=("the same",), left=small),
        figures(1, notes=("the same", "its own"), left=small),
        figures(2, notes=("the same",)),
        verbose=True,
    )
    assert found[-4:] == [
        "stayed     1.00 MiB in 2 saves: is small (ranks 0-1)",
        "allocator  glibc: tuned",
        "note: the same",
        "note: its own (rank 1)",
    ]


# The last rank of a machine to end.


def options(json_file: Path | None, **given: Any) -> dict[str, Any]:
    path = None if json_file is None else str(json_file)
    return {"quiet": False, "verbose": False, "compare": None, "json": path, **given}


def end(
    plan: dict[str, Any], capsys: pytest.CaptureFixture[str], found: dict[str, Any]
) -> list[str]:
    """What a rank says when it ends with these figures."""
    write_results(plan, Job(**found["job"]), found)
    return capsys.readouterr().err.splitlines()


def test_the_last_rank_prints_one_summary_and_the_others_a_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = options(tmp_path / "run.json")
    files = f"{tmp_path}/run.rank*.json"
    assert end(plan, capsys, figures(1, processes=3)) == [
        "backstash rank 1: peak 500 MiB; 50 MiB at once at most was moved out of memory"
    ]
    first = end(plan, capsys, figures(0, processes=3))
    assert len(first) == 2 and first[0].startswith("backstash rank 0: peak 500 MiB")
    assert first[1] == f"backstash rank 0: all ranks: `backstash summary {files}`"
    last = end(plan, capsys, figures(2, processes=3, peak=700))
    assert last[0].startswith("backstash: ranks 0-2 of 3: the largest peak is rank 2's")
    assert [line.split()[1] for line in last[3:]] == ["0", "1", "2"]
    assert {path.name for path in tmp_path.iterdir()} == {f"run.rank{at}.json" for at in range(3)}
    assert main(["summary", *map(str, sorted(tmp_path.iterdir()))]) == 0
    assert capsys.readouterr().out.splitlines() == last


def test_without_files_each_rank_prints_its_own_and_the_first_says_how(
    capsys: pytest.CaptureFixture[str],
) -> None:
    second = end(options(None), capsys, figures(1))
    assert len(second) == 3 and all(line.startswith("backstash rank 1: ") for line in second)
    (*own, how) = end(options(None), capsys, figures(0))
    assert len(own) == 3 and "--json FILE" in how and "`backstash summary`" in how
    assert end(options(None, quiet=True), capsys, figures(0)) == []
    alone = end(options(None), capsys, figures(0, processes=1))
    assert len(alone) == 3 and alone[0].startswith("backstash: ")


def test_a_launcher_that_does_not_say_who_is_here_gets_no_common_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = options(tmp_path / "run.json")
    here = {"local_rank": 0, "local_processes": 1}
    for rank in range(2):
        (*own, how) = end(plan, capsys, figures(rank, **here))
        assert len(own) == 3 and f"{tmp_path}/run.rank*.json" in how


def test_files_of_other_runs_and_of_other_machines_are_not_counted(tmp_path: Path) -> None:
    path = str(tmp_path / "run.json")
    job = {"processes": 4, "local_processes": 2}
    own = figures(3, **job, local_rank=1)

    def found(other: dict[str, Any] | None) -> list[int]:
        text = "{" if other is None else json.dumps(other)  # being written
        (tmp_path / "run.rank2.json").write_text(text)
        return list(of_this_machine(path, Job(**own["job"]), own))

    assert found(figures(2, **job, local_rank=0)) == [2, 3]
    (tmp_path / "run.rank1.json").write_text(json.dumps(figures(1, **job)))
    assert found(figures(2, **job, local_rank=0, ended=994.0)) == [2, 3]
    assert found(figures(2, **job, local_rank=0, ended=993.0)) == [3]  # own began at 993.5
    assert found(figures(2, processes=8, local_rank=0)) == [3]
    assert found(None) == [3]
    (tmp_path / "run.rank2.json").unlink()
    assert list(of_this_machine(path, Job(**own["job"]), own)) == [3]


def test_which_processes_ran_together() -> None:
    early, late = figures(ended=1000.0, seconds=10.0), figures(ended=1020.0, seconds=15.0)
    assert not ran_together(early, late) and not ran_together(late, early)
    for longer in (figures(ended=1020.0, seconds=25.0), figures(ended=1003.0, seconds=3.0)):
        assert ran_together(early, longer) and ran_together(longer, early)


def test_a_file_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = end(options(tmp_path / "gone/run.json", quiet=True), capsys, figures())
    assert len(said) == 1 and said[0].startswith("backstash run: --json: [Errno 2]")


# `backstash summary`


def files(directory: Path, *found: dict[str, Any]) -> list[str]:
    """The files of these ranks, the last one first."""
    paths = []
    for at, each in enumerate(found):
        path = directory / f"{at}.json"
        path.write_text(json.dumps(each))
        paths.append(str(path))
    return paths[::-1]


def test_the_command_sorts_the_ranks_and_names_those_without_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = files(tmp_path, figures(1, processes=5), figures(4, processes=5))
    assert main(["summary", *given, given[0]]) == 0
    (first, *_, rank1, rank4, note) = capsys.readouterr().out.splitlines()
    assert first.startswith("backstash: ranks 1,4 of 5: ")
    assert (rank1.split()[1], rank4.split()[1]) == ("1", "4")
    assert note == (
        "backstash: note: no file of ranks 0,2-3 was given; a rank that is killed writes none"
    )


def test_the_command_notes_a_file_that_is_left_from_an_earlier_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["summary", *files(tmp_path, figures(), figures(1, ended=10.0))]) == 0
    note = capsys.readouterr().out.splitlines()[-1]
    assert note == ("backstash: note: rank 1 ended before rank 0 began: an earlier run's?")
    assert main(["summary", *files(tmp_path, figures(), figures(1))]) == 0
    assert "note" not in capsys.readouterr().out


def test_of_one_file_the_command_prints_that_process_s_own_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["summary", *files(tmp_path, figures(1))]) == 0
    short = capsys.readouterr().out.splitlines()
    assert len(short) == 3 and short[0].startswith("backstash rank 1: peak 500 MiB")
    assert main(["summary", "--verbose", *files(tmp_path, figures(processes=1))]) == 0
    long = capsys.readouterr().out.splitlines()
    assert len(long) > 6 and long[0].startswith("backstash: peak 500 MiB")


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        ([], "no file given; for example `backstash summary run.rank*.json`"),
        ([None], "'0.json' cannot be read: No such file or directory; allowed: files that `"),
        (["no JSON"], "'0.json' is not the figures of a run; allowed: files that `backstash run"),
        (["\xff"], "'0.json' is not the figures of a run"),
        (["[1]"], "'0.json' is not the figures of a run"),
        ([{"model": 1}], "'0.json' is not the figures of a run"),
        (
            [figures(), figures()],
            "'0.json' and '1.json' are both of rank 0; allowed: one file for each rank",
        ),
        (
            [figures(1), figures(0, processes=8)],
            "'0.json' is of a job of 2 processes, and '1.json' of one of 8; allowed: files of one",
        ),
    ],
)
def test_files_that_the_command_cannot_use_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    contents: list[Any],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [f"{at}.json" for at in range(len(contents))]
    for name, content in zip(names, contents, strict=True):
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / name).write_text(text, encoding="latin-1")
    assert main(["summary", *names]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"backstash summary: {words}") and err.count("\n") == 1
