"""Saved tensors that come back as gradients: whose memory they have, as in plain PyTorch.

A custom function's backward may return what it saved: weight decay returns the weight, a fused loss the
gradient that it computed in forward. ``AccumulateGrad`` takes a first gradient over as ``.grad`` unless
somebody else has that tensor, too, and adds later gradients to it in place (PyTorch's ``accumulate_grad.h``).
In plain PyTorch a saved tensor has other owners: the program, or a graph that is retained. What an unpack hook
returns has none, so ``.grad`` would share the weight's memory, and the next gradient be added to the weight.

So while a function that may return what it is given runs, the nodes that get its gradients are asked to look
before they run: a gradient that is a saved tensor, and whose memory others have, is replaced by a copy. That is
the copy that ``AccumulateGrad`` makes in plain PyTorch. Operations of PyTorch's own return no saved tensor, and
for them nothing is done.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from .._torch.engine import current_node, may_return_saved, running_task
from .._torch.storages import has_other_owners
from .._torch.tensors import parts_of
from .view import reason_to_stay, snapshot

__all__ = ["RETURNS_NONE", "hand_out"]

RETURNS_NONE: set[type] = {type(None)}  # no node runs: somebody looks
"""Types of nodes that are known to return no saved tensor; grows as backward meets them."""

_KEY = "backstash.handout"  # in the metadata of nodes


def hand_out(tensor: Tensor) -> Tensor:
    """What an unpack hook is to return for ``tensor``, where the running node is not in ``RETURNS_NONE``.

    Mostly ``tensor`` itself: the nodes that follow the running one will look at what it returned. Where a hook
    on a gradient asks, which may return it in place of that gradient, a copy.
    """
    node = current_node()
    if node is None:
        return tensor
    if may_return_saved(node):
        _watch(node, tensor)
    elif type(node).__name__ != "AccumulateGrad":
        RETURNS_NONE.add(type(node))
    elif not torch.is_grad_enabled():
        return _copy(tensor)  # it saves nothing: a hook asks, and nobody looks at what that returns
    return tensor


class _Loan:
    """What one run of a node was given."""

    __slots__ = ("task", "tensors")

    def __init__(self, task: int) -> None:
        self.task = task
        self.tensors: list[weakref.ref[Tensor]] = []


class _Guard:
    """A hook of a node that gets gradients from nodes that were given saved tensors; for its next run."""

    __slots__ = ("handle", "leaf", "loans", "metadata")

    def __init__(self, node: Any) -> None:
        self.loans: list[_Loan] = []
        leaf = getattr(node, "variable", None)  # of AccumulateGrad
        self.leaf = weakref.ref(leaf) if leaf is not None else None
        self.metadata = node.metadata
        self.handle = node.register_prehook(self)

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        self.handle.remove()
        self.metadata.pop(_KEY, None)
        leaf = self.leaf() if self.leaf is not None else None
        if torch.is_grad_enabled() or (leaf is not None and leaf.grad is not None):
            return None  # AccumulateGrad takes nothing over
        return tuple(map(self._owned, gradients))

    def _owned(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is None or not self._was_given(gradient) or not _is_shared(gradient):
            return gradient
        return _copy(gradient)

    def _was_given(self, gradient: Tensor) -> bool:
        # Backward records no graph now: what requires a gradient was saved, or is the program's own.
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


def _copy(tensor: Tensor) -> Tensor:
    if type(tensor) is Tensor and not reason_to_stay(tensor):
        return snapshot(tensor)
    return tensor.detach().clone()
