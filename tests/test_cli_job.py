"""`backstash run` where a launcher starts several processes, and where a script starts threads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from backstash.launcher import Job
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
RANK = """
import os, torch, backstash
x = torch.ones(200_000, requires_grad=True)
for _ in range(int(os.environ["RANK"]) + 1):
    x = x.exp()
x.sum().backward()
"""


def plain(script: Path) -> str:
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=100, check=True
    )
    return done.stdout


def test_what_threads_save_is_held(tmp_path: Path) -> None:
    script = write(tmp_path / "threads.py", THREADS)
    options = ("--disk", str(tmp_path), "--quiet", "--json", str(tmp_path / "run.json"))
    held = under_stash([str(script)], tmp_path, *options)
    assert (held.stdout, held.stderr) == (plain(script), "")
    stats = json.loads((tmp_path / "run.json").read_text())["stats"]
    assert stats["written_bytes"] == stats["eligible_bytes"] == 3 * 160_000  # exp's results


def test_a_thread_s_error_is_its_own(tmp_path: Path) -> None:
    source = "import threading, torch\nthreading.Thread(target=lambda: 1 / 0).start()\n"
    script = write(tmp_path / "error.py", source)
    ended = under_stash([str(script)], tmp_path)
    assert ended.returncode == 0 and "Exception in thread" in ended.stderr
    assert ended.stderr.endswith("ZeroDivisionError: division by zero\n")


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


def ranks(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The script in two processes of ``torchrun``."""
    script = write(directory / "rank.py", RANK)
    run = ["-m", "backstash", "run", "--disk", str(directory), *options, str(script)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    return subprocess.run(
        [*launcher, *run], capture_output=True, text=True, timeout=100, cwd=directory
    )


def test_each_process_of_a_launcher_has_lines_and_files_of_its_own(tmp_path: Path) -> None:
    files = {"--json": "run.json", "--report": "out.page.html"}
    options = [part for name, file in files.items() for part in (name, str(tmp_path / file))]
    ended = ranks(tmp_path, *options)
    assert ended.returncode == 0, ended.stderr
    for rank, file in enumerate(["run.json", "run.rank1.json"]):
        assert json.loads((tmp_path / file).read_text())["stats"]["saves"] == rank + 1
        assert f"backstash rank {rank}: to disk " in ended.stderr
    assert "backstash: " not in ended.stderr
    assert (tmp_path / "out.page.html").exists() and (tmp_path / "out.page.rank1.html").exists()


def test_a_launcher_under_backstash_is_told_how_to_go_around_it(tmp_path: Path) -> None:
    script = write(tmp_path / "rank.py", RANK)
    arguments = ["--nproc-per-node", "2", str(script)]
    own = f"from torch.distributed.run import main\nmain({arguments})"
    launcher = write(tmp_path / "launch.py", own)
    ended = under_stash([str(launcher)], tmp_path, "--disk", str(tmp_path))
    assert ended.returncode == 0
    (line,) = (each for each in ended.stderr.splitlines() if each.startswith("backstash: "))
    assert line.startswith("backstash: nothing was saved for backward in this process (peak ")
    assert "torchrun ... -m backstash run ... SCRIPT" in ended.stderr


@pytest.mark.parametrize("launches", [True, False])
def test_a_script_that_launches_copies_of_itself_is_told_too(
    tmp_path: Path, launches: bool
) -> None:
    """Lightning's `ddp` does, and goes on as the first of them."""
    told = 'import os\nos.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}\n'
    script = write(tmp_path / "own.py", TRAIN + told * launches)
    ended = under_stash([str(script)], tmp_path, "--disk", str(tmp_path))
    assert ("torchrun ... -m backstash run" in ended.stderr) == launches
    assert "backstash rank" not in ended.stderr


TORCHRUN = "RANK=5 LOCAL_RANK=1 WORLD_SIZE=8"
OPEN_MPI = "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_SIZE=8"
TASKS = "SLURM_PROCID=5 SLURM_LOCALID=1 SLURM_STEP_NUM_TASKS=8"
SRUN = f"{TASKS} SLURM_NODEID=1"


@pytest.mark.parametrize(
    "told, job",
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
def test_what_the_environment_says(monkeypatch: pytest.MonkeyPatch, told: str, job: Job) -> None:
    """As launchers were seen to say it."""
    monkeypatch.setattr(os, "environ", dict(each.split("=", 1) for each in told.split()))
    assert Job.now() == job


def test_one_process_is_the_default() -> None:
    assert Job() == Job(rank=0, local_rank=0, processes=1, local_processes=1)


def test_names_of_lines_and_files() -> None:
    assert [Job().label, Job(3, 1, 4).label] == ["backstash", "backstash rank 3"]
    assert Job(0, 0, 2).file("a/out.html") == "a/out.html"
    assert Job(12, 0, 16).file("/a/out.html") == "/a/out.rank12.html"
    assert Job(1, 0, 2).file(f"{os.sep}a{os.sep}out") == "/a/out.rank1"
