"""Which process of a job this is, where a launcher started several: launchers say it by the environment."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Job"]

# The process's number among all and on this machine, how many there are, and how many on this machine. The
# first that says the first three is believed, and the first that says all four: what is named later may
# stand around what is named before, as Slurm around `torchrun`.
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
    (  # srun; a batch script is no step
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_TASKS_PER_NODE",
    ),
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
        ranks = next(filter(None, (_told(names[:3]) for names in _LAUNCHERS)), [0, 0, 1])
        here = next(filter(None, map(_told, _LAUNCHERS)), [1])[-1]
        rank, local_rank, processes = ranks
        return cls(rank, local_rank, processes, here or 1)

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


def _told(names: tuple[str, ...]) -> list[int] | None:
    """What the environment has at these names; ``None`` where it lacks one."""
    numbers = [number for name in names if (number := _number(name)) is not None]
    return numbers if len(numbers) == len(names) else None


def _number(name: str) -> int | None:
    """The number at ``name``, if it is one. Slurm tells those of all machines: ``4(x2),1``."""
    counts: list[int] = []
    for each in os.environ.get(name, "").split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", each)
        if found is None:
            return None
        counts += [int(found[1])] * int(found[2] or 1)
    machine = os.environ.get("SLURM_NODEID", "")
    known = machine.isdecimal() and int(machine) < len(counts)
    return counts[int(machine)] if known else max(counts)
