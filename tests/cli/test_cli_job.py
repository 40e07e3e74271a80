"""`backstash run` where a launcher starts several processes, and where a script starts threads."""

import itertools
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from backstash.launcher import Job
from long_tests import mostly_long, takes_long
from test_cli_run import TRAIN, under_stash, write

THREADS = """
import threading, torch, backstash
from concurrent.futures import ThreadPoolExecutor

def gradient(seed):
    x = torch.linspace(seed, seed + 1, 40_000, requires_grad=True)
    x.sin().exp().sum().backward()
    return x.grad.double().sum().item().hex()

class Third(threading.Thread):
    def run(self):
        self.found = gradient(3)

third = Third()
third.start()
third.join()
with ThreadPoolExecutor(2) as pool:
    print(*pool.map(gradient, [1, 2]), third.found)
"""
# Both are there before either goes on, as in training: each process of a group waits for the others.
RANK = """
import os, torch, backstash
torch.distributed.init_process_group("gloo")
torch.distributed.barrier()
rank = int(os.environ["RANK"])
parameter = torch.nn.Parameter(torch.ones(200_000))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for step in range(3):
    x = parameter
    for _ in range(rank + 1):
        x = x.exp()
    x.sum().backward()
    optimizer.step()
"""


def plain(script: Path) -> str:
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=100, check=True
    )
    return done.stdout


@takes_long
def test_what_threads_save_is_held(tmp_path: Path) -> None:
    script = write(tmp_path / "threads.py", THREADS)
    options = (
        "--disk",
        str(tmp_path),
        "--keep",
        "0",
        "--quiet",
        "--json",
        str(tmp_path / "run.json"),
    )
    held = under_stash([str(script)], tmp_path, *options)
    assert (held.stdout, held.stderr) == (plain(script), "")
    stats = json.loads((tmp_path / "run.json").read_text())["stats"]
    assert stats["written_bytes"] == stats["eligible_bytes"] == 3 * 160_000  # exp's results


@takes_long
def test_a_thread_s_error_is_its_own(tmp_path: Path) -> None:
    source = "import threading, torch\nthreading.Thread(target=lambda: 1 / 0).start()\n"
    script = write(tmp_path / "error.py", source)
    ended = under_stash([str(script)], tmp_path)
    assert ended.returncode == 0 and "Exception in thread" in ended.stderr
    assert ended.stderr.endswith("ZeroDivisionError: division by zero\n")


@takes_long
def test_a_forked_process_starts_threads_as_plain_python_does(tmp_path: Path) -> None:
    source = """
    import os, sys, threading, torch
    if os.fork() == 0:
        thread = threading.Thread(target=lambda: print(*threading.current_thread().__dict__["_kwargs"]))
        run = thread.run
        thread.start()
        thread.join()
        sys.stdout.flush()
        os._exit(3 if thread.run == run else 4)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
    """
    script = write(tmp_path / "fork.py", source)
    ended = under_stash([str(script)], tmp_path)
    assert (ended.stdout.split(), ended.stderr) == (["3"], "")


