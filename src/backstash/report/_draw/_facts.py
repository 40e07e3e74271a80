"""Read a graph once into lists of plain facts, in the order of forward, with the caller's names."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn

from ..._torch.engine import number_of, output_metadata
from ..._torch.graph_labels import module_of
from ..._torch.graph_walk import Outputs, iter_graph, roots_of
from ...errors import UsageError
from ._held import HeldTensor, Reader, sizes_of, storage_of

__all__ = ["Facts", "Leaf", "OpFacts", "Params", "Root", "read"]

_LEAF = "torch::autograd::AccumulateGrad"
_MOST_PARTS = 40  # names in a module's path; deeper names count as one
Params: TypeAlias = "nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]"
_ALLOWED = "allowed are a module, a dict of name to tensor, and (name, tensor) pairs"


@dataclass(slots=True)
class OpFacts:
    """A node that is not a leaf."""

    name: str
    path: tuple[str, ...]
    given: str
    """The caller's name for its result, or ``""``."""
    shape: tuple[str, ...] | None
    dtype: str
    held: list[HeldTensor]
    inputs: list[tuple[int, int]] = field(default_factory=list)
    """(an index in ``Facts.ops`` below this one's, the number of that node's output)."""
    leaves: list[int] = field(default_factory=list)
    """Indices in ``Facts.leaves``."""


@dataclass(slots=True)
class Leaf:
    """A tensor whose gradient is accumulated."""

    name: str
    is_parameter: bool
    shape: tuple[str, ...] | None
    dtype: str
    nbytes: int
    storage: tuple[object, int] | None


@dataclass(slots=True)
class Root:
    """One of the outputs given to ``draw``, and the node or the leaf that made it."""

    op: int | None
    leaf: int | None
    output: int
    shape: tuple[str, ...] | None
    dtype: str


@dataclass(slots=True)
class Facts:
    """A whole graph. It holds no node and no tensor."""

    ops: list[OpFacts]
    leaves: list[Leaf]
    roots: list[Root]
    without_graph: int
    """Number of outputs that need no gradient."""
    labelled: int
    """Number of nodes that are labelled with a module's path."""
    classes: dict[str, str]
    """The class of each module by its path, if the caller gave a module."""
    not_reached: list[str]
    """The caller's names of leaves that need a gradient and are not in the graph."""
    frozen: list[str]
    """The caller's names of tensors that need no gradient."""

    def held(self) -> Iterator[HeldTensor]:
        """Yield the tensors that all nodes hold, in the order of forward."""
        for op in self.ops:
            yield from op.held


def read(outputs: Outputs, params: Params | None) -> Facts:
    """Read everything that backward from ``outputs`` would reach, with the names in ``params``."""
    named = _named(params)
    given = _several(outputs)
    nodes = list(iter_graph(given))
    leaves = [node for node in nodes if node.name() == _LEAF]
    order = _forward_order([node for node in nodes if node.name() != _LEAF])
    place_of_leaf = _by_first_use(leaves, order)
    place = {node: index for index, node in enumerate(order)}
    reader = Reader()
    made = {tensor.grad_fn: name for name, tensor in named.values() if tensor.grad_fn is not None}
    ops = [_op(node, made.get(node, ""), reader) for node in order]
    for op, node in zip(ops, order, strict=True):
        for following, output in node.next_functions:
            if following in place_of_leaf:
                op.leaves.append(place_of_leaf[following])
            elif following is not None:
                op.inputs.append((place[following], output))
    roots = [_root(each, place, place_of_leaf) for each in given if roots_of([each])]
    tensors = [getattr(node, "variable", None) for node in place_of_leaf]
    used = {id(tensor) for tensor in tensors}
    unused = [each for key, each in named.items() if key not in used and each[1].is_leaf]
    modules = params.named_modules() if isinstance(params, nn.Module) else ()
    return Facts(
        ops=ops,
        leaves=[_leaf(tensor, index, named) for index, tensor in enumerate(tensors)],
        roots=roots,
        without_graph=len(given) - len(roots),
        labelled=sum(bool(op.path) for op in ops),
        classes={path: type(module).__name__ for path, module in modules},
        not_reached=[name for name, tensor in unused if tensor.requires_grad],
        frozen=[name for name, tensor in unused if not tensor.requires_grad],
    )


def _several(outputs: Any) -> list[Any]:
    if isinstance(outputs, Tensor) or hasattr(outputs, "next_functions") or _is_edge(outputs):
        return [outputs]
    return list(outputs) if isinstance(outputs, Iterable) else [outputs]


