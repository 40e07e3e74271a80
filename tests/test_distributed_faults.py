"""A job of two processes on gloo in which something goes wrong: nothing hangs, and nothing is left.

Each process runs the script below by `backstash run`, started by `torchrun` or, where the order of events
matters, as a launcher starts it but by the test.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from long_tests import takes_long
from test_distributed import needs_gloo
from two_processes import run_two

CHECKPOINTS = Path(__file__).with_name("distributed_checkpoint_worker.py")
PATIENCE_SECONDS = 150.0
SCRIPT = """
import os, signal, sys, torch
import torch.distributed as dist
from backstash import Disk, Stash

rank = int(os.environ["RANK"])
# A store of its own for each attempt: by torchrun's, a restarted process may find addresses of the one before.
attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
store = f"file://{os.getcwd()}/store{attempt}"
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
print("begun", flush=True)
model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh()) for _ in range(4)))
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step():
    loss = model(torch.ones(512, 256)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

step()
"""
pytestmark = needs_gloo


class Two:
    """Both processes, in a session of their own, and killed at the end whatever happens."""

    def __init__(self, directory: Path, then: str, *options: str) -> None:
        self.directory, script = directory, directory / "train.py"
        script.write_text(SCRIPT + textwrap.dedent(then))
        (directory / "disk").mkdir()
        variables = {
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "none",
            "MASTER_PORT": "none",
        }
        run = [
            sys.executable,
            "-m",
            "backstash",
            "run",
            "--disk",
            f"{directory}/disk",
            "--keep",
            "0",
            "--json",
            f"{directory}/run.json",
            *options,
        ]
        self.processes = [
            subprocess.Popen(
                [*run, str(script)],
                env=_environment(variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=directory,
            )
            for rank in range(2)
        ]
        self.errors = ["", ""]

    def __enter__(self) -> "Two":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def line(self, rank: int, begin: str) -> str:
        """The next line of a rank's output that begins so."""
        output = self.processes[rank].stdout
        assert output is not None
        for line in output:
            if line.startswith(begin):
                return line
        raise AssertionError(self.processes[rank].communicate()[1])

    def wait(self, rank: int) -> int:
        process = self.processes[rank]
        self.errors[rank] = process.communicate(timeout=PATIENCE_SECONDS)[1]
        return process.returncode

    def outcomes(self) -> dict[int, str]:
        """How each rank ended, of those that wrote it down; nothing of the job is left on any disk."""
        assert list((self.directory / "disk").iterdir()) == []
        found = {}
        for path in self.directory.glob("run.rank*.json"):
            figures = json.loads(path.read_text())
            found[figures["job"]["rank"]] = figures["outcome"]
        return found

    def begun(self) -> None:
        """Wait until both have joined the process group."""
        for rank in range(2):
            self.line(rank, "begun")


def _environment(variables: dict[str, str]) -> dict[str, str]:
    return os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | variables


@takes_long
def test_sigterm_ends_with_a_summary_and_the_script_s_own_status(tmp_path):
    then = """
    if rank == 1:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    print("ready", flush=True)
    while True:
        signal.pause()
    """
    with Two(tmp_path, then) as two:
        two.begun()
        for rank, status in ((1, 3), (0, -signal.SIGTERM)):
            two.line(rank, "ready")
            two.processes[rank].terminate()
            assert two.wait(rank) == status
    assert two.outcomes() == {0: "SIGTERM", 1: "exit 3"}
    assert two.errors[1].startswith("backstash rank 1: the script ended by exit 3 after ")
    assert "ranks 0-1 of 2: rank 1 ended by exit 3 after " in two.errors[0]  # the last to end


@takes_long
def test_a_rank_whose_disk_is_full(tmp_path):
    """By default all go on; where it is an error, that ends its rank, and the others as plain PyTorch's do."""
    then = """
    room = 1 << 20 if rank == 1 else None
    for on_full in ("keep", "raise"):
        with Stash(disk=Disk("disk", max_bytes=room), on_full=on_full, inflight=0) as stash:
            for _ in range(3):
                step()
        print(on_full, stash.stats().disk_peak_bytes, flush=True)
    """
    with Two(tmp_path, then) as two:
        two.begun()
        peaks = [int(two.line(rank, "keep").split()[1]) for rank in range(2)]
        assert peaks[1] <= 1 << 20 < peaks[0]
        assert [two.wait(1), two.wait(0)] == [1, 1]
    assert "StashWarning" in two.errors[1] and "StashWarning" not in two.errors[0]
    assert "StashFullError" in two.errors[1] and "RuntimeError" in two.errors[0]
    assert two.outcomes()[1] == "StashFullError" and two.outcomes()[0].endswith("Error")
    assert "rank 1 ended by StashFullError" in two.errors[0] + two.errors[1]


STEPPING = """
print("stepping", flush=True)
while True:
    step()
"""


@takes_long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_amid_its_steps(tmp_path, rank):
    with Two(tmp_path, STEPPING) as two:
        two.begun()
        for each in range(2):
            two.line(each, "stepping")
        two.processes[rank].kill()
        assert (two.wait(rank), two.wait(1 - rank)) == (-signal.SIGKILL, 1)
    assert list(two.outcomes()) == [1 - rank]
    assert f"backstash rank {1 - rank}: the script ended by " in two.errors[1 - rank]


@takes_long
def test_both_are_terminated_amid_their_steps_and_one_prints_a_summary(tmp_path):
    with Two(tmp_path, STEPPING) as two:
        two.begun()
        for each in range(2):
            two.line(each, "stepping")
        for process in two.processes:
            process.terminate()
        ended = {two.wait(0), two.wait(1)}
        assert ended <= {-signal.SIGTERM, 1}  # 1: the other one was gone first, in a collective
    assert set(two.outcomes()) == {0, 1}
    assert "backstash: ranks 0-1 of 2: " in two.errors[0] + two.errors[1]


@takes_long
def test_a_job_that_is_restarted_begins_clean(tmp_path):
    then = """
    if attempt == "0" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    step()
    dist.barrier()
    dist.destroy_process_group()
    """
    (tmp_path / "train.py").write_text(SCRIPT + textwrap.dedent(then))
    (tmp_path / "disk").mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    run = ["-m", "backstash", "run", "--disk", f"{tmp_path}/disk", "--json", "run.json", "train.py"]
    ended = subprocess.run(
        [*torchrun, "--max-restarts", "1", "--monitor-interval", "0.1", *run],
        env=_environment({}),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    assert list((tmp_path / "disk").iterdir()) == []
    found = [json.loads((tmp_path / f"run.rank{rank}.json").read_text()) for rank in range(2)]
    assert [each["outcome"] for each in found] == ["finished", "finished"]
    assert [each["steps"]["count"] for each in found] == [2, 2]  # steps of this attempt alone
    said = [line for line in ended.stderr.splitlines() if line.startswith("backstash: ranks 0-1")]
    assert said and not any("ended by" in line for line in said)


@takes_long
def test_a_checkpoint_is_saved_and_loaded_in_a_process_with_a_stash_and_has_none_of_it(tmp_path):
    run_two(CHECKPOINTS, tmp_path / "store", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= {"store", "checkpoint", "refused"}
