"""Which process of a job this is, where a launcher started several: ``torchrun`` says it by the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Job"]


@dataclass(frozen=True, slots=True)
class Job:
    """What the launcher says of this process."""

    rank: int = 0
    """Its number among all."""
    local_rank: int = 0
    """Its number among those on this machine."""
    processes: int = 1
    """How many there are."""

    @classmethod
    def now(cls) -> Job:
        """By the environment as it is now; one process where that says nothing."""
        told = [os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
        if not all(each.isdecimal() for each in told):
            return cls()
        return cls(*map(int, told))

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
