"""Values that differ by rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

from .._text import shown
from ..errors import UsageError
from ._job import rank_of_launcher

_Value = TypeVar("_Value")
ByRank: TypeAlias = _Value | Mapping[int, _Value] | Callable[[int], _Value]
"""A value for all ranks, or one for each."""
__all__ = ["ByRank", "of_this_rank", "this_rank"]


def this_rank() -> int | None:
    """Return this process's rank in its job; ``None`` if it has none.

    The rank is the launcher's. Without a launcher it is the rank in ``torch.distributed``, if its process group
    exists.
    """
    rank = rank_of_launcher()
    distributed = sys.modules.get("torch.distributed")
    if rank is None and distributed is not None and distributed.is_available():
        if distributed.is_initialized():
            return int(distributed.get_rank())
    return rank


def of_this_rank(value: Any, name: str) -> Any:
    """Return ``value``, or this process's value if it is a mapping or a function of ranks.

    Args:
        value: the same value for all ranks; a mapping from ranks to values; or a function of a rank.
        name: the argument's name, for the error message.

    Raises:
        UsageError: the process has no rank, or the mapping has no entry for it.

    >>> of_this_rank("4GiB", "keep")
    '4GiB'
    """
    if not (isinstance(value, Mapping) or callable(value)):
        return value
    rank = this_rank()
    if rank is None:
        raise UsageError(
            f"{name}= is given by rank, and this process has none: start it by a launcher (torchrun), or make "
            "the stash after torch.distributed.init_process_group"
        )
    if not isinstance(value, Mapping):
        return value(rank)
    if rank not in value:
        raise UsageError(
            f"{name}={shown(dict(value))} has nothing for rank {rank}: give each rank an entry, or a function "
            "of the rank"
        )
    return value[rank]
