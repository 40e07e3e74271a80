"""The directory that the processes of a job on one machine share."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from backstash.launcher import Job, JobDirectory, Process, numbers

ENTER = """
import os, sys
from pathlib import Path
from backstash.launcher import JobDirectory
directory = JobDirectory(Path(sys.argv[1]), rank=int(sys.argv[2]))
directory.enter({"step": 0})
print(os.getpid(), flush=True)
sys.stdin.readline()  # until it is told, or killed
directory.write({"step": 1})
if sys.argv[3:] == ["leaves"]:
    print(directory.leave({"step": 2}), flush=True)
"""


class Other:
    """Another process that has entered ``path``; it goes on when told, or is killed."""

    def __init__(self, path: Path, rank: int, *arguments: str, shell: bool = False) -> None:
        command = [sys.executable, "-c", ENTER, str(path), str(rank), *arguments]
        # With a shell between, the process's parent is one that ends with it.
        command = ["/bin/sh", "-c", '"$@"; exit', "sh", *command] if shell else command
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.own = Process.of(int(self.process.stdout.readline()))

    def go_on(self) -> str:
        return self.process.communicate("\n", timeout=60)[0].strip()

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate(timeout=60)
        while self.own.is_alive():  # under a shell it is not ours to wait for
            time.sleep(0.001)


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def test_the_last_to_leave_has_what_all_have_written(tmp_path: Path) -> None:
    path = tmp_path / "job"
    mine = JobDirectory(path, rank=1)
    mine.enter({})
    other = Other(path, 0, "leaves")
    assert path.stat().st_mode & 0o777 == 0o700
    assert mine.leave({"mine": True}) is None  # the other runs still
    assert other.go_on() == "{0: {'step': 2}, 1: {'mine': True}}"
    assert names(tmp_path) == []


def test_of_a_process_that_was_killed_the_last_words_are_found(tmp_path: Path) -> None:
    mine = JobDirectory(tmp_path / "job", rank=0)
    mine.enter({})
    Other(tmp_path / "job", 1).kill()
    assert mine.leave({"mine": True}) == {0: {"mine": True}, 1: {"step": 0}}
    assert names(tmp_path) == []


def test_one_that_ended_and_was_not_waited_for_is_gone(tmp_path: Path) -> None:
    mine = JobDirectory(tmp_path / "job", rank=0)
    mine.enter({})
    other = Other(tmp_path / "job", 1)
    os.kill(other.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, other.process.pid, os.WEXITED | os.WNOWAIT)  # it stays in the table
    last = mine.leave({})
    other.kill()
    assert last == {0: {}, 1: {"step": 0}}


def test_a_later_process_of_the_same_number_is_another_one() -> None:
    assert Process.now().is_alive()
    assert not Process(os.getpid(), "1").is_alive()


def test_without_proc_a_process_is_asked_by_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "isdir", lambda path: False)
    ended = subprocess.Popen(["true"])
    assert Process(ended.pid, "").is_alive()  # for all that is known: it was not waited for
    ended.wait(timeout=60)
    assert not Process(ended.pid, "").is_alive()
    assert Process(1, "").is_alive()  # of root, whoever asks


def test_half_a_file_is_never_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = JobDirectory(tmp_path / "job", rank=0)
    mine.enter({"step": 1})

    def killed(*paths: object) -> None:
        raise OSError("here the process was killed")

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(OSError, match="was killed"):
        mine.write({"step": 2})
    monkeypatch.undo()
    assert mine._envelopes()[0]["content"] == {"step": 1}
    assert mine.leave({"step": 3}) == {0: {"step": 3}}
    assert names(tmp_path) == []


def test_what_a_dead_job_left_is_not_of_this_one(tmp_path: Path) -> None:
    path = tmp_path / "job"
    for rank in (1, 7):
        Other(path, rank, shell=True).kill()
    assert names(path) == ["rank7.json"]
    mine = JobDirectory(path, rank=0)
    mine.enter({})
    assert mine.leave({"mine": True}) == {0: {"mine": True}}


def test_what_ended_under_a_launcher_that_runs_is_of_this_job(tmp_path: Path) -> None:
    """One that fails at once, before the next one has begun."""
    Other(tmp_path / "job", 1).kill()
    mine = JobDirectory(tmp_path / "job", rank=0)
    mine.enter({})
    assert mine.leave({}) == {0: {}, 1: {"step": 0}}


def test_a_live_job_of_the_same_name_is_left_alone(tmp_path: Path) -> None:
    other = Other(tmp_path / "job", 0, "leaves")
    with pytest.raises(FileExistsError, match="another process is rank 0"):
        JobDirectory(tmp_path / "job", rank=0).enter({"mine": True})
    assert other.go_on() == "{0: {'step': 2}}"


def test_directories_of_jobs_that_were_killed_are_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(port: str) -> JobDirectory:
        monkeypatch.setenv("MASTER_PORT", port)
        return JobDirectory.of(Job(0, 0, 2, 2), "run", str(tmp_path))

    Other(job("1").path, 0, shell=True).kill()
    lives = Other(job("2").path, 0)
    foreign = tmp_path / "somebody's"
    foreign.mkdir()
    mine = job("3")
    mine.enter({})
    assert set(tmp_path.iterdir()) == {lives_path := job("2").path, foreign, mine.path}
    lives.kill()
    mine.leave({})
    assert lives_path.exists()  # until the next job begins


def test_earlier_attempts_of_the_same_launcher_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their processes may have ended without a word, and the launcher runs on and starts others."""

    def attempt(number: str, use: str = "run") -> JobDirectory:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", number)
        return JobDirectory.of(Job(0, 0, 2, 2), use, str(tmp_path))

    monkeypatch.setattr(os, "getppid", os.getpid)  # what starts the others has started this one
    monkeypatch.setenv("MASTER_PORT", "1")
    Other(attempt("1").path, 0).kill()
    lives = Other(attempt("1", "memory").path, 0)
    same = attempt("1", "another")
    same.enter({})
    # Others of this attempt may be about to begin, and find what the one that is gone has left.
    assert len(names(tmp_path)) == 3
    same.leave({})
    later = attempt("2")
    later.enter({})
    assert set(tmp_path.iterdir()) == {attempt("1", "memory").path, later.path}
    lives.kill()
    later.leave({})


