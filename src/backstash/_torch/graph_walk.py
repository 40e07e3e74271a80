"""Walk a graph from its outputs, without recursion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from torch import Tensor
from torch.autograd import graph as stock

from ..errors import UsageError

__all__ = ["Outputs", "iter_graph", "roots_of"]

_DEEP = 10_000
_BATCH = 1_000  # sources that _hold processes together
_KEY = "backstash.nodes"
_Output: TypeAlias = "Tensor | stock.Node | stock.GradientEdge"
Outputs: TypeAlias = "_Output | Iterable[_Output]"


def iter_graph(outputs: Outputs) -> Iterator[stock.Node]:
    """Yield every node that backward from ``outputs`` would reach, each after all nodes that feed it.

    The order is topological: a node comes before its ``next_functions``, so a leaf's ``AccumulateGrad`` comes
    after everything that uses the leaf. The walk uses lists, not recursion, and visits every node and edge
    twice. It also makes a graph of more than 10,000 nodes safe to free.

    Args:
        outputs: a tensor, a node, a ``GradientEdge``, or several of them. Tensors that need no gradient have
            no nodes.

    Raises:
        UsageError: ``outputs`` contains something else.

    >>> import torch
    >>> x = torch.ones(2, requires_grad=True)
    >>> [node.name() for node in iter_graph((x * 2).exp().sum())]
    ['SumBackward0', 'ExpBackward0', 'MulBackward0', 'torch::autograd::AccumulateGrad']
    """
    roots = roots_of(outputs)
    order, sources = _topological(roots)
    if len(order) > _DEEP:
        for first in range(0, len(sources), _BATCH):
            _hold(order, sources[first : first + _BATCH])
    yield from order


def roots_of(outputs: Outputs) -> list[stock.Node]:
    """Return the nodes of ``outputs``, each once."""
    single = isinstance(outputs, (Tensor, stock.GradientEdge)) or _is_node(outputs)
    found: dict[stock.Node, None] = {}
    # What is no output and not iterable gets the error of an output.
    several: Any = outputs if not single and isinstance(outputs, Iterable) else (outputs,)
    for output in several:
        node = _root_of(output)
        if node is not None:
            found[node] = None
    return list(found)


def _root_of(output: Any) -> stock.Node | None:
    if isinstance(output, Tensor):
        return stock.get_gradient_edge(output).node if output.requires_grad else None
    if isinstance(output, stock.GradientEdge):
        return output.node
    if _is_node(output):
        return output  # type: ignore[no-any-return]
    raise UsageError(
        f"{type(output).__name__} among the outputs: allowed are tensors, nodes (tensor.grad_fn) and "
        "gradient edges"
    )


def _is_node(value: Any) -> bool:
    return isinstance(value, stock.Node) or hasattr(value, "next_functions")


def _topological(roots: list[stock.Node]) -> tuple[list[stock.Node], list[stock.Node]]:
    """Return all nodes in topological order, and the roots that no other root reaches."""
    uses = _count_uses(roots)
    sources = [node for node in roots if uses[node] == 0]
    ready = sources[::-1]
    order = []
    while ready:
        node = ready.pop()
        order.append(node)
        for following, _ in reversed(node.next_functions):
            if following is not None:
                uses[following] -= 1
                if uses[following] == 0:
                    ready.append(following)
    return order, sources


def _count_uses(roots: list[stock.Node]) -> dict[stock.Node, int]:
    uses = dict.fromkeys(roots, 0)
    ahead = list(roots)
    while ahead:
        for following, _ in ahead.pop().next_functions:
            if following is None:
                continue
            if following not in uses:
                uses[following] = 0
                ahead.append(following)
            uses[following] += 1
    return uses


def _hold(order: list[stock.Node], sources: list[stock.Node]) -> None:
    """Make each source own the nodes below it, grouped in runs: the nodes of a run have the same sources.

    A node with fewer sources is never below one with more, so runs are freed in order of their number of
    sources.
    """
    reached_by = {source: 1 << number for number, source in enumerate(sources)}
    for node in order:
        if mask := reached_by.get(node):
            for following, _ in node.next_functions:
                if following is not None:
                    reached_by[following] = reached_by.get(following, 0) | mask
    runs: dict[int, list[Any]] = {}
    above = set(sources)
    for node in order:
        if node in reached_by and node not in above:
            runs.setdefault(reached_by[node], []).append(node)
    owned: list[list[Any]] = [[] for _ in sources]
    for mask in sorted(runs, key=int.bit_count):
        run = _FreedInOrder(runs[mask])
        while mask:
            lowest = mask & -mask
            owned[lowest.bit_length() - 1].append(run)
            mask ^= lowest
    for source, below in zip(sources, owned, strict=True):
        metadata: Any = source.metadata
        metadata[_KEY] = _FreedInOrder(below)


class _FreedInOrder:
    """Nodes, or runs of nodes, that a node above them owns and frees one by one when it dies.

    Torch frees a long graph step by step, but only if Python has not seen its nodes. Otherwise each node frees
    the next one from inside its own destructor, and some tens of thousands of them overflow the stack. Here
    everything below a node is still alive when the node is freed.
    """

    __slots__ = ("nodes",)

    def __init__(self, nodes: list[Any]) -> None:
        self.nodes = nodes

    def __del__(self) -> None:
        self.nodes.reverse()
        while self.nodes:
            self.nodes.pop()
