"""The ranks of this process, which launchers set in the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Job", "numbers", "rank_of_launcher"]

# Variables for the rank, the local rank, the number of processes, and the number on this machine. The first
# three come from the first launcher that sets them; the fourth from the first that sets all four. A launcher
# further down may have started one above it, for example Slurm `torchrun`.
_LAUNCHERS = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),  # torchrun, accelerate
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE"),  # deepspeed
    (  # Open MPI
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"),  # Hydra: MPICH, Intel MPI
    (  # srun, but not a batch script
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_TASKS_PER_NODE",
    ),
)


@dataclass(frozen=True, slots=True)
class Job:
    """One process of a job, with the ranks from its launcher.

    >>> Job(rank=3, local_rank=1, processes=4, local_processes=2).file("out.json")
    'out.rank3.json'
    """

    rank: int = 0
    """Its rank among all processes of the job, from 0."""
    local_rank: int = 0
    """Its rank among the processes on this machine, from 0."""
    processes: int = 1
    """Number of processes of the job."""
    local_processes: int = 1
    """Number of processes of the job on this machine."""

    @classmethod
    def now(cls) -> Job:
        """Return the job that the environment describes; without a launcher, a job of one process."""
        ranks = _given_ranks() or [0, 0, 1]
        here = next(filter(None, map(_numbers, _LAUNCHERS)), [1])[-1]
        rank, local_rank, processes = ranks
        return cls(rank, local_rank, processes, here or 1)

    @property
    def label(self) -> str:
        """The start of the lines that this process prints: ``"backstash"`` or ``"backstash rank 3"``."""
        return "backstash" if self.processes == 1 else f"backstash rank {self.rank}"

    def file(self, path: str, rank: int | None = None) -> str:
        """Return the path of one process's own file; in a job of one process, ``path`` itself.

        Args:
            path: the path for the whole job.
            rank: the process. Default: this one.
        """
        if self.processes == 1:
            return path
        whole = Path(path)
        own = f"{whole.stem}.rank{self.rank if rank is None else rank}{whole.suffix}"
        return str(whole.with_name(own))


def rank_of_launcher() -> int | None:
    """Return the rank from the launcher, even in a job of one process; ``None`` without a launcher."""
    ranks = _given_ranks()
    return ranks[0] if ranks is not None else None


def _given_ranks() -> list[int] | None:
    return next(filter(None, (_numbers(names[:3]) for names in _LAUNCHERS)), None)


def numbers(ranks: Iterable[int]) -> str:
    """Return ``ranks`` as a text of ranges.

    >>> numbers([0, 1, 2, 3, 6])
    '0-3,6'
    """
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in ranges)


def _numbers(names: tuple[str, ...]) -> list[int] | None:
    """Return the numbers in the variables ``names``; ``None`` if one is missing or not a number."""
    numbers = [number for name in names if (number := _number(name)) is not None]
    return numbers if len(numbers) == len(names) else None


def _number(name: str) -> int | None:
    """Return the number in the variable ``name``, if it is one. Slurm lists those of all machines:
    ``4(x2),1``."""
    counts: list[int] = []
    for each in os.environ.get(name, "").split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", each)
        if found is None:
            return None
        counts += [int(found[1])] * int(found[2] or 1)
    machine = os.environ.get("SLURM_NODEID", "")
    known = machine.isdecimal() and int(machine) < len(counts)
    return counts[int(machine)] if known else max(counts)
