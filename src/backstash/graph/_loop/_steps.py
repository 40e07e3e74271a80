"""One evaluation of a step, the outside tensors that it uses, and its node in the outer graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph as stock

from ..._torch.engine import number_of, sequence_number
from ..._torch.graph_walk import iter_graph
from ..._torch.hook_dicts import count_gradient_hooks
from ..._torch.trees import tree_flatten
from ...errors import InplaceError, UsageError
from ._edges import Aliases, Foreign, Key, Uses, stand_in, uses_of
from ._saves import Again
from ._state import StepState, fingerprint, flatten

__all__ = ["Evaluation", "Face", "Node", "Stepper", "leaves_of"]

Token = Any  # the origin of a leaf: ("state", 0), ("x", 1), or the id of an outside tensor


@dataclass(frozen=True, slots=True)
class Face:
    """The signature of a step: its arguments and its result."""

    index: bool
    """Whether it takes the step's number, after the state."""
    xs: bool
    """Whether it takes an input of its own, after the index."""
    ys: bool
    """Whether it returns ``(state, y)``."""

    def arguments(self, state: Any, number: int, x: Any, args: Iterable[Any]) -> list[Any]:
        """Return the step's arguments in order."""
        return [state, *([number] if self.index else ()), *([x] if self.xs else ()), *args]


@dataclass(slots=True)
class Evaluation:
    """The result of one evaluation of a step. While it is alive, so is the graph."""

    inputs: tuple[Any, ...]
    """The leaves of the state and then of the step's own input."""
    state: StepState
    """The new state."""
    y: StepState
    """The output in addition to the state."""
    uses: Uses
    """Its edges to the outside."""
    tokens: dict[Any, Token]
    """The origin of the target of each edge."""
    places: list[int]
    """The positions of returned leaves that have a graph, each tensor once."""
    ends: list[Any]
    """The gradient edges of these leaves."""
    mark: int
    """The fingerprint of the returned leaves."""

    @property
    def pattern(self) -> int:
        """A hash that is equal for two evaluations that use the same tensors equally often, and whose custom
        functions keep the same numbers for backward."""
        used = tuple(sorted(repr(self.tokens[k]) for k in self.uses.keys))
        return hash((tuple(self.places), used, self.uses.constants))

    def only_graph(self) -> Evaluation:
        """Return this evaluation without its tensors."""
        self.inputs, self.state, self.y = (), StepState((), None), StepState((), None)
        return self


