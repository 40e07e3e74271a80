"""The processes that a launcher started, and the rank of this one."""

from ._by_rank import ByRank, of_this_rank, this_rank
from ._job import Job, numbers

__all__ = [
    "ByRank",
    "Job",
    "numbers",
    "of_this_rank",
    "this_rank",
]
