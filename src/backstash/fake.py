"""Fake runs: find what a program's training steps would hold, without allocating it.

Tensors have shapes and no values (PyTorch's ``FakeTensorMode``), so even a model that does not fit this machine
runs in seconds. The result is a trace, from which :meth:`backstash.plan.Plan.from_trace` plans for any budget.
Nothing is computed, so the times in the trace mean nothing.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ._plan.trace import Links, Moment, Option, Trace, TracedBlock
from ._torch.fake import FakeMemory
from .errors import UsageError
from .policy import MIN_BYTES

__all__ = ["FakeRun"]

_RATE = 1e9  # bytes per second; not measured, since memory does not depend on it


class _Saved:
    """One saved storage, alive as long as the graph needs it."""

    __slots__ = ("__weakref__", "nbytes", "number", "storage", "tensor", "version")

    def __init__(self, number: int, tensor: Tensor) -> None:
        self.number = number
        self.nbytes = tensor.untyped_storage().nbytes()
        self.storage = weakref.ref(tensor.untyped_storage())
        self.version = tensor._version
        self.tensor: Tensor | None = None  # recreated at the first use


@dataclass(frozen=True, slots=True)
class _View:
    saved: _Saved
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


class FakeRun:
    """A context in which tensors have no memory, and the bytes that they would have are counted.

    It affects the thread that enters it. Every saved tensor of at least 64 KiB is discarded when it is saved,
    and created again when backward uses it, as if all had moved. So the memory of all other tensors is known at
    each save, use and free. Parameters stay. What the program itself holds of these tensors, such as a list of
    hidden states, counts a second time, so a run may then take less than planned.

    A value that the program reads, as ``loss.item()`` does, is 1: see :attr:`asked`. Code that needs more
    (lists, NumPy, shapes that depend on values) raises PyTorch's error. Do not use the tensors after the
    context.

    Raises:
        UsageError: this PyTorch has no ``FakeTensorMode``; or, within the context, the program creates a tensor
            on an accelerator that the machine lacks.

    >>> import torch
    >>> from backstash.plan import Plan
    >>> with FakeRun() as run:
    ...     weight = torch.ones(1 << 30, requires_grad=True)  # 4 GiB
    ...     for _ in range(2):
    ...         weight.sin().exp().sum().backward()
    ...         run.mark()
    >>> plan = Plan.from_trace(run.trace, "64GiB")
    >>> plan.state, plan.at("8GiB").state
    ('left alone', 'too small')
    """

    def __init__(self) -> None:
        self._memory = FakeMemory()
        self._blocks: list[TracedBlock] = []
        self._moments: list[Moment] = []
        self._alive: weakref.WeakValueDictionary[int, _Saved] = weakref.WeakValueDictionary()
        self._first = self._number = 0  # number of this step's first block, and of the next block
        self._trace: Trace | None = None
        self._entered = ExitStack()

    def __enter__(self) -> FakeRun:
        self._entered.enter_context(self._memory)
        self._entered.enter_context(saved_tensors_hooks(self._pack, self._unpack))
        return self

    def __exit__(self, *raised: object) -> None:
        self._entered.close()

    @property
    def asked(self) -> dict[str, int]:
        """How often the program read a value, by place, such as ``"train.py:12"``."""
        return dict(self._memory.asked)

    @property
    def trace(self) -> dict[str, Any]:
        """The step that :meth:`mark` ended last, for :meth:`Plan.from_trace`.

        Raises:
            UsageError: no step has ended.
        """
        if self._trace is None:
            raise UsageError("no step has ended: call mark() after the optimizer's step")
        return self._trace.as_dict()

    def mark(self) -> None:
        """End a step. The optimizer's state exists from the second step on."""
        memory, links = self._memory, Links(_RATE, _RATE)
        blocks, moments = tuple(self._blocks), tuple(self._moments)
        self._trace = Trace(blocks, moments, links, 0.0, memory.most_bytes)
        self._blocks.clear()
        self._moments.clear()
        self._first = self._number
        memory.most_bytes = memory.nbytes

    def _pack(self, tensor: Tensor) -> Any:
        base = tensor._base
        owner = tensor if base is None else base
        if isinstance(tensor, nn.Parameter) or (owner.is_leaf and owner.requires_grad):
            return tensor
        if type(tensor).__name__ not in ("FakeTensor", "Tensor"):
            return tensor  # another subclass stays in place here, although a stash may hold it
        storage = tensor.untyped_storage()
        if storage.nbytes() < MIN_BYTES:
            return tensor
        saved = self._alive.get(id(storage))
        if saved is None or saved.storage() is not storage or saved.version != tensor._version:
            saved = _Saved(self._number, tensor)
            self._number += 1
            self._alive[id(storage)] = saved
            keep, disk = Option(saved.nbytes), Option(0, moved_bytes=saved.nbytes)
            group = f"{tuple(tensor.shape)} {tensor.dtype}"
            self._blocks.append(TracedBlock(group, saved.nbytes, {"keep": keep, "disk": disk}))
            self._add("save", saved.number)
            weakref.finalize(saved, self._add, "free", saved.number)
        return _View(
            saved,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.device,
        )

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        saved = packed.saved
        if saved.tensor is None:
            self._add("use", saved.number)
            saved.tensor = torch.empty(saved.nbytes, dtype=torch.uint8, device=packed.device)
            self._memory.leave_out(saved.tensor)
        whole: Tensor = saved.tensor.view(packed.dtype)
        return whole.as_strided(packed.size, packed.stride, packed.offset)

    def _add(self, kind: Any, number: int) -> None:
        memory = self._memory
        if number >= self._first:
            self._moments.append(Moment(kind, number - self._first, 0.0, memory.most_bytes))
            memory.most_bytes = memory.nbytes
