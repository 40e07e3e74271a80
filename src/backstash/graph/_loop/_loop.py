"""The loop: forward with snapshots, and in backward each step's graph again."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...errors import UsageError
from ...stash import Stash
from ._effects import Effects
from ._progress import LoopProgress
from ._saves import Again, Saves
from ._schedules import Binomial, Schedule, checked_next
from ._state import StepSnapshot, StepState
from ._steps import Evaluation, Node, Stepper, leaves_of
from ._surroundings import Surroundings

__all__ = ["Loop"]

_SLOTS = 32  # snapshots of a loop of unknown length, unless its schedule has a number
_AGAIN = Binomial(24)  # for a second backward, if the graphs were kept for one only


class _Record:
    """What the loop keeps of a step after forward."""

    __slots__ = ("edges", "groups", "kept", "mark", "pattern", "x")

    def __init__(self, x: StepState, found: Evaluation) -> None:
        self.x = x
        self.mark = found.mark
        self.pattern = found.pattern
        self.groups: dict[Any, int] = {}
        """By token: the ``id`` of the outside tensor."""
        self.edges: list[int] = []
        """The ``id`` of the outside tensor of each edge of the node."""
        self.kept: Evaluation | None = None
        """The graph, if it is kept for backward."""

    def backward(
        self, found: Evaluation, gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Return the gradient for each edge of the node, computed by the graph of ``found``."""
        incoming = [pair for pair in zip(found.ends, gradients, strict=True) if pair[1] is not None]
        result: list[Tensor | None] = [None] * len(self.edges)
        if not incoming:
            return result
        free: dict[int, deque[int]] = {}
        for place, group in enumerate(self.edges):
            free.setdefault(group, deque()).append(place)
        for key, gradient in found.uses.backward(*zip(*incoming, strict=True)):
            result[free[self.groups[found.tokens[key]]].popleft()] = gradient
        return result