class Stepper:
    """Calls a step, and finds the tensors that it uses."""

    def __init__(self, step: Callable[..., Any], args: tuple[Any, ...], face: Face) -> None:
        self._step = step
        self._face = face
        self.outside = Aliases()
        """Aliases of tensors that were computed outside: arguments, and tensors in closures."""
        self.closures = False
        """Whether ``step`` reaches such a tensor through a closure."""
        self._begun = sequence_number()
        self._args = StepState(*tree_flatten(list(args)))  # leaves of other types are passed on
        for tensor in self._args.tensors:
            if tensor.grad_fn is not None:
                self.outside.of(tensor)
        self.tensors: dict[int, tuple[Tensor, int]] = {
            id(each): (each, each._version) for each in self._args.tensors
        }
        """Outside tensors that steps use, and the version of each when the loop first ran."""

    def outer_tensors(self) -> list[Tensor]:
        """Return the tensors among the arguments, and the other outside tensors that steps have used."""
        return [tensor for tensor, _ in self.tensors.values()]

    def run(self, number: int, state: StepState, x: StepState) -> Evaluation:
        """Evaluate step ``number`` on leaves. Raises ``UsageError`` if the loop cannot support it."""
        inputs = {id(leaf): leaf for leaf in (*state.tensors, *x.tensors)}
        versions = {key: leaf._version for key, leaf in inputs.items()}
        own = _own_edges(state, x)
        hooks = self._count_hooks()
        since = sequence_number()
        result = self._call(number, state, x, since, own)
        new, y = self._split(number, result, state)
        for key, leaf in inputs.items():
            if leaf._version != versions[key]:
                raise _input_changed(number)
            if count_gradient_hooks(leaf) or leaf.retains_grad:
                raise UsageError(
                    f"step {number} registered a hook on its input, which would see only one step's "
                    "part of the gradient. Register it on a tensor that the step computes"
                )
        if self._count_hooks() != hooks:
            raise UsageError(
                f"step {number} registered a hook on a tensor from outside, and each replay would "
                "register it again. Register it before the loop"
            )
        leaves = [*new.leaves, *y.leaves]
        self._refuse_views(number, leaves, inputs)
        places: dict[int, int] = {}
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None and id(leaf) not in inputs:
                places.setdefault(id(leaf), place)
        graph = [leaves[place] for place in places.values()]
        uses = self._uses(number, graph, since, own)
        return Evaluation(
            (*state.leaves, *x.leaves),
            new,
            y,
            uses,
            self._tokens(uses, own),
            list(places.values()),
            [stock.get_gradient_edge(each) for each in graph],
            fingerprint(leaves),
        )

    def _count_hooks(self) -> int:
        return sum(count_gradient_hooks(each) for each, _ in self.tensors.values())

    def _uses(self, number: int, graph: list[Tensor], since: int, own: dict[Key, Token]) -> Uses:
        def known(key: Key) -> bool:
            return key in own or self.outside.outer_of(key) is not None

        uses = uses_of(graph, since, known)
        outside = uses.foreign(known)
        if outside is None:
            return uses
        if self.closures:
            raise UsageError(
                f"step {number} uses a tensor that was computed outside it ({outside.name()}), and "
                "checkpoint_loop cannot find it: pass it as one of *args"
            )
        self.closures = True
        raise Again

    def _check_outside(self, number: int, tensor: Tensor, own: dict[Key, Token]) -> None:
        """Raise for a tensor that another step created, since each replay would create a new one."""
        node: Any = tensor.grad_fn
        inputs = {key[0] for key in own}
        if number_of(node) >= self._begun or not inputs.isdisjoint(iter_graph(tensor)):
            raise UsageError(
                f"step {number} uses a tensor of shape {tuple(tensor.shape)} ({node.name()}) that was "
                "computed by an earlier step, or on another thread: return it in the state, or pass it "
                "as one of *args"
            )

    def _call(
        self, number: int, state: StepState, x: StepState, since: int, own: dict[Key, Token]
    ) -> Any:
        outside = {id(outer): alias for outer, alias in self.outside.pairs()}
        args = self._args.replaced(outside).whole()
        positional = self._face.arguments(state.whole(), number, x.whole(), args)
        try:
            if self.closures:
                check = functools.partial(self._check_outside, number, own=own)
                with Foreign(self.outside, own, since, check):
                    return self._step(*positional)
            return self._step(*positional)
        except RuntimeError as error:
            if "leaf Variable that requires grad" in str(error):
                raise _input_changed(number) from error
            raise

    def _split(self, number: int, result: Any, before: StepState) -> tuple[StepState, StepState]:
        y: Any = None
        if self._face.ys:
            if not (isinstance(result, tuple) and len(result) == 2):
                raise UsageError(
                    f"step {number} returned a {type(result).__name__}: with ys=True it returns (state, y)"
                )
            result, y = result
        new = flatten(result, f"the state that step {number} returned")
        if new.structure != before.structure:
            raise UsageError(
                f"step {number} returned a state of the structure {new.structure}, but was given "
                f"{before.structure}"
            )
        return new, flatten(y, f"the y that step {number} returned")

    def _refuse_views(self, number: int, outputs: list[Any], inputs: dict[int, Tensor]) -> None:
        taken = {_address(leaf) for leaf in inputs.values()} - {0}
        made = [each for each in outputs if isinstance(each, Tensor) and id(each) not in inputs]
        for output in made:
            if _address(output) in taken:
                raise UsageError(
                    f"step {number} returned a view of its input, of shape {tuple(output.shape)}: return a "
                    "clone of it, or the input itself"
                )

    def _tokens(self, uses: Uses, own: dict[Key, Token]) -> dict[Any, Token]:
        found = {}
        for key in uses.keys:
            token = own.get(key)
            if token is None:
                alias_of = self.outside.outer_of(key)
                outer = key[0].variable if alias_of is None else alias_of
                self.tensors.setdefault(id(outer), (outer, outer._version))
                token = id(outer)
            found[key] = token
        return found

    def check_versions(self, number: int) -> None:
        """Raise ``InplaceError`` if a tensor from outside was changed since the loop ran."""
        for tensor, version in self.tensors.values():
            if tensor._version != version:
                raise InplaceError(
                    f"a tensor of shape {tuple(tensor.shape)} that step {number} uses was changed in place "
                    f"after checkpoint_loop ran (version {tensor._version}; expected {version}): the step "
                    "cannot be run again. Run backward first, or change a clone"
                )


def _input_changed(number: int) -> UsageError:
    return UsageError(
        f"step {number} changed its input in place: a snapshot holds it. Change a clone"
    )


def _address(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return 0
    return tensor.untyped_storage().data_ptr()


def leaves_of(state: StepState) -> StepState:
    """Return the same values as tensors at which graphs end."""
    return state.replaced({id(each): stand_in(each) for each in state.tensors})


def _own_edges(state: StepState, x: StepState) -> dict[Key, Token]:
    """Return the gradient edges of a step's inputs, and the origin of each."""
    found: dict[Key, Token] = {}
    for name, leaves in (("x", x.leaves), ("state", state.leaves)):
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                edge = stock.get_gradient_edge(leaf)
                found.setdefault((edge.node, edge.output_nr), (name, place))
    return found


class Node(torch.autograd.Function):
    """A step's node in the outer graph, with one input for each use of an outside tensor."""

    @staticmethod
    def forward(
        ctx: Any, reverse: Callable[..., Any], outputs: list[Tensor], *uses: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.reverse = reverse
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UsageError(
                "checkpoint_loop has no double backward: create_graph=True would record the replayed "
                "steps forever. Use a plain loop under a Stash instead"
            )
        return (None, None, *ctx.reverse(gradients))
