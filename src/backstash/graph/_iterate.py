"""Walking a graph from its outputs, without recursion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from torch import Tensor
from torch.autograd import graph as stock

from ..errors import UsageError

__all__ = ["Outputs", "iter_graph", "roots_of"]

_Output: TypeAlias = "Tensor | stock.Node | stock.GradientEdge"
Outputs: TypeAlias = "_Output | Iterable[_Output]"


def iter_graph(outputs: Outputs) -> Iterator[stock.Node]:
    """Yield every node that backward from ``outputs`` would reach, each after all nodes that feed it.

    The order is topological: a node comes before its ``next_functions``, so a leaf's ``AccumulateGrad``
    comes after everything that uses the leaf. Walking is done with a list, not by recursion, and visits
    every node and edge twice.

    Args:
        outputs: a tensor, a node or a ``GradientEdge``, or several of them. Tensors that need no gradient
            have no nodes.

    Raises:
        UsageError: something else in ``outputs``.

    >>> import torch
    >>> x = torch.ones(2, requires_grad=True)
    >>> [node.name() for node in iter_graph((x * 2).exp().sum())]
    ['SumBackward0', 'ExpBackward0', 'MulBackward0', 'torch::autograd::AccumulateGrad']
    """
    roots = roots_of(outputs)
    uses = _count_uses(roots)
    ready = [node for node in reversed(roots) if uses[node] == 0]
    while ready:
        node = ready.pop()
        yield node
        for following, _ in reversed(node.next_functions):
            if following is not None:
                uses[following] -= 1
                if uses[following] == 0:
                    ready.append(following)


def roots_of(outputs: Outputs) -> list[stock.Node]:
    """The nodes of ``outputs``, each once."""
    single = isinstance(outputs, (Tensor, stock.GradientEdge)) or _is_node(outputs)
    found: dict[stock.Node, None] = {}
    several: Any = (outputs,) if single else outputs
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
