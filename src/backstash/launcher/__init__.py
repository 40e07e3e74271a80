"""The processes that a launcher started: which of them this one is, and what those of one machine share."""

from ._by_rank import ByRank, of_this_rank, this_rank
from ._directory import JobDirectory, Process
from ._job import Job, numbers
from ._shares import Shares

__all__ = [
    "ByRank",
    "Job",
    "JobDirectory",
    "Process",
    "Shares",
    "numbers",
    "of_this_rank",
    "this_rank",
]
