"""Steps of optimizers, which may write to parameters without raising the versions that a replay compares.

In torch 2.13 a fused optimizer raises none. A step on a DTensor raises the version of the wrapper and not of
its local tensor, and FSDP2 gathers what was written without a version. ``ZeroRedundancyOptimizer`` receives the
parameters of other ranks, and optimizers of other libraries may write through ``.data``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .sharded import UNKNOWN, is_sharding, source_of
from .storages import storage_of
from .tensors import flattened, is_wrapper_subclass, wrapped_leaf_of

__all__ = [
    "OPTIMIZER_STEPS",
    "LeafRead",
    "OptimizerStep",
    "read_now",
    "watch_optimizer_steps",
]


_Range = tuple[int, int]


class OptimizerStep(int):
    """The number of a step, among all those of optimizers."""

    def is_outdated_by(self, parameter: Tensor) -> bool:
        """Whether a later step may have written to the memory of a parameter."""
        return self is not OPTIMIZER_STEPS.latest and OPTIMIZER_STEPS.have_written(parameter, self)


class _OptimizerSteps:
    """The steps since the first call of :func:`watch_optimizer_steps`."""

    def __init__(self) -> None:
        self.latest = OptimizerStep(0)
        """The latest step."""
        # Of each storage: the latest step on each range of its bytes. Many parameters may share a storage.
        self._of: weakref.WeakKeyDictionary[torch.UntypedStorage, dict[_Range, OptimizerStep]] = (
            weakref.WeakKeyDictionary()
        )
        self._of_wrapped = OptimizerStep(0)  # the latest on parameters that wrap others

    def have_written(self, tensor: Tensor, since: OptimizerStep) -> bool:
        """Whether a step after ``since`` may have written to the memory of ``tensor``."""
        storage = storage_of(tensor)
        steps = None if storage is None else self._of.get(storage)
        if storage is None or steps is None:
            return False
        low, high = _range_of(tensor, storage)
        return any(
            step > since and begin < high and low < end for (begin, end), step in steps.items()
        )

    def have_written_wrapped(self, since: OptimizerStep) -> bool:
        """Whether a step after ``since`` was on a tensor that wraps others, such as a DTensor."""
        return self._of_wrapped > since

    def add(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Count a step: see ``register_optimizer_step_pre_hook``. Called before it and after it: a closure may
        make gradients, and another hook may delete them."""
        written: list[Tensor] = []
        needs_gradient = _needs_gradient(optimizer, args, kwargs)
        for group in optimizer.param_groups:
            written += (
                each for each in group["params"] if not needs_gradient or _has_gradient(each)
            )
        if not written:
            return
        self.latest = OptimizerStep(self.latest + 1)
        for each in written:
            if is_wrapper_subclass(each):
                self._of_wrapped = self.latest
            for plain in _plain(each):
                if (storage := storage_of(plain)) is not None:
                    self._of.setdefault(storage, {})[_range_of(plain, storage)] = self.latest


def _range_of(tensor: Tensor, storage: torch.UntypedStorage) -> _Range:
    """Return where the first byte of ``tensor`` is, and the end of its last one."""
    nbytes = storage.nbytes()
    if tensor.layout is not torch.strided or tensor.nbytes == nbytes:
        return 0, nbytes
    itemsize = tensor.element_size()
    low = int(tensor.storage_offset()) * itemsize
    last = sum((n - 1) * each for n, each in zip(tensor.shape, tensor.stride(), strict=True))
    return low, low + (int(last) + 1) * itemsize


def _needs_gradient(optimizer: Optimizer, args: Any, kwargs: Any) -> bool:
    """Whether this step writes only to parameters that have a gradient before it or after it. Optimizers of
    others may take gradients as arguments, or need none. What a closure makes, a hook may delete."""
    is_torch_s = type(optimizer).step.__module__.startswith("torch.")
    _, *given = args  # the first is the optimizer
    return is_torch_s and all(each is None for each in (*given, *kwargs.values()))


def _has_gradient(parameter: Tensor) -> bool:
    """Whether an optimizer may write to a parameter; in Megatron and Transformer Engine, gradients have
    attributes of their own."""
    if parameter.grad is not None:
        return True
    named = vars(parameter)
    return named.get("main_grad") is not None or named.get("decoupled_grad") is not None


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that ``tensor`` consists of."""
    todo = [tensor]
    while todo:
        each = todo.pop()
        if is_wrapper_subclass(each):
            todo += flattened(each)[0].values()
        else:
            yield each


OPTIMIZER_STEPS = _OptimizerSteps()
"""The steps of all optimizers of this process."""


class LeafRead:
    """When a forward read a leaf whose version does not show all writes.

    Args:
        owner: the tensor with the version that shows them, if there is one: a DTensor whose local tensor was
            read, or from which the leaf was gathered.
        is_gathered: whether the leaf may have been gathered from a tensor that is not known.
    """

    __slots__ = ("_is_gathered", "_owner", "_step", "_version")

    def __init__(self, owner: Tensor | None = None, *, is_gathered: bool = False) -> None:
        self._step = OPTIMIZER_STEPS.latest
        self._owner = None if owner is None else weakref.ref(owner)
        self._version = 0 if owner is None else owner._version
        self._is_gathered = is_gathered

    def is_outdated_by(self, tensor: Tensor) -> bool:
        """Whether the leaf, whose memory ``tensor`` has, may have been written since without a version."""
        if self._owner is not None:
            owner = self._owner()
            if owner is None or owner._version != self._version:
                return True
            # A fused step does not raise that version either.
            if any(OPTIMIZER_STEPS.have_written(each, self._step) for each in _plain(owner)):
                return True
        if self._is_gathered and OPTIMIZER_STEPS.have_written_wrapped(self._step):
            return True
        return OPTIMIZER_STEPS.have_written(tensor, self._step)


def read_now(tensor: Tensor) -> OptimizerStep | LeafRead | None:
    """Return what shows later whether a tensor that requires a gradient was written after it was read now."""
    leaf = tensor if tensor._base is None else tensor._base
    is_parameter = type(leaf) is nn.Parameter
    if not is_parameter:
        if not leaf.is_leaf:
            return None
        wrapper = None if leaf.requires_grad else wrapped_leaf_of(tensor, leaf)
        if wrapper is None:
            return LeafRead()
        leaf = wrapper
    source = source_of(leaf) if is_sharding() else None
    if source is None:
        return OPTIMIZER_STEPS.latest if is_parameter else LeafRead(leaf)
    return LeafRead(is_gathered=True) if source is UNKNOWN else LeafRead(source)


@functools.cache
def watch_optimizer_steps() -> None:
    """Count them from now on."""
    register_optimizer_step_pre_hook(OPTIMIZER_STEPS.add)
    register_optimizer_step_post_hook(OPTIMIZER_STEPS.add)
