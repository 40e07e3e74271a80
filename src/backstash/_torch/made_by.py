"""What a tensor can be computed again from: its operations, as far as the graph shows what they were given.

The operands are what nodes saved (an object that a pack hook returned, or a tensor), and parameters. Nothing
is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .dispatch import count_dispatch_modes, without_function_modes
from .engine import output_metadata
from .node_saves import raw_of, scalar_of
from .operations import RESULT, RULES, Rule

__all__ = ["MOST_OPERATIONS", "NOT_HELD", "Operation", "UnknownOperandError", "in_place", "made_by"]

MOST_OPERATIONS = 4
"""How many operations one after another a tensor may be away from what is held: a normalization that a model
writes out in bfloat16 is three, and what multiplies it the fourth."""

NOT_HELD = "the input of its operation is not held by this stash"
_PLAIN = (Tensor, nn.Parameter)


class UnknownOperandError(Exception):
    """Why a tensor cannot be computed again."""


class Operation:
    """An operation, and where each of its operands comes from: a place among a replay's, another operation,
    or ``None``, for one that it was not given."""

    def __init__(
        self, name: str, rule: Rule, operands: tuple[Any, ...], scalars: Mapping[str, Any]
    ) -> None:
        self.name = name
        self._rule = rule
        self._operands = operands
        self._scalars = scalars
        inner = (each.depth for each in operands if isinstance(each, Operation))
        self.depth: int = rule.is_computed + max(inner, default=0)

    def run(self, values: Sequence[Tensor], out: Tensor) -> None:
        """Compute the result from the operands into ``out``; without autocast, whose casts are operations of
        the graph."""
        kind = out.device.type
        casts = torch.is_autocast_enabled(kind)
        with torch.autocast(kind, enabled=False) if casts else nullcontext():
            self._run(values, out)

    def _run(self, values: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        given = [
            each._run(values)
            if isinstance(each, Operation)
            else None
            if each is None
            else values[each]
            for each in self._operands
        ]
        return self._rule.call(given, self._scalars, out)

    def __repr__(self) -> str:
        scalars = "".join(f", {name}={value!r}" for name, value in self._scalars.items())
        return f"{self.name}({', '.join(map(repr, self._operands))}{scalars})"


def made_by(
    tensor: Tensor,
    take: Callable[[Any], Any],
    module_of: Callable[[Any], str],
    modules: Sequence[nn.Module] = (),
    *,
    unsaved: bool = True,
) -> tuple[Operation, tuple[Any, ...]]:
    """The last operation that made ``tensor``, with those before it, and their operands.

    Args:
        tensor: with a graph.
        take: gives the operand for what a node holds; raises :class:`UnknownOperandError` where it is none.
        module_of: the path of the module that saved what a node holds, or ``""``.
        modules: that run now, outermost first.
        unsaved: whether a parameter may be relied on that no operation saved. Plain PyTorch does not mind
            where it is changed before backward.

    Raises:
        UnknownOperandError: why it cannot be computed again.
    """
    node: Any = tensor.grad_fn
    if node is None:
        raise UnknownOperandError("it was made by no operation that autograd knows")
    if node.name() not in RULES:
        raise UnknownOperandError(f"there is no rule for {node.name()}")
    if tensor.output_nr != 0:  # a normalization's statistics
        raise UnknownOperandError(f"it is no first result of {node.name()}")
    search = _Search(take, module_of, modules, unsaved)
    operation = search.operation(node, tensor.dtype, tensor.shape, 0)
    return operation, tuple(search.operands)


class _Search:
    """Looks in the graph for what a tensor can be computed from."""

    def __init__(
        self,
        take: Callable[[Any], Any],
        module_of: Callable[[Any], str],
        modules: Sequence[nn.Module],
        unsaved: bool,
    ) -> None:
        self._take = take
        self._module_of = module_of
        self._modules = modules
        self._unsaved = unsaved
        self.operands: list[Any] = []

    def operation(
        self, node: Any, dtype: torch.dtype, shape: Sequence[int], depth: int
    ) -> Operation:
        """What ``node`` is of, with its operands.

        Args:
            node: of the graph.
            dtype: of its result.
            shape: likewise.
            depth: how many operations come after it.
        """
        name = node.name()
        rule = RULES.get(name)
        if rule is None:
            raise UnknownOperandError(f"there is no rule for {name}")
        depth += rule.is_computed
        if depth > MOST_OPERATIONS:
            raise UnknownOperandError(NOT_HELD)
        edges = node.next_functions
        names = rule.operands or ("",) * len(edges)
        operands = [
            self._operand(node, each, edges[at], depth, optional=each in rule.optional)
            for at, each in enumerate(names)
        ]
        if "bias" in names and operands[names.index("bias")] is None:
            has_weight = operands[names.index("weight")] is not None
            if has_weight and raw_of(node, "bias") is None:
                raise UnknownOperandError(NOT_HELD)  # a frozen one is on no edge
        scalars = {each: _signed(scalar_of(node, each)) for each in rule.scalars}
        if None in scalars.values():
            raise UnknownOperandError("this PyTorch does not tell how its operation was called")
        operands += [
            self._operand(node, each, (None, 0), depth, optional=each in rule.optional)
            for each in rule.others
        ]
        if not scalars.get("training"):
            operands += [self._copied(_packed(node, each)) for each in rule.buffers]
        if rule.eps and (eps := self._eps(node, scalars)) is not None:
            scalars["eps"] = eps
        elif rule.eps:
            # (x - mean) * rstd is another formula than the kernel's: an outlier gives other bits.
            raise UnknownOperandError("no module tells its eps")
        if rule.takes_result:
            scalars |= {"dtype": dtype, "shape": tuple(shape)}
        return Operation(name, rule, tuple(operands), scalars)

    def _operand(
        self, node: Any, name: str, edge: tuple[Any, int], depth: int, *, optional: bool
    ) -> Any:
        packed = _packed(node, name) if name else None
        if packed is not None:
            return self._held(packed)
        child, number = edge
        if child is None:
            if optional:
                return None
            raise UnknownOperandError(NOT_HELD)
        leaf = getattr(child, "variable", None)
        if leaf is not None:
            # Not saved, so that a program may change it before backward; a parameter seldom, and a bias not
            # without the weight beside it, which is saved, unless that is not trained.
            relied = self._unsaved or (name == "bias" and node.next_functions[1][0] is not None)
            if not isinstance(leaf, nn.Parameter) or not relied:
                raise UnknownOperandError(NOT_HELD)
            return self._held(leaf)
        packed = _packed(child, RESULT) if number == 0 else None
        if packed is not None and child.name() in RULES:
            return self._held(packed)
        results = output_metadata(child)
        if number != 0 or len(results) == 0:
            raise UnknownOperandError(NOT_HELD)
        return self.operation(child, results[0].dtype, results[0].shape, depth)

    def _copied(self, packed: Any) -> int | None:
        """A buffer that the node saved: where it is in place, as it is now."""
        if packed is None:
            return None
        operand = self._take(packed)
        if isinstance(operand, Tensor):
            if count_dispatch_modes() > 0:
                raise UnknownOperandError("a dispatch mode of the program would see it")
            with without_function_modes(), torch.no_grad():
                operand = operand.clone()
        return self._number(operand)

    def _held(self, packed: Any) -> int:
        return self._number(self._take(packed))

    def _number(self, operand: Any) -> int:
        for at, each in enumerate(self.operands):
            if each is operand:
                return at
        self.operands.append(operand)
        return len(self.operands) - 1

    def _eps(self, node: Any, scalars: Mapping[str, Any]) -> float | None:
        """Of the module that ran the normalization, if one did."""
        path = self._module_of(_packed(node, "result1"))
        try:
            found: Any = self._modules[0].get_submodule(path)
        except (AttributeError, IndexError):
            return None
        # Another module's own call may have another one than its attribute's, too little to be seen at first.
        if getattr(type(found), "forward", None) is not nn.LayerNorm.forward:
            return None
        is_one = tuple(found.normalized_shape) == scalars["normalized_shape"]
        eps = getattr(found, "eps", None)
        return eps if is_one and isinstance(eps, float) else None


def in_place(packed: Any) -> Tensor:
    """A tensor that the graph holds as it is, as an operand. Raises :class:`UnknownOperandError` for others."""
    if type(packed) not in _PLAIN or not _is_usable(packed):
        raise UnknownOperandError(NOT_HELD)
    tensor: Tensor = packed
    return tensor


def _is_usable(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    return not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_nested)


def _packed(node: Any, name: str) -> Any:
    """What ``node`` holds for its saved tensor ``name``; ``None``: nothing, or nothing that can be seen."""
    try:
        return getattr(raw_of(node, name), "data", None)
    except RuntimeError:
        return None


def _signed(scalar: Any) -> Any:
    """Dimensions, which PyTorch shows without a sign."""
    if isinstance(scalar, (tuple, list)):
        return tuple(map(_signed, scalar))
    is_negative = type(scalar) is int and scalar >= 1 << 63
    return scalar - (1 << 64) if is_negative else scalar