def test_another_user_s_directory_is_not_entered(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job").chmod(0o777)
    mine = JobDirectory(tmp_path / "job", rank=0)
    with pytest.raises(PermissionError, match="another user's, or others may write"):
        mine.enter({})
    assert names(tmp_path / "job") == []
    (tmp_path / "link").symlink_to(tmp_path / "job")
    with pytest.raises(OSError):
        JobDirectory(tmp_path / "link", rank=0).enter({})


def test_one_that_begins_while_the_last_one_leaves_has_a_new_directory(tmp_path: Path) -> None:
    """It has opened the directory, waits for its lock, and then that is the lock of one that is gone."""
    mine = JobDirectory(tmp_path / "job", rank=0)
    mine.enter({})
    with mine._locked(make=False):
        other = subprocess.Popen(
            [sys.executable, "-c", ENTER, str(tmp_path / "job"), "1", "leaves"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        while not waits_for_a_lock(other.pid):
            assert other.poll() is None
        mine._remove_files()
        (tmp_path / "job").rmdir()
    assert other.communicate("\n", timeout=60)[0].splitlines()[1:] == ["{1: {'step': 2}}"]
    assert names(tmp_path) == []


def waits_for_a_lock(pid: int) -> bool:
    """proc(5), /proc/locks: a lock that is waited for is shown by ``->``."""
    lines = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and f" {pid} " in line for line in lines)


def test_the_name_is_what_the_launcher_tells_all_its_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def name(rank: int = 0, processes: int = 4, use: str = "run", **variables: str) -> str:
        monkeypatch.setattr(os, "environ", variables)
        return str(JobDirectory.of(Job(rank, rank, processes, processes), use, "/").path)

    torchrun = {"MASTER_ADDR": "here", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none"}
    assert name(0, **torchrun) == name(3, **torchrun, RANK="3")
    different = {
        name(**torchrun),
        name(**torchrun, TORCHELASTIC_RESTART_COUNT="1"),
        name(**torchrun | {"MASTER_PORT": "2"}),
        name(**torchrun, processes=8),
        name(**torchrun, use="memory"),
        name(SLURM_JOB_ID="1", SLURM_STEP_ID="0"),
        name(SLURM_JOB_ID="1", SLURM_STEP_ID="1"),
        name(PMIX_NAMESPACE="a"),
        name(OMPI_MCA_ess_base_jobid="1"),
        name(),
    }
    assert len(different) == 10
    assert name(0) == name(1)  # of one parent
    of_mine = name()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert name() != of_mine


def test_ranges_of_numbers() -> None:
    assert numbers([]) == "" and numbers([3]) == "3" and numbers([2, 0, 1, 5, 7, 8]) == "0-2,5,7-8"
