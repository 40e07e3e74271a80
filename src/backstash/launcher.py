"""Which process of a job this is, where a launcher started several: launchers say it by the environment."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Job"]

# The process's number among all and on this machine, and how many there are. The first that says all three is
# believed: what is named later may stand around what is named before, as Slurm around `torchrun`.
_RANKS = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE"),  # torchrun, accelerate, deepspeed
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),  # Hydra, of MPICH and of Intel MPI
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),  # srun; a batch script is no step
)
# How many of them are on this machine.
_LOCAL_PROCESSES = (
    "LOCAL_WORLD_SIZE",  # torchrun, accelerate
    "LOCAL_SIZE",  # deepspeed
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_STEP_TASKS_PER_NODE",
)


@dataclass(frozen=True, slots=True)
class Job:
    """What the launcher says of this process.

    >>> Job(rank=3, local_rank=1, processes=4, local_processes=2).file("out.json")
    'out.rank3.json'
    """

    rank: int = 0
    """Its number among all."""
    local_rank: int = 0
    """Its number among those on this machine."""
    processes: int = 1
    """How many there are."""
    local_processes: int = 1
    """How many there are on this machine."""

    @classmethod
    def now(cls) -> Job:
        """By the environment as it is now; one process where that says nothing."""
        on_this_machine = next(filter(None, map(_count, _LOCAL_PROCESSES)), 1)
        for names in _RANKS:
            told = [os.environ.get(name, "") for name in names]
            if all(each.isdecimal() for each in told):
                rank, local_rank, processes = map(int, told)
                return cls(rank, local_rank, processes, on_this_machine)
        return cls(local_processes=on_this_machine)

    @property
    def label(self) -> str:
        """What lines of this process begin with."""
        return "backstash" if self.processes == 1 else f"backstash rank {self.rank}"

    def file(self, path: str) -> str:
        """Where this process writes what is asked for at ``path``: rank 0 there, others beside it."""
        if self.rank == 0:
            return path
        own = Path(path)
        return str(own.with_name(f"{own.stem}.rank{self.rank}{own.suffix}"))


def _count(name: str) -> int:
    """The number that the environment has at ``name``, or 0. Slurm tells all its machines': ``4(x2),1``."""
    counts: list[int] = []
    for each in os.environ.get(name, "").split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", each)
        if found is None:
            return 0
        counts += [int(found[1])] * int(found[2] or 1)
    machine = os.environ.get("SLURM_NODEID", "")
    known = machine.isdecimal() and int(machine) < len(counts)
    return counts[int(machine)] if known else max(counts)
