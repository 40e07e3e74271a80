"""What a job of many ranks would take, by what one process was measured to take: a simulation.

    python benchmarks/job_simulation.py [--costs FILE] [--ranks 1,8,4096] [--out FILE]
    python benchmarks/job_simulation.py --validate FILE       compare with what processes here took

`job_processes.py` measures the costs (results/job_costs.json) and runs real processes
(results/job_processes.json). Here nothing runs: a step is a list of blocks, each with its bytes and its seconds
of forward and backward, and what follows for the ranks of a job. Three ways: `plain`; `checkpoint` around
each block; `stash`, which is `Stash(disk=DIR)` with the windows that are given.

Assumptions, all of them:

- Every block of every rank takes the same seconds and has the same bytes. No rank is slow by chance, no other
  job is there, nothing fails.
- More ranks on a machine than it has cores share the cores equally. Nothing else of computing is shared:
  caches and memory bandwidth are not.
- A disk gives each rank of its machine an equal share of its bandwidth, all the time, and a rank takes no more
  of it than one process alone was seen to take. Writes and reads of a rank go one after another. They take no
  processor time beyond what one process was measured to take more under a stash that moves nothing.
- A rank stalls in forward when more than `inflight` bytes wait to be written, and in backward for a block that
  is not there. It reads ahead as far as `prefetch` goes, in the order of backward.
- Data parallel: each block's gradients are reduced when its backward has ended, in a ring, while backward
  goes on: 2 (n - 1) / n of their bytes at the link's bandwidth, and 2 (n - 1) latencies. Within one machine it
  is the link of the costs, else the network of the machine, with one flow of the ring through it.
- Pipelines: one stage a rank; activations and their gradients go to the neighbour in one message that nobody
  waits for but who needs it; the replicas of a stage reduce their gradients after the last backward.
- Memory is what a rank holds of saved tensors at once (under a stash both windows and a block in use, where a
  step saves as much), its gradients (twice where it is data parallel: DDP's buckets), and what one process was
  measured to hold in addition to these. Weights are not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

RESULTS = Path(__file__).with_name("results")
WAYS = ("plain", "checkpoint", "stash")
SCHEDULES = ("data", "gpipe", "1f1b")


@dataclass(frozen=True)
class Costs:
    """Of one block, in one process; and of its machine."""

    forward_seconds: float
    backward_seconds: float
    hook_seconds: float  # that a block takes more under a stash that moves nothing
    saved_bytes: int
    input_bytes: int
    gradient_bytes: int
    rest_bytes: int  # that a step holds in addition to what is saved and the gradients
    process_write_bytes_per_second: float  # that one process alone takes of the disk
    process_read_bytes_per_second: float
    disk_write_bytes_per_second: float  # of the machine's disk: several processes together
    disk_read_bytes_per_second: float
    link_bytes_per_second: float  # between two processes of one machine
    link_seconds: float  # a message's latency there


@dataclass(frozen=True)
class Job:
    """How many ranks, on what machines, in what schedule."""

    ranks: int
    way: str
    blocks: int  # of the whole model
    schedule: str = "data"
    stages: int = 1
    microbatches: int = 1
    ranks_per_machine: int = 8
    cores_per_machine: int = 8
    inflight_bytes: int = 128 << 20
    prefetch_bytes: int = 128 << 20
    network_bytes_per_second: float = 12.5e9
    network_seconds: float = 10e-6

    @property
    def neighbours(self) -> int:
        """Ranks on this one's machine, itself included."""
        return min(self.ranks, self.ranks_per_machine)


