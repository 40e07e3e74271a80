"""What reaches outside a step's own graph, and the gradients that leave the step on each such edge.

Plain autograd adds the gradients of a tensor that many steps use in the order in which they arrive, one use
after the other. A sum for each step, added to the next one's, would round differently. So a step's node in the
outer graph has one edge for each *use* of a tensor from outside, and gives back what arrived on each, in order:
the engine then makes the very additions that it makes for the plain loop.
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

__all__ = ["Aliases", "Foreign", "Uses", "reaches", "stand_in", "uses_of"]

_CAST = "ToCopyBackward0"

Key = tuple[Any, int]  # a node outside the step, and which of its outputs


def stand_in(outer: Tensor) -> Tensor:
    """The values of ``outer`` with a graph that ends there.

    A leaf's is a leaf, and no other is: autocast caches the casts of leaves.
    """
    leaf = outer.detach().requires_grad_(outer.requires_grad)
    return leaf if outer.is_leaf else leaf.view_as(leaf)


def reaches(tensor: Tensor, nodes: set[Any]) -> bool:
    """Whether one of ``nodes`` is in the graph of ``tensor``."""
    ahead: list[Any] = [tensor.grad_fn]
    seen = set(ahead)
    while ahead:
        for following, _ in ahead.pop().next_functions:
            if following in nodes:
                return True
            if following is not None and following not in seen:
                seen.add(following)
                ahead.append(following)
    return False


class Aliases:
    """Leaves of their own for tensors from outside, so that a step's graph ends at them.

    Gradients of the graph that a tensor hangs in then flow in the outer graph only, where hooks on them and
    ``retain_grad`` see each once.
    """

    __slots__ = ("_by_id", "_outer_of")

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[Tensor, Tensor]] = {}
        self._outer_of: dict[Key, Tensor] = {}

    def known(self, outer: Tensor) -> Tensor | None:
        """The alias of ``outer``, or ``None``."""
        known = self._by_id.get(id(outer))
        return None if known is None else known[1]

    def of(self, outer: Tensor) -> Tensor:
        """The alias of ``outer``, made at the first call."""
        known = self._by_id.get(id(outer))
        if known is not None:
            return known[1]
        alias = stand_in(outer)
        self._by_id[id(outer)] = (outer, alias)
        edge = stock.get_gradient_edge(alias)
        self._outer_of[edge.node, edge.output_nr] = outer
        return alias

    def outer_of(self, key: Key) -> Tensor | None:
        """The tensor that the alias whose gradient edge is ``key`` stands for."""
        return self._outer_of.get(key)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each tensor and its alias."""
        yield from self._by_id.values()


class Foreign(TorchFunctionMode):
    """While a step runs: a tensor that was computed outside it, reached through a closure, becomes an alias.

    Args:
        aliases: those that are known, by the tensors themselves: a backward on another thread, whose nodes
            have other numbers, finds the same.
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
    """The edges by which one run of a step reaches outside, in the order in which a walk finds them."""

    __slots__ = ("_edges", "casts", "constants", "keys")

    def __init__(self, edges: list[tuple[Any, int, Key]], constants: Any = ()) -> None:
        self._edges = edges
        self.constants = constants
        """The numbers and strings that the ``autograd.Function`` objects inside keep for backward."""
        self.casts = {key for node, _, key in edges if node.name() == _CAST}
        """Where a change of the element type leads."""
        self.keys: list[Key] = [key for _, _, key in edges]
        """Of each edge: where it leads."""

    def foreign(self, known: Callable[[Key], bool]) -> Any:
        """A node outside that is no leaf, and not ``known``, or ``None``."""
        return next(
            (key[0] for key in self.keys if not hasattr(key[0], "variable") and not known(key)),
            None,
        )

    def backward(
        self, ends: Sequence[Any], gradients: Sequence[Tensor]
    ) -> list[tuple[Key, Tensor]]:
        """Run the step's graph backward from ``ends``: where each gradient left it, in order."""
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
    """Find the edges from the graph of ``outputs`` to leaves, and to nodes made outside the step.

    Inside are the nodes whose numbers this thread gave since ``since``, but those that are ``known`` to
    stand for a tensor from outside.
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
    custom = sorted((each for each in seen if _is_custom(each)), key=number_of)
    return Uses(edges, tuple(found for each in custom if (found := _constants(each))))


def _is_custom(node: Any) -> bool:
    return isinstance(node, BackwardCFunction)


def _constants(node: Any) -> tuple[Any, ...]:
    plain = (int, float, complex, str)  # compared by repr, by which a NaN is itself
    return tuple(
        sorted(
            (name, repr(value)) for name, value in vars(node).items() if isinstance(value, plain)
        )
    )
