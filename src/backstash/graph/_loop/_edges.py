"""What reaches outside a step's own graph, and the gradients that leave the step on each such edge.

Plain autograd adds the gradients of a tensor that many steps use in the order in which they arrive, one use
after the other. A sum for each step, added to the next one's, would round differently. So a step's node in the
outer graph has one edge for each *use* of a tensor from outside, and gives back what arrived on each, in order:
the engine then makes the very additions that it makes for the plain loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph as stock
from torch.overrides import TorchFunctionMode

from ..._torch.engine import number_of
from ..._torch.hook_dicts import without_gradient_hooks
from ..._torch.trees import tree_map_only

__all__ = ["Aliases", "Foreign", "Uses", "uses_of"]

_CAST = "ToCopyBackward0"

Key = tuple[Any, int]  # a node outside the step, and which of its outputs


class Aliases:
    """Leaves of their own for tensors from outside, so that a step's graph ends at them.

    Gradients of the graph that a tensor hangs in then flow in the outer graph only, where hooks on them and
    ``retain_grad`` see each once.
    """

    __slots__ = ("_by_id", "_outer_of")

    def __init__(self, inherited: Aliases | None = None) -> None:
        self._by_id: dict[int, tuple[Tensor, Tensor]] = dict(inherited._by_id) if inherited else {}
        self._outer_of: dict[int, Tensor] = dict(inherited._outer_of) if inherited else {}

    def of(self, outer: Tensor, value: Tensor | None = None) -> Tensor:
        """The alias of ``outer``, made at the first call, from ``value`` where it is given."""
        known = self._by_id.get(id(outer))
        if known is not None:
            return known[1]
        alias = (outer if value is None else value).detach().requires_grad_(outer.requires_grad)
        self.add(outer, alias)
        return alias

    def add(self, outer: Tensor, alias: Tensor) -> None:
        """From now on, ``alias`` stands for ``outer``."""
        self._by_id[id(outer)] = (outer, alias)
        self._outer_of[id(alias)] = outer

    def outer_of(self, alias: Tensor) -> Tensor | None:
        """The tensor that ``alias`` stands for."""
        return self._outer_of.get(id(alias))

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each tensor and its alias."""
        yield from self._by_id.values()


class Foreign(TorchFunctionMode):
    """While a step runs: a tensor that was computed outside it, reached through a closure, becomes an alias."""

    def __init__(self, aliases: Aliases, since: int) -> None:
        super().__init__()
        self._aliases = aliases
        self._since = since

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
        if node is None or number_of(node) >= self._since:
            return tensor
        return self._aliases.of(tensor)


class Uses:
    """The edges by which one run of a step reaches outside, in the order in which a walk finds them."""

    __slots__ = ("_edges", "casts", "keys")

    def __init__(self, edges: list[tuple[Any, int, Key]]) -> None:
        self._edges = edges
        self.casts = {key for node, _, key in edges if node.name() == _CAST}
        """Where a change of the element type leads."""
        self.keys: list[Key] = [key for _, _, key in edges]
        """Of each edge: where it leads."""

    def foreign(self) -> Any:
        """A node outside that is no leaf, or ``None``."""
        return next((node for node, _ in self.keys if not hasattr(node, "variable")), None)

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
            with without_gradient_hooks(node.variable for node, _ in self.keys):
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


def uses_of(outputs: Sequence[Tensor], since: int) -> Uses:
    """Find the edges from the graph of ``outputs`` to leaves, and to nodes made before number ``since``."""
    ahead = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen, edges = set(ahead), []
    while ahead:
        node = ahead.pop()
        for number, (following, output) in enumerate(node.next_functions):
            if following is None:
                continue
            if hasattr(following, "variable") or number_of(following) < since:
                edges.append((node, number, (following, output)))
            elif following not in seen:
                seen.add(following)
                ahead.append(following)
    return Uses(edges)