def ranks(
    directory: Path, *options: str, then: str = "", processes: int = 2, launcher: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """The script, and ``then``, in processes of ``torchrun``."""
    script = write(directory / "rank.py", RANK + textwrap.dedent(then))
    run = ["-m", "backstash", "run", "--disk", str(directory), "--keep", "0", *options, str(script)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    return subprocess.run(
        [*torchrun, *launcher, *run],
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        cwd=directory,
    )


def messages_of(ended: subprocess.CompletedProcess[str]) -> list[str]:
    """What backstash said: the launcher says something, too."""
    lines = ended.stderr.splitlines()
    return [line.removeprefix("backstash: ") for line in lines if line.startswith("backstash")]


def table(lines: list[str]) -> list[list[str]]:
    """The rows of the summary's table, a number and its unit as one word."""
    at = next(number for number, line in enumerate(lines) if line.startswith("rank  "))
    rows = itertools.takewhile(lambda line: line.split()[0].isdecimal(), lines[at + 1 :])
    return [re.split(r"  +", row.strip()) for row in rows]


def test_the_processes_of_a_launcher_end_with_one_summary_and_files_of_their_own(
    tmp_path: Path,
) -> None:
    files = {"--json": "run.json", "--report": "out.page.html"}
    options = [part for name, file in files.items() for part in (name, str(tmp_path / file))]
    ended = ranks(tmp_path, *options)
    assert ended.returncode == 0, ended.stderr
    lines = messages_of(ended)
    assert any(line.startswith("ranks 0-1 of 2: the largest peak is rank ") for line in lines)
    rows = table(lines)
    assert [(row[0], row[2], row[-1]) for row in rows[:2]] == [
        ("0", "2.29 MiB", "finished"),  # three steps with a block of 800,000 bytes each
        ("1", "4.58 MiB", "finished"),
    ]
    for rank in range(2):
        own = json.loads((tmp_path / f"run.rank{rank}.json").read_text())
        assert own["stats"]["saves"] == 3 * (rank + 1)
        assert own["job"] == {
            "rank": rank,
            "local_rank": rank,
            "processes": 2,
            "local_processes": 2,
        }
        page = (tmp_path / f"out.page.rank{rank}.html").read_text()
        data = json.loads(page.split('id="report">')[1].split("</script>")[0])
        assert data["subtitle"] == f"Rank {rank} of a job of 2 processes"
        assert data["facts"] and data["curve"]
    assert {path.name for path in tmp_path.iterdir()} == {
        "rank.py",
        "run.rank0.json",
        "run.rank1.json",
        "out.page.rank0.html",
        "out.page.rank1.html",
    }


@takes_long
def test_a_rank_that_is_killed_has_no_file_and_the_others_do(tmp_path: Path) -> None:
    (tmp_path / "run.rank1.json").write_text("{}")  # of an earlier run
    killed = """
    import signal
    torch.distributed.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        signal.pause()  # until the launcher ends it
    """
    ended = ranks(tmp_path, "--json", "run.json", then=killed)
    assert ended.returncode == 1 and "SIGKILL" in ended.stderr  # the launcher's own
    said = [line for line in ended.stderr.splitlines() if line.startswith("backstash rank")]
    assert len(said) == 2 and "ended by SIGTERM; peak " in said[0]
    assert said[1].endswith(f"all ranks: `backstash summary {tmp_path}/run.rank*.json`")
    first = json.loads((tmp_path / "run.rank0.json").read_text())
    assert first["outcome"] == "SIGTERM" and first["stats"]["saves"] == 3


@takes_long
def test_ranks_that_the_launcher_ends_after_one_has_failed_are_in_the_summary(
    tmp_path: Path,
) -> None:
    failed = """
    import signal
    torch.distributed.barrier()
    if rank == 1:
        raise ValueError("of rank 1")
    while True:
        signal.pause()
    """
    ended = ranks(tmp_path, "--json", "run.json", then=failed)
    assert ended.returncode == 1 and "ValueError: of rank 1" in ended.stderr
    lines = messages_of(ended)
    assert any("ranks 0-1 of 2: rank 1 ended by ValueError after " in line for line in lines)
    assert [row[-1] for row in table(lines)] == ["SIGTERM", "ValueError"]


@takes_long
def test_a_launcher_under_backstash_gets_advice_on_how_to_launch_instead(tmp_path: Path) -> None:
    script = write(tmp_path / "rank.py", RANK)
    arguments = ["--nproc-per-node", "2", str(script)]
    own = f"from torch.distributed.run import main\nmain({arguments})"
    launcher = write(tmp_path / "launch.py", own)
    ended = under_stash([str(launcher)], tmp_path, "--disk", str(tmp_path))
    assert ended.returncode == 0
    (line,) = (each for each in ended.stderr.splitlines() if each.startswith("backstash: "))
    assert line.startswith("backstash: nothing was saved for backward in this process (peak ")
    assert "torchrun ... -m backstash run ... SCRIPT" in ended.stderr


@pytest.mark.parametrize("launches", mostly_long([True, False], True))
def test_a_script_that_launches_copies_of_itself_gets_the_advice_too(
    tmp_path: Path, launches: bool
) -> None:
    """Lightning's `ddp` does, and goes on as the first of them."""
    environment = 'import os\nos.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}\n'
    script = write(tmp_path / "own.py", TRAIN + environment * launches)
    ended = under_stash([str(script)], tmp_path, "--disk", str(tmp_path))
    assert ("torchrun ... -m backstash run" in ended.stderr) == launches
    assert "backstash rank" not in ended.stderr


TORCHRUN = "RANK=5 LOCAL_RANK=1 WORLD_SIZE=8"
OPEN_MPI = "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_SIZE=8"
TASKS = "SLURM_PROCID=5 SLURM_LOCALID=1 SLURM_STEP_NUM_TASKS=8"
SRUN = f"{TASKS} SLURM_NODEID=1"


@pytest.mark.parametrize(
    "variables, job",
    [
        ("", Job()),
        (TORCHRUN, Job(5, 1, 8)),
        (f"{TORCHRUN} LOCAL_WORLD_SIZE=4", Job(5, 1, 8, 4)),
        (f"{TORCHRUN} LOCAL_SIZE=4", Job(5, 1, 8, 4)),
        (f"{OPEN_MPI} OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_RANK=5", Job(5, 1, 8, 4)),
        ("PMI_RANK=5 MPI_LOCALRANKID=1 PMI_SIZE=8 MPI_LOCALNRANKS=4", Job(5, 1, 8, 4)),
        (f"{SRUN} SLURM_STEP_TASKS_PER_NODE=4(x2)", Job(5, 1, 8, 4)),
        (f"{SRUN} SLURM_STEP_TASKS_PER_NODE=6,2", Job(5, 1, 8, 2)),
        (f"{SRUN} SLURM_STEP_TASKS_PER_NODE=8", Job(5, 1, 8, 8)),
        (f"{SRUN} SLURM_STEP_TASKS_PER_NODE=some", Job(5, 1, 8)),
        (f"{SRUN} {TORCHRUN} SLURM_STEP_TASKS_PER_NODE=1 LOCAL_WORLD_SIZE=4", Job(5, 1, 8, 4)),
        (f"{SRUN} {TORCHRUN} SLURM_STEP_TASKS_PER_NODE=4", Job(5, 1, 8, 4)),  # set by a script
        (f"{TASKS} SLURM_STEP_TASKS_PER_NODE=3,1", Job(5, 1, 8, 3)),
        (f"{TASKS} SLURM_STEP_TASKS_PER_NODE=1,3 SLURM_NODEID=2", Job(5, 1, 8, 3)),
        (f"{TASKS} SLURM_STEP_TASKS_PER_NODE=4(x2),1 SLURM_NODEID=1", Job(5, 1, 8, 4)),
        (f"{TASKS} SLURM_STEP_TASKS_PER_NODE=4(x2),1 SLURM_NODEID=2", Job(5, 1, 8, 1)),
        (f"{TORCHRUN} LOCAL_WORLD_SIZE=0", Job(5, 1, 8, 1)),
        ("LOCAL_SIZE=64", Job()),  # somebody's own
        ("SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=8 SLURM_TASKS_PER_NODE=8", Job()),
        ("RANK=5 LOCAL_RANK=1", Job()),
        ("RANK=x LOCAL_RANK=1 WORLD_SIZE=8", Job()),
    ],
)
def test_what_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, variables: str, job: Job
) -> None:
    """As launchers were seen to say it."""
    monkeypatch.setattr(os, "environ", dict(each.split("=", 1) for each in variables.split()))
    assert Job.now() == job


def test_one_process_is_the_default() -> None:
    assert Job() == Job(rank=0, local_rank=0, processes=1, local_processes=1)


def test_names_of_lines_and_files() -> None:
    assert [Job().label, Job(3, 1, 4).label] == ["backstash", "backstash rank 3"]
    assert Job().file("a/out.html") == "a/out.html"
    assert Job(0, 0, 2).file("a/out.html") == "a/out.rank0.html"
    assert Job(0, 0, 2).file("a/out.html", 1) == "a/out.rank1.html"
    assert Job(12, 0, 16).file("/a/out.html") == "/a/out.rank12.html"
    assert Job(1, 0, 2).file(f"{os.sep}a{os.sep}out") == "/a/out.rank1"
