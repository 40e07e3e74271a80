"""benchmarks/job_simulation.py: what follows where it can be computed by hand, and the committed tables."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
_spec = importlib.util.spec_from_file_location("job_simulation", BENCHMARKS / "job_simulation.py")
simulation = importlib.util.module_from_spec(_spec)
sys.modules["job_simulation"] = simulation  # a dataclass looks its module up
_spec.loader.exec_module(simulation)

MIB = 1 << 20
COSTS = simulation.Costs(
    forward_seconds=1.0,
    backward_seconds=2.0,
    hook_seconds=0.0,
    saved_bytes=100 * MIB,
    input_bytes=10 * MIB,
    gradient_bytes=0,
    rest_bytes=0,
    process_write_bytes_per_second=200 * MIB,
    process_read_bytes_per_second=200 * MIB,
    disk_write_bytes_per_second=200 * MIB,
    disk_read_bytes_per_second=200 * MIB,
    link_bytes_per_second=float("inf"),
    link_seconds=0.0,
)


def simulated(costs=COSTS, ranks=1, way="plain", **more):
    job = simulation.Job(ranks=ranks, way=way, blocks=4, **more)
    return simulation.simulate(costs, job)


def test_one_rank():
    assert simulated()["step_seconds"] == 4 * 3.0
    assert simulated()["memory_bytes"] == 4 * 100 * MIB
    checkpoint = simulated(way="checkpoint")
    assert checkpoint["step_seconds"] == 4 * 4.0
    assert checkpoint["memory_bytes"] == (4 * 10 + 100) * MIB


def test_a_disk_that_is_fast_enough_costs_the_first_read_and_one_that_is_not_decides():
    windows = {"inflight_bytes": 100 * MIB, "prefetch_bytes": 200 * MIB}
    fast = simulated(way="stash", **windows)
    # Half a second a block, behind a second of forward; the last block is being written when backward begins.
    assert fast["stall_seconds"] == 0 and fast["step_seconds"] == 12.0
    slow = replace(COSTS, process_write_bytes_per_second=25 * MIB)
    # Four seconds a block: the second waits for the first, and so on; the last is never written.
    assert simulated(slow, way="stash", **windows)["stall_seconds"] == pytest.approx(3 + 3 + 3)
    shared = simulated(ranks=8, way="stash", **windows)
    assert shared["stall_seconds"] > 0, "eight ranks share the disk"


@pytest.mark.parametrize("way", ["write", "read"])
def test_a_rank_takes_of_the_disk_what_a_process_can_and_no_more_than_its_share(way):
    def stalled(ranks, process, disk):
        costs = replace(
            COSTS,
            disk_write_bytes_per_second=float("inf"),
            disk_read_bytes_per_second=float("inf"),
        )
        costs = replace(
            costs,
            **{f"process_{way}_bytes_per_second": process * MIB},
            **{f"disk_{way}_bytes_per_second": disk * MIB},
        )
        windows = {"inflight_bytes": 100 * MIB, "prefetch_bytes": 200 * MIB}
        return simulated(costs, ranks, "stash", **windows)["stall_seconds"]

    alone = stalled(1, 25, 50)
    assert alone > 0
    assert stalled(2, 25, 50) == alone  # two together take all of the disk, and neither is slower
    assert stalled(4, 25, 50) == stalled(1, 12.5, 50) > alone


def test_the_committed_table_is_of_the_committed_costs_and_processes():
    results = BENCHMARKS / "results"
    costs, facts = simulation.costs_of(results / "job_costs.json")
    table = simulation.validation(costs, results / "job_processes.json")
    committed = (results / "job_validation.txt").read_text(encoding="utf-8")
    assert committed.startswith(f"{facts['machine']}\n\n{table}\n")


def test_the_disk_is_measured_by_bytes_that_move(tmp_path):
    spec = importlib.util.spec_from_file_location("job_processes", BENCHMARKS / "job_processes.py")
    processes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(processes)
    found = processes.measure_disk(str(tmp_path), 16 * MIB, 1)
    assert set(found) == {"write", "read"} and min(found.values()) > 0
    assert list(tmp_path.iterdir()) == []


def test_ranks_beyond_the_cores_share_them():
    assert simulated(ranks=4, cores_per_machine=2)["step_seconds"] == 2 * 12.0


def test_a_ring_takes_twice_its_bytes_less_one_share():
    costs = replace(COSTS, gradient_bytes=100 * MIB, link_bytes_per_second=100 * MIB)
    # While backward takes two seconds a block, each but the last reduction is hidden.
    assert simulated(costs, ranks=2)["step_seconds"] == pytest.approx(12.0 + 1.0)
    assert simulated(costs, ranks=4)["step_seconds"] == pytest.approx(12.0 + 1.5)


def test_pipelines_have_their_bubbles_and_hold_what_is_alive():
    more = {"ranks": 2, "stages": 2, "microbatches": 4}
    gpipe, one = (simulated(schedule=schedule, **more) for schedule in ("gpipe", "1f1b"))
    # Of m microbatches on s stages, (m + s - 1) slots of forward and as many of backward.
    assert gpipe["step_seconds"] == one["step_seconds"] == (4 + 1) * 2 * 3.0
    assert gpipe["memory_bytes"] == 4 * 2 * 100 * MIB
    assert one["memory_bytes"] == 2 * 2 * 100 * MIB, (
        "a stage holds as many as there are stages from it on"
    )
