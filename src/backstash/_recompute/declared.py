"""Declare operations whose results follow from their arguments alone."""

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

    backstash knows what PyTorch's own operations compute. Another operation may read or write more than its
    arguments, so its results are kept or moved. After this call :meth:`Stash.recompute`,
    ``Action("recompute")`` and a plan may recompute them. The first result of each class is still compared.

    Args:
        what: a custom operator (``torch.ops.mine.scale``, one of its overloads, or the result of
            ``torch.library.custom_op``), or a class of ``torch.autograd.Function``, whose forward may then
            consist of recomputed operations. If such a forward calls a kernel without PyTorch's dispatcher,
            its results are still kept.

    Returns:
        ``what``, so that it is also a decorator. It holds for the process; a second call does nothing.

    Raises:
        UsageError: ``what`` is not one of these.

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
    """Whether a class of ``torch.autograd.Function`` was declared."""
    return function in _functions