class Rank:
    """The clock of one rank, its part of the disk, and what it holds."""

    def __init__(self, costs: Costs, job: Job) -> None:
        self.costs, self.job = costs, job
        self.write_bandwidth = min(
            costs.process_write_bytes_per_second, costs.disk_write_bytes_per_second / job.neighbours
        )
        self.read_bandwidth = min(
            costs.process_read_bytes_per_second, costs.disk_read_bytes_per_second / job.neighbours
        )
        self.slower = max(1.0, job.neighbours / job.cores_per_machine)
        self.clock = self.disk_free = 0.0
        self.writes: list[float] = []  # when each write under way ends
        self.held = self.peak = 0
        self.stalled = 0.0
        self.uses: list[float] = []  # when each block that was read was used

    def compute(self, seconds: float) -> None:
        self.clock += seconds * self.slower

    def hold(self, nbytes: int) -> None:
        self.held += nbytes
        self.peak = max(self.peak, self.held)

    def wait(self, until: float) -> None:
        self.stalled += max(0.0, until - self.clock)
        self.clock = max(self.clock, until)

    def forward(self) -> None:
        """One block."""
        costs, way = self.costs, self.job.way
        self.compute(costs.forward_seconds)
        self.hold(costs.saved_bytes)
        if way == "checkpoint":
            self.hold(costs.input_bytes - costs.saved_bytes)
        elif way == "stash":
            self.compute(costs.hook_seconds / 2)
            begins = max(self.disk_free, self.clock)
            self.disk_free = begins + costs.saved_bytes / self.write_bandwidth
            self.writes.append(self.disk_free)
            self.end_writes()
            # One that is larger than the window is written within the call.
            while self.writes and len(self.writes) * costs.saved_bytes > self.job.inflight_bytes:
                self.wait(self.writes[0])
                self.end_writes()

    def end_writes(self) -> None:
        while self.writes and self.writes[0] <= self.clock:
            self.writes.pop(0)
            self.hold(-self.costs.saved_bytes)

    def backward(self) -> None:
        """One block."""
        costs, job = self.costs, self.job
        if job.way == "checkpoint":
            self.compute(costs.forward_seconds)
            self.hold(costs.saved_bytes)
        elif job.way == "stash":
            self.compute(costs.hook_seconds / 2)
            self.end_writes()
            if self.writes:  # still in place: the write is called off
                self.writes.pop()
                self.disk_free = self.writes[-1] if self.writes else self.clock
            else:
                ahead = max(1, job.prefetch_bytes // costs.saved_bytes)
                # May begin when there is room, and not before backward has begun.
                begins = self.uses[-ahead] if len(self.uses) >= ahead else self.begun
                begins = max(self.disk_free, begins)
                self.disk_free = begins + costs.saved_bytes / self.read_bandwidth
                self.wait(self.disk_free)
                self.hold(costs.saved_bytes)
                # Those ahead of it that have come by now are held, too.
        self.uses.append(self.clock)
        self.compute(costs.backward_seconds)
        self.hold(-costs.saved_bytes)
        if job.way == "checkpoint":
            self.hold(-costs.input_bytes)

    def begin_backward(self) -> None:
        self.uses, self.begun = [], self.clock


def reduce_seconds(costs: Costs, job: Job, nbytes: float, members: int, *, local: bool) -> float:
    """A ring over so many ranks."""
    if members == 1:
        return 0.0
    bandwidth = costs.link_bytes_per_second if local else job.network_bytes_per_second
    latency = costs.link_seconds if local else job.network_seconds
    return 2 * (members - 1) * (nbytes / members / bandwidth + latency)


def data_parallel(costs: Costs, job: Job) -> Rank:
    """All ranks are alike: the one that is returned stands for each."""
    rank, link_free = Rank(costs, job), 0.0
    local = job.ranks <= job.ranks_per_machine
    for _ in range(job.blocks):
        rank.forward()
    rank.begin_backward()
    for _ in range(job.blocks):
        rank.backward()
        seconds = reduce_seconds(costs, job, costs.gradient_bytes, job.ranks, local=local)
        link_free = max(link_free, rank.clock) + seconds
    rank.clock = max(rank.clock, link_free)
    return rank


def orders(job: Job, stage: int) -> list[tuple[str, int]]:
    """What a stage does in a step: forward or backward of which microbatch."""
    count = job.microbatches
    first = count if job.schedule == "gpipe" else min(count, job.stages - stage)
    done = [("forward", number) for number in range(first)]
    for number in range(count):
        done.append(("backward", number))
        if first + number < count:
            done.append(("forward", first + number))
    return done


def pipeline(costs: Costs, job: Job) -> list[Rank]:
    """The ranks of one pipeline; its replicas are like it."""
    ranks = [Rank(costs, job) for _ in range(job.stages)]
    todo = [orders(job, stage) for stage in range(job.stages)]
    blocks = job.blocks // job.stages
    ended: dict[tuple[str, int, int], float] = {}
    local = job.ranks <= job.ranks_per_machine
    bandwidth = costs.link_bytes_per_second if local else job.network_bytes_per_second
    latency = costs.link_seconds if local else job.network_seconds
    message = costs.input_bytes / bandwidth + latency
    while any(todo):
        for stage, rank in enumerate(ranks):
            while todo[stage]:
                what, number = todo[stage][0]
                before = stage - 1 if what == "forward" else stage + 1
                came = 0.0
                if 0 <= before < job.stages:
                    if (what, before, number) not in ended:
                        break
                    came = ended[what, before, number] + message
                rank.clock = max(rank.clock, came)
                if what == "backward":
                    rank.begin_backward()
                for _ in range(blocks):
                    rank.forward() if what == "forward" else rank.backward()
                ended[what, stage, number] = rank.clock
                todo[stage].pop(0)
    replicas = job.ranks // job.stages
    nbytes = costs.gradient_bytes * blocks
    for rank in ranks:
        rank.clock += reduce_seconds(costs, job, nbytes, replicas, local=local)
    return ranks


def simulate(costs: Costs, job: Job) -> dict[str, float]:
    """Seconds of a step, of which the slowest rank stalled for the disk, and the most bytes of a rank."""
    ranks = [data_parallel(costs, job)] if job.schedule == "data" else pipeline(costs, job)
    held = max(rank.peak for rank in ranks)
    if job.way == "stash":
        most = costs.saved_bytes * job.blocks * job.microbatches // job.stages
        held = min(job.inflight_bytes + job.prefetch_bytes + costs.saved_bytes, most)
    gradients = costs.gradient_bytes * job.blocks // job.stages
    if job.schedule == "data" and job.ranks > 1:
        gradients *= 2
    return {
        "step_seconds": max(rank.clock for rank in ranks),
        "stall_seconds": max(rank.stalled for rank in ranks),
        "memory_bytes": held + gradients + costs.rest_bytes,
    }


def costs_of(path: Path) -> tuple[Costs, dict[str, object]]:
    facts = json.loads(path.read_text(encoding="utf-8"))
    return Costs(**facts["costs"]), facts


def jobs(counts: list[int], blocks: int) -> list[Job]:
    found = []
    for ranks in counts:
        for way in WAYS:
            found.append(Job(ranks=ranks, way=way, blocks=blocks))
        if ranks >= 8:
            for schedule in SCHEDULES[1:]:
                for way in WAYS:
                    job = Job(ranks=ranks, way=way, blocks=blocks, schedule=schedule)
                    found.append(replace(job, stages=8, microbatches=32))
    return found


def table(costs: Costs, counts: list[int], blocks: int) -> str:
    """One row for a job, the three ways side by side."""
    lines = [
        "| ranks | schedule | plain: s | MiB | checkpoint: s | MiB | stash: s | MiB | of it stalled |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    all_jobs = jobs(counts, blocks)
    for at in range(0, len(all_jobs), len(WAYS)):
        three = all_jobs[at : at + len(WAYS)]
        found = [simulate(costs, job) for job in three]
        cells = [
            f"{each['step_seconds']:.3f} | {each['memory_bytes'] / 2**20:.0f}" for each in found
        ]
        stalled = f"{found[-1]['stall_seconds']:.3f}"
        lines.append(
            f"| {three[0].ranks} | {three[0].schedule} | {' | '.join(cells)} | {stalled} |"
        )
    return "\n".join(lines)


def validation(costs: Costs, path: Path) -> str:
    """What real processes held and took, next to what is simulated for them; a step over plain's of its job."""
    facts = json.loads(path.read_text(encoding="utf-8"))
    lines = [
        "| processes | schedule | way | memory: measured MiB | simulated | ratio "
        "| step over plain's: measured | simulated |",
        "| ---: | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    plain: tuple[float, float] = (1.0, 1.0)
    for row in facts["rows"]:
        job, found = row["job"], simulate(costs, Job(**row["job"]))
        if job["way"] == "plain":  # the first of each job
            plain = row["step_seconds"], found["step_seconds"]
        held = [each["memory_bytes"] / 2**20 for each in (row, found)]
        steps = row["step_seconds"] / plain[0], found["step_seconds"] / plain[1]
        lines.append(
            f"| {job['ranks']} | {job['schedule']} | {job['way']} | {held[0]:.0f} | {held[1]:.0f} "
            f"| {held[1] / held[0]:.2f} | {steps[0]:.2f} | {steps[1]:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Print the tables; with ``--out``, keep them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--costs", type=Path, default=RESULTS / "job_costs.json")
    parser.add_argument("--ranks", default="1,2,8,64,512,4096")
    parser.add_argument("--validate", type=Path, help="what job_processes.py measured")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    costs, facts = costs_of(options.costs)
    counts = [int(each) for each in options.ranks.split(",")]
    if options.validate:
        text = validation(costs, options.validate)
    else:
        text = table(costs, counts, 96)
    print(text)
    if options.out is not None:
        sections = [facts["machine"], text, *([facts["disk"]] if "disk" in facts else [])]
        options.out.write_text("\n\n".join(map(str, sections)) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