def _is_edge(value: Any) -> bool:
    return hasattr(value, "node") and hasattr(value, "output_nr")


def _forward_order(nodes: list[Any]) -> list[Any]:
    """Return ``nodes``, given consumers first, with producers first; among those that may be next, the
    oldest."""
    place = {node: index for index, node in enumerate(nodes)}
    uses: list[list[int]] = [[] for _ in nodes]
    waiting = [0] * len(nodes)
    for index, node in enumerate(nodes):
        for following, _ in node.next_functions:
            if following in place:
                uses[place[following]].append(index)
                waiting[index] += 1
    ready = [(number_of(node), -index) for index, node in enumerate(nodes) if not waiting[index]]
    heapq.heapify(ready)
    order = []
    while ready:
        index = -heapq.heappop(ready)[1]
        order.append(nodes[index])
        for user in uses[index]:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, (number_of(nodes[user]), -user))
    return order


def _by_first_use(leaves: list[Any], order: list[Any]) -> dict[Any, int]:
    """Return leaves with their numbers, in the order in which forward first used them."""
    known = set(leaves)
    used = [each for node in order for each, _ in node.next_functions if each in known]
    # A leaf that no node uses is an output itself.
    return {leaf: number for number, leaf in enumerate(dict.fromkeys([*used, *leaves]))}


def _op(node: Any, given: str, reader: Reader) -> OpFacts:
    # The metadata of the incoming gradient, which has the output's shape and type.
    made = output_metadata(node)
    shape, dtype = None, ""
    if made and not getattr(made[0], "is_cpp_nested_tensor", False):
        shape = tuple(str(size) for size in made[0].shape)
        dtype = str(made[0].dtype).removeprefix("torch.")
    path = _split_path(module_of(node))
    return OpFacts(node.name(), path, given, shape, dtype, reader.read(node))


def _split_path(path: str) -> tuple[str, ...]:
    """Return the names in ``"blocks.0.mlp"``; the names beyond the 40th are one."""
    return tuple(path.split(".", _MOST_PARTS - 1)) if path else ()


def _leaf(tensor: Any, index: int, named: dict[int, tuple[str, Tensor]]) -> Leaf:
    if not isinstance(tensor, Tensor):
        return Leaf(f"leaf {index} (gone)", False, None, "", 0, None)
    return Leaf(
        name=named.get(id(tensor), ("", tensor))[0],
        is_parameter=isinstance(tensor, nn.Parameter),
        shape=sizes_of(tensor),
        dtype=str(tensor.dtype).removeprefix("torch."),
        nbytes=_leaf_bytes(tensor),
        storage=storage_of(tensor),
    )


def _leaf_bytes(tensor: Tensor) -> int:
    try:
        return tensor.numel() * tensor.element_size()
    except RuntimeError:
        return 0


def _root(given: Any, place: dict[Any, int], leaves: dict[Any, int]) -> Root:
    (node,) = roots_of([given])
    shape, dtype, output = None, "", 0
    if isinstance(given, Tensor):
        shape, dtype, output = (
            sizes_of(given),
            str(given.dtype).removeprefix("torch."),
            given.output_nr,
        )
    elif _is_edge(given):
        output = int(given.output_nr)
    return Root(place.get(node), leaves.get(node), output, shape, dtype)


def _named(params: Params | None) -> dict[int, tuple[str, Tensor]]:
    """Return the caller's tensors with their names, by ``id``. Two names of one tensor are joined by ``=``."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in _pairs(params):
        first = found.get(id(tensor), ("", tensor))[0]
        found[id(tensor)] = (f"{first} = {name}" if first else name, tensor)
    return found


def _pairs(params: Any) -> list[tuple[str, Tensor]]:
    if params is None:
        return []
    if isinstance(params, nn.Module):
        return list(params.named_parameters(remove_duplicate=False))
    if isinstance(params, Tensor) or not isinstance(params, (Mapping, Iterable)):
        raise UsageError(f"params={type(params).__name__}: {_ALLOWED}")
    found = []
    for each in params.items() if isinstance(params, Mapping) else params:
        if not (isinstance(each, tuple) and len(each) == 2 and isinstance(each[1], Tensor)):
            raise UsageError(f"params has an entry of type {type(each).__name__}: {_ALLOWED}")
        found.append((str(each[0]), each[1]))
    return found
