"""What the program declares to be computed from its arguments alone."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

import torch

from .._text import shown
from .._torch.schemas import declare_pure, overloads_of
from ..errors import UsageError

__all__ = ["is_declared", "recomputable"]

_T = TypeVar("_T")
_functions: weakref.WeakSet[Any] = weakref.WeakSet()


def recomputable(what: _T) -> _T:
    """Declare that an operation may be recomputed: its results follow from its arguments alone, bit for bit.

    What PyTorch's own operations compute is known to backstash. Of an operation that comes from elsewhere it is
    not known whether it reads or writes anything besides its arguments, so its results are kept or moved. After
    this call they may be recomputed by :meth:`Stash.recompute`, by ``Action("recompute")`` and by a plan. The
    first result of each class is compared all the same.

    Args:
        what: a custom operator (``torch.ops.mine.scale``, one of its overloads, what
            ``torch.library.custom_op`` returns), or a class of ``torch.autograd.Function``, whose forward may
            then consist of recomputed operations. A kernel that such a forward calls without PyTorch's
            dispatcher is not seen, and its results are kept all the same.

    Returns ``what``, so that it is a decorator, too. It holds for the process; a second call does nothing.

    Raises:
        UsageError: it is neither.

    >>> from backstash import recomputable
    >>> @recomputable
    ... @torch.library.custom_op("mine::scaled", mutates_args=())
    ... def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    ...     return x * factor
    """
    if isinstance(what, type) and issubclass(what, torch.autograd.Function):
        _functions.add(what)
        return what
    overloads = overloads_of(what)
    if not overloads:
        raise UsageError(
            f"recomputable({shown(what)}): allowed are a custom operator, such as torch.ops.mine.scale, and a "
            "class of torch.autograd.Function"
        )
    for each in overloads:
        declare_pure(each)
    return what


def is_declared(function: Any) -> bool:
    """Whether a class of ``torch.autograd.Function`` was."""
    return function in _functions