class Loop:
    """One call of ``checkpoint_loop``. It lives as long as the graph that it created.

    Args:
        stepper: calls the step.
        stash: holds the snapshots, and what a step saves.
        progress: see :class:`LoopProgress`.
    """

    def __init__(
        self,
        stepper: Stepper,
        stash: Stash,
        surroundings: Surroundings,
        *,
        progress: bool | None,
    ) -> None:
        self._stepper = stepper
        self._stash = stash
        self.surroundings = surroundings
        self._lock = threading.RLock()  # for backwards on several threads
        self._following: int | None = None  # the next state to hold in forward
        self._stride = 1
        self._progress_wanted = progress
        self._progress: LoopProgress | None = None
        self.schedule: Schedule = Binomial(1)
        """The schedule, which says which states to hold."""
        self._held: list[tuple[int, StepSnapshot]] = []
        self._records: list[_Record] = []
        # Leaves to which a backward inside step 0 gives gradients.
        self._accumulated: list[Tensor] = []
        self._is_asked = False  # whether a step itself unpacks saved tensors
        self.evaluations = 0
        """The number of evaluations of the step so far, including forward's."""

    # Forward.

    def hold(self, number: int, state: StepState) -> None:
        """Hold the state before step ``number`` as a snapshot."""
        random = self.surroundings.random_state()
        self._held.append((number, StepSnapshot(self._stash, state, random)))

    def hold_if_asked(self, number: int, state: StepState, n: int | None) -> None:
        """Hold the state before step ``number`` in forward, if the schedule requires it."""
        if self.schedule.keeps_graphs:
            return
        if n is None:
            self._hold_online(number, state)
            return
        if self._held[-1][0] == number - 1:
            self._following = checked_next(self.schedule, self._steps_held(), n)
        if number == self._following:
            self.hold(number, state)

    def _hold_online(self, number: int, state: StepState) -> None:
        """Hold evenly spaced states of a loop of unknown length. If no slot is left, drop every second one.

        The distance between two is at most twice the distance of evenly spaced snapshots, for any number of
        steps.
        """
        slots = getattr(self.schedule, "snapshots", _SLOTS)
        if number % self._stride == 0 and len(self._held) >= slots:
            self._stride *= 2
            self._held = [each for each in self._held if each[0] % self._stride == 0]
        if number % self._stride == 0 and len(self._held) < slots:
            self.hold(number, state)

    def advance(
        self,
        number: int,
        state: StepState,
        x: StepState,
        *,
        through_stash: bool,
        copied: Callable[[int, Tensor], Tensor],
    ) -> tuple[StepState, StepState, Evaluation, Saves]:
        """Run step ``number`` forward. Return its state and ``y`` in the outer graph, its evaluation, and its
        saved tensors.

        Args:
            number: the number of the step.
            state: its state, in the outer graph.
            x: its own input, in the outer graph.
            through_stash: whether its saved tensors go to the stash.
            copied: copies a leaf of ``y``, given its position, to its final place.
        """
        with self.surroundings.entered():
            found, saves = self.evaluate(number, state, x, through_stash=through_stash)
        self._records.append(_Record(x, found))
        new, y = self._attach(number, self._records[-1], found, state, x, copied)
        return new, y, found, saves

    def keep(self, number: int, found: Evaluation) -> None:
        """Keep the graph of step ``number`` for backward."""
        self._records[number].kept = found.only_graph()

    def evaluate(
        self,
        number: int,
        state: StepState,
        x: StepState,
        *,
        through_stash: bool,
        again: bool = False,
    ) -> tuple[Evaluation, Saves]:
        """Run step ``number`` with a graph of its own. Return the evaluation and its saved tensors.

        Args:
            through_stash: whether saved tensors go to the stash. Otherwise the graph shows which tensors the
                step uses, and saves nothing.
            again: whether the step ran before, so that its side effects must be undone.
        """
        random = self.surroundings.random_state()
        state, x = leaves_of(state), leaves_of(x)
        is_unseen = False  # whether a part of the step ran whose writes are unknown
        for attempt in range(3):
            # Without a mode PyTorch computes as in a plain loop.
            is_seen = again or attempt or not number
            effects = (
                Effects(self._accumulated, ran_before=number < len(self._records))
                if is_seen
                else None
            )
            saves = Saves(self._stash if through_stash else None, is_asked=self._is_asked)
            is_over = False
            try:
                with saves.entered(effects):
                    self.evaluations += 1
                    found = self._stepper.run(number, state, x)
                is_over = not saves.has_refused
            except Again:
                pass
            except Exception:
                if not saves.has_refused:  # a step may catch the Again
                    raise
            finally:
                if effects is not None and (again or not is_over):
                    effects.undo()
            self._is_asked = self._is_asked or saves.is_asked
            if is_over:
                if is_unseen and effects:
                    raise UsageError(
                        f"step {number} was restarted, because it uses its own saved tensors or a "
                        "tensor computed outside it, and the restart repeated its writes to outside "
                        "memory (.grad, statistics). Make step 0 do the same as this step"
                    )
                if effects is not None and not again:
                    self._accumulated = effects.accumulated
                return found, saves
            is_unseen = is_unseen or effects is None
            random.restore()
        raise AssertionError("a step is run again twice at most")

    def _attach(
        self,
        number: int,
        record: _Record,
        found: Evaluation,
        state: StepState,
        x: StepState,
        copied: Callable[[int, Tensor], Tensor],
    ) -> tuple[StepState, StepState]:
        """Put the step into the outer graph."""
        outer: dict[Any, Any] = {("state", place): leaf for place, leaf in enumerate(state.leaves)}
        outer |= {("x", place): leaf for place, leaf in enumerate(x.leaves)}
        tensors: list[Tensor] = []
        for key in found.uses.keys:
            token = found.tokens[key]
            tensor = outer[token] if isinstance(token, tuple) else self._stepper.tensors[token][0]
            if key in found.uses.casts:
                self._refuse_cached_cast(number, tensor)
            record.groups[token] = id(tensor)
            tensors.append(tensor)
        record.edges = [*map(id, tensors)]
        made = {id(alias): tensor for tensor, alias in self._stepper.outside.pairs()}
        for leaf, tensor in zip(found.inputs, (*state.leaves, *x.leaves), strict=True):
            if isinstance(tensor, Tensor):
                made[id(leaf)] = tensor
        leaves = [*found.state.leaves, *found.y.leaves]
        graph = [leaves[place] for place in found.places]
        if graph:
            own = len(found.state.leaves)
            detached = [
                leaves[place].detach() if place < own else copied(place - own, leaves[place])
                for place in found.places
            ]
            apply: Callable[..., Any] = Node.apply
            results = apply(functools.partial(self._reverse, number), detached, *tensors)
            made |= {id(each): result for each, result in zip(graph, results, strict=True)}
        return found.state.replaced(made), found.y.replaced(made)

    def _refuse_cached_cast(self, number: int, tensor: Tensor) -> None:
        if self.surroundings.casts_are_cached and tensor.grad_fn is None:
            raise UsageError(
                f"step {number} uses a leaf tensor of shape {tuple(tensor.shape)} under autocast with "
                "its cache, which would sum the gradients of that tensor over all steps in the lower "
                "precision: use torch.autocast(..., cache_enabled=False) for exact gradients"
            )

    # Backward.

    def _reverse(self, number: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        with self._lock:
            record = self._records[number]
            self._stepper.check_versions(number)
            found, record.kept = record.kept, None
            if found is None:
                found = self._again(number)
            if self._progress is None:
                self._progress = LoopProgress(number + 1, self._progress_wanted)
            result = record.backward(found, gradients)
            self._progress.done(number, self.evaluations)
            return result

    def _again(self, number: int) -> Evaluation:
        """Return the graph of step ``number``, computed from the last snapshot. Holds new ones."""
        schedule = self.schedule
        if schedule.keeps_graphs:
            schedule = _AGAIN
        while self._held[-1][0] > number:
            self._held.pop()
        with self.surroundings.replaying():
            at, snapshot = self._held[-1]
            state, random = snapshot.load()
            random.restore()
            following = checked_next(schedule, self._steps_held(), number + 1)
            while True:
                found = self._repeat(at, state, through_stash=at == number)
                if at == number:
                    break
                at, state = at + 1, found.state
                if at == following:
                    self.hold(at, state)
                    following = checked_next(schedule, self._steps_held(), number + 1)
        if self._held[-1][0] == number and number:
            self._held.pop()
        return found.only_graph()

    def _repeat(self, number: int, state: StepState, *, through_stash: bool) -> Evaluation:
        record = self._records[number]
        found, _ = self.evaluate(number, state, record.x, through_stash=through_stash, again=True)
        if found.mark != record.mark or found.pattern != record.pattern:
            raise UsageError(
                f"step {number} gave a different result when it was replayed for backward: another "
                "state, other tensors, or other numbers for its gradients. It must depend only on its "
                "inputs and torch's random numbers, and must not return a new leaf that requires a "
                "gradient (x.detach().requires_grad_()); no gradient was computed from it"
            )
        return found

    def _steps_held(self) -> list[int]:
        return [step for step, _ in self._held]
