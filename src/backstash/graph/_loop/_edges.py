"""The edges from a step's graph to tensors outside it, and the gradients that leave the step on each of them.

Plain autograd adds the gradients of a tensor that many steps use in the order in which they arrive, one use
after the other. Adding up each step's gradients first would round differently. So a step's node in the outer
graph has one edge for each *use* of an outside tensor, and returns the gradients of these uses in order. The
engine then makes exactly the additions that it makes for the plain loop.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph as stock
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from ..._torch.engine import number_of, sequence_number
from ..._torch.hook_dicts import without_gradient_hooks
from ..._torch.trees import tree_map_only

__all__ = ["Aliases", "Foreign", "Uses", "stand_in", "uses_of"]

_CAST = "ToCopyBackward0"

Key = tuple[Any, int]  # a node outside the step, and the number of its output


def stand_in(outer: Tensor) -> Tensor:
    """Return a tensor with the values of ``outer`` at which a graph ends.

    It is a leaf only if ``outer`` is one, since autocast caches the casts of leaves.
    """
    leaf = outer.detach().requires_grad_(outer.requires_grad)
    return leaf if outer.is_leaf else leaf.view_as(leaf)


class Aliases:
    """Replacement leaves for outside tensors, so that a step's graph ends at them.

    Gradients then flow into a tensor's own graph only through the outer graph, where its hooks and
    ``retain_grad`` see each gradient once.
    """

    __slots__ = ("_by_id", "_outer_of")

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[Tensor, Tensor]] = {}
        self._outer_of: dict[Key, Tensor] = {}

    def known(self, outer: Tensor) -> Tensor | None:
        """Return the alias of ``outer``, or ``None``."""
        known = self._by_id.get(id(outer))
        return None if known is None else known[1]

    def of(self, outer: Tensor) -> Tensor:
        """Return the alias of ``outer``, which the first call creates."""
        known = self._by_id.get(id(outer))
        if known is not None:
            return known[1]
        alias = stand_in(outer)
        self._by_id[id(outer)] = (outer, alias)
        edge = stock.get_gradient_edge(alias)
        self._outer_of[edge.node, edge.output_nr] = outer
        return alias

    def outer_of(self, key: Key) -> Tensor | None:
        """Return the tensor that the alias with gradient edge ``key`` replaces."""
        return self._outer_of.get(key)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each tensor and its alias."""
        yield from self._by_id.values()


class Foreign(TorchFunctionMode):
    """Replaces tensors that were computed outside a step, and used through a closure, by aliases.

    Args:
        aliases: the known aliases, by tensor. So a backward on another thread, whose nodes have other numbers,
            finds the same ones.
        own: the gradient edges of the step's inputs.
        since: the number of this thread's first node inside the step.
        check: raises for a tensor that must not become an alias.
    """

    def __init__(
        self,
        aliases: Aliases,
        own: Container[Key],
        since: int,
        check: Callable[[Tensor], None],
    ) -> None:
        super().__init__()
        self._aliases = aliases
        self._own_edges = own
        self._since = since
        self._check = check

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args, kwargs = tree_map_only(Tensor, self._own, (args, kwargs or {}))
        return function(*args, **kwargs)

    def _own(self, tensor: Tensor) -> Tensor:
        node = tensor.grad_fn
        if node is None:
            return tensor
        known = self._aliases.known(tensor)
        if known is not None:
            return known
        if self._since <= number_of(node) < sequence_number():
            return tensor
        key = (node, tensor.output_nr)
        if key in self._own_edges or self._aliases.outer_of(key) is not None:
            return tensor
        self._check(tensor)
        return self._aliases.of(tensor)


class Uses:
    """The edges from one run of a step to the outside, in the order in which a walk finds them."""

    __slots__ = ("_edges", "casts", "constants", "keys")

    def __init__(self, edges: list[tuple[Any, int, Key]], constants: Any = ()) -> None:
        self._edges = edges
        self.constants = constants
        """The numbers and strings that ``autograd.Function`` objects inside keep for backward."""
        self.casts = {key for node, _, key in edges if node.name() == _CAST}
        """The targets of casts to another dtype."""
        self.keys: list[Key] = [key for _, _, key in edges]
        """The target of each edge."""

    def foreign(self, known: Callable[[Key], bool]) -> Any:
        """Return an outside node that is no leaf and not ``known``, or ``None``."""
        return next(
            (key[0] for key in self.keys if not hasattr(key[0], "variable") and not known(key)),
            None,
        )

    def backward(
        self, ends: Sequence[Any], gradients: Sequence[Tensor]
    ) -> list[tuple[Key, Tensor]]:
        """Run the step's graph backward from ``ends``. Return each gradient that left it and its edge."""
        arrived: list[tuple[Key, Tensor]] = []
        of_node: dict[Any, list[tuple[int, Key]]] = {}
        for node, number, key in self._edges:
            of_node.setdefault(node, []).append((number, key))
        handles = [node.register_hook(_listener(edges, arrived)) for node, edges in of_node.items()]
        try:
            outside = [stock.GradientEdge(*key) for key in dict.fromkeys(self.keys)]
            leaves = [node.variable for node, _ in self.keys if hasattr(node, "variable")]
            with without_gradient_hooks(leaves):
                torch.autograd.grad(ends, outside, gradients, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        return arrived


def _listener(
    edges: list[tuple[int, Key]], arrived: list[tuple[Key, Tensor]]
) -> Callable[[Any, Any], None]:
    def listen(leaving: Any, _: Any) -> None:
        arrived.extend(
            (key, leaving[number]) for number, key in edges if leaving[number] is not None
        )

    return listen


def uses_of(outputs: Sequence[Tensor], since: int, known: Callable[[Key], bool]) -> Uses:
    """Find the edges from the graph of ``outputs`` to leaves, and to nodes created outside the step.

    Inside are the nodes that this thread has numbered from ``since`` on, except those that are ``known`` to
    replace outside tensors.
    """
    ahead = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen, edges, now = set(ahead), [], sequence_number()
    while ahead:
        node = ahead.pop()
        for number, (following, output) in enumerate(node.next_functions):
            if following is None:
                continue
            key = (following, output)
            if (
                hasattr(following, "variable")
                or not since <= number_of(following) < now
                or known(key)
            ):
                edges.append((node, number, key))
            elif following not in seen:
                seen.add(following)
                ahead.append(following)
    custom = sorted((each for each in seen if isinstance(each, BackwardCFunction)), key=number_of)
    return Uses(edges, tuple(found for each in custom if (found := _constants(each))))


def _constants(node: Any) -> tuple[Any, ...]:
    plain = (int, float, complex, str)  # compared by repr, so that a NaN equals itself
    return tuple(
        sorted(
            (name, repr(value)) for name, value in vars(node).items() if isinstance(value, plain)
        )
    )
