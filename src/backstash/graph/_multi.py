"""``register_multi_grad_hook``: one call for the gradients of several tensors.

The backward owns the gradients that it has gathered: the engine holds them through a final callback, and drops
that callback when the backward ends, even if it raises. The table here holds weak references.

The hook of one tensor must know which of the other tensors the running backward will reach, and so needs their
graph nodes. If the hooks of ``a`` and ``b`` held each other's nodes, and ``b`` was computed from ``a``, the
two nodes would keep each other alive forever, since the garbage collector cannot see references between C++
nodes. A node is created after the nodes it leads to, so it has a greater sequence number. So each hook holds
only nodes of smaller number, in a chain. Leaves are held weakly. If it is unknown whether the backward reaches
a tensor (one that was freed, or a leaf under ``autograd.grad``), ``fn`` is called at the end of the backward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.autograd import graph as stock
from torch.utils.hooks import RemovableHandle

from .._torch.engine import may_execute, number_of, queue_callback, running_task
from .._torch.handle import Handle
from .._torch.tensors import alive

__all__ = ["register_multi_grad_hook"]


def register_multi_grad_hook(
    tensors: Sequence[Tensor],
    fn: Callable[..., None],
    *,
    mode: Literal["all", "any"] = "all",
) -> Handle:
    """Call ``fn`` once in each backward with the gradients of ``tensors``.

    Args:
        tensors: any number. The list has ``None`` in the place of a tensor that gets no gradient.
        fn: with ``"all"``, called with a list of one gradient or ``None`` for each tensor, as soon as the
            backward has computed the last of them; with ``"any"``, called with the first gradient alone.
            It must not change them.
        mode: ``"all"`` (default) or ``"any"``.

    Returns:
        A handle with ``remove()``, also a context manager.

    Raises:
        ValueError: ``mode`` is another. What ``fn`` raises comes out of backward. A backward that raises
            before the last gradient does not call ``fn``, and what it had gathered is freed.

    >>> import torch
    >>> a, b = torch.ones(2, requires_grad=True), torch.ones(2)
    >>> c = a * 2
    >>> handle = register_multi_grad_hook([a, b, c], lambda grads: print([g is not None for g in grads]))
    >>> c.sum().backward()
    [True, False, True]
    >>> handle.remove()
    """
    if mode not in ("all", "any"):
        raise ValueError(f"Expects mode to be one of ('all', 'any') but got {mode}")
    wanted = [(index, t) for index, t in enumerate(tensors) if t.requires_grad]
    if mode == "any":
        first = _First(_Group(fn, 1, {}))
        return Handle([_register(tensor, first) for _, tensor in wanted])
    group = _Group(fn, len(tensors), {index: weakref.ref(t) for index, t in wanted})
    handles = [_register(t, _Arrival(group, index, None)) for index, t in wanted if t.is_leaf]
    made = [(index, t, stock.get_gradient_edge(t)) for index, t in wanted if not t.is_leaf]
    below: _Below | None = None
    for index, tensor, edge in sorted(made, key=lambda item: number_of(item[2].node)):
        handles.append(_register(tensor, _Arrival(group, index, below)))
        below = _Below(index, edge, below)
    return Handle(handles)


def _register(tensor: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    return tensor.register_hook(hook)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(slots=True)
class _Below:
    """A tensor whose node was created before the node of the hook that holds this, and the next such tensor."""

    index: int
    edge: stock.GradientEdge
    next: _Below | None


class _Group:
    """The state that the hooks of one registration share. It holds no node and no tensor."""

    __slots__ = ("count", "fn", "lock", "running", "tensors")

    def __init__(
        self, fn: Callable[..., None], count: int, tensors: dict[int, weakref.ref[Tensor]]
    ) -> None:
        self.fn = fn
        self.count = count
        self.tensors = tensors
        self.lock = threading.Lock()
        self.running: weakref.WeakValueDictionary[int, _Gathering] = weakref.WeakValueDictionary()

    def begin(self, task: int, waiting_for: set[int]) -> _Gathering:
        """Return the state of a backward that reaches its first tensor of the group."""
        gathering = self.running[task] = _Gathering(self, waiting_for)
        queue_callback(gathering)
        return gathering


class _Gathering:
    """The gradients of one backward so far. The engine owns it, as a callback for the backward's end."""

    __slots__ = ("__weakref__", "called", "grads", "group", "waiting_for")

    def __init__(self, group: _Group, waiting_for: set[int]) -> None:
        self.group = group
        self.grads: list[Tensor | None] = [None] * group.count
        self.waiting_for = waiting_for
        self.called = False

    def __call__(self) -> None:
        if not self.called:
            self.called = True
            self.group.fn(self.grads)


class _Arrival:
    """The hook of one tensor."""

    __slots__ = ("below", "group", "index")

    def __init__(self, group: _Group, index: int, below: _Below | None) -> None:
        self.group = group
        self.index = index
        self.below = below

    def __call__(self, grad: Tensor) -> None:
        task = running_task()
        group = self.group
        with group.lock:
            gathering = group.running.get(task)
            if gathering is None:
                gathering = group.begin(task, self._expected())
            gathering.grads[self.index] = grad
            gathering.waiting_for.discard(self.index)
            is_complete = not gathering.waiting_for
        if is_complete:
            gathering()

    def _expected(self) -> set[int]:
        """Return the indices of the tensors that this backward reaches or may reach."""
        edges: dict[int, Any] = {}
        below = self.below
        while below is not None:
            edges[below.index] = below.edge
            below = below.next
        for index, reference in self.group.tensors.items():
            if index not in edges:
                tensor = alive(reference)
                edges[index] = None if tensor is None else stock.get_gradient_edge(tensor)
        return {index for index, edge in edges.items() if edge is None or may_execute(edge.node)}


class _First:
    """The hook of every tensor under ``"any"``."""

    __slots__ = ("group",)

    def __init__(self, group: _Group) -> None:
        self.group = group

    def __call__(self, grad: Tensor) -> None:
        task = running_task()
        with self.group.lock:
            if task in self.group.running:
                return
            self.group.begin(task, set()).called = True
        self.group.fn(grad)
