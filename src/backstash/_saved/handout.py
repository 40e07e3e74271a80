"""Keep a saved tensor from becoming a parameter's ``.grad`` without a copy.

The backward of a custom function may return a tensor that it saved: weight decay returns the weight, a fused
loss returns the gradient that it computed in forward. ``AccumulateGrad`` stores a first gradient as ``.grad``
without a copy unless that tensor has another owner, and it adds later gradients in place (PyTorch's
``accumulate_grad.h``). In plain PyTorch a saved tensor has other owners: the program, or a retained graph. A
tensor that an unpack hook returns has none. ``.grad`` would then share the weight's memory, and the next
gradient would be added to the weight.

So while a function that may return a saved tensor runs, this module puts a pre-hook on each node that receives
its gradients. The pre-hook replaces a gradient by a copy if the gradient is a saved tensor and its memory has
other owners. ``AccumulateGrad`` makes the same copy in plain PyTorch. PyTorch's own operations return no saved
tensor, so their nodes get no pre-hook.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from .._torch.engine import current_node, may_return_saved, running_task
from .._torch.storages import has_other_owners
from .._torch.tensors import parts_of
from .view import own_copy

__all__ = ["RETURNS_NONE", "hand_out"]

RETURNS_NONE: set[type] = {type(None)}  # no node runs: the program reads a saved tensor
"""Node types that are known to return no saved tensor. Grows as backward encounters new types."""

_KEY = "backstash.handout"  # in the metadata of nodes


def hand_out(tensor: Tensor) -> Tensor:
    """Return what an unpack hook must return for ``tensor``, for a node not in ``RETURNS_NONE``.

    This is ``tensor`` itself in most cases: the nodes that follow the running one check the gradients that it
    returns. It is a copy if a hook on a leaf's gradient unpacks ``tensor``, since the hook may return it as
    that gradient.
    """
    node = current_node()
    if node is None:
        return tensor
    if may_return_saved(node):
        _watch(node, tensor)
    elif type(node).__name__ != "AccumulateGrad":
        RETURNS_NONE.add(type(node))
    elif not torch.is_grad_enabled():
        return own_copy(tensor)  # it saves nothing: a hook unpacks, and nothing checks its result
    return tensor


class _Loan:
    """The saved tensors that one run of a node has unpacked."""

    __slots__ = ("task", "tensors")

    def __init__(self, task: int) -> None:
        self.task = task
        self.tensors: list[weakref.ref[Tensor]] = []


class _Guard:
    """A pre-hook, for one run, of a node whose gradients come from nodes that have unpacked saved tensors."""

    __slots__ = ("handle", "leaf", "loans", "metadata")

    def __init__(self, node: Any) -> None:
        self.loans: list[_Loan] = []
        leaf = getattr(node, "variable", None)  # only AccumulateGrad has one
        self.leaf = weakref.ref(leaf) if leaf is not None else None
        self.metadata = node.metadata
        self.handle = node.register_prehook(self)

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        self.handle.remove()
        self.metadata.pop(_KEY, None)
        leaf = self.leaf() if self.leaf is not None else None
        if torch.is_grad_enabled() or (leaf is not None and leaf.grad is not None):
            return None  # AccumulateGrad stores no gradient without a copy
        return tuple(map(self._owned, gradients))

    def _owned(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is None or not self._was_given(gradient) or not _is_shared(gradient):
            return gradient
        return own_copy(gradient)

    def _was_given(self, gradient: Tensor) -> bool:
        # Backward records no graph now: a gradient that requires grad was saved, or is the program's own
        # tensor.
        return gradient.requires_grad or any(
            given() is gradient for loan in self.loans for given in loan.tensors
        )


def _watch(node: Any, tensor: Tensor) -> None:
    task = running_task()
    loan: _Loan | None = node.metadata.get(_KEY)
    if not isinstance(loan, _Loan) or loan.task != task:
        loan = node.metadata[_KEY] = _Loan(task)
        for following, _ in node.next_functions:
            if following is not None:
                guard = following.metadata.get(_KEY)
                if not isinstance(guard, _Guard):
                    guard = _Guard(following)
                    following.metadata[_KEY] = guard
                guard.loans.append(loan)
    loan.tensors.append(weakref.ref(tensor))


def _is_shared(tensor: Tensor) -> bool:
    parts = parts_of(tensor)
    if parts is not None:
        return any(map(_is_shared, parts))
    return has_other_owners(tensor)
