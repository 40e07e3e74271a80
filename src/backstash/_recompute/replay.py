"""Replay a part of a tape in one pass, freeing each value after its last use.

A replay writes only to memory that it allocates. Its in-place operations write to values that the replay itself
computed. Running statistics are updated in temporary memory, which is then discarded.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from .._saved.view import snapshot
from .._torch.dispatch import (
    below_autograd,
    set_grad_enabled,
    without_autocast,
    without_dispatch_modes,
    without_function_modes,
)
from .._torch.schemas import argument_of
from .._torch.tensors import toggle_bits
from .operations import Made, Op, Outside, Place, Scratch, State, flat
from .settings import Settings, put

__all__ = ["Given", "Timed", "Values", "are_apart", "replay", "run", "view_of"]


def replay(
    targets: Iterable[tuple[State, Place]],
    value: Callable[[Outside], Tensor],
    timed: Timed | None = None,
) -> list[Tensor]:
    """The value of each target, in order.

    Args:
        targets: states, and where in their memory the values lie.
        value: gives an operand that no replay computes.
        timed: gets when each operation began and ended.
    """
    wanted = list(targets)
    places: dict[int, list[Place]] = {}
    for state, place in wanted:
        places.setdefault(state.number, []).append(place)
    values = Values(places, value)
    run(_leading_to([state for state, _ in wanted]), values, timed)
    return [values.found[state.number, place] for state, place in wanted]


class Timed:
    """When the operations of a replay began and ended.

    Args:
        mark: gives a point in time of the device that computes.
    """

    def __init__(self, mark: Callable[[], Any]) -> None:
        self.mark = mark
        self.taken: list[tuple[Op, Any, Any]] = []

    def run(self, op: Op, values: Values) -> None:
        """Call an operation again."""
        began = self.mark()
        values.run(op)
        self.taken.append((op, began, self.mark()))


def run(ops: list[Op], values: Values, timed: Timed | None = None) -> None:
    """Call ``ops``, in order, and let go of each value after its last use."""
    uses: dict[int, int] = {}
    held_uses: dict[int, int] = {}
    for op in ops:
        for read in op.reads:
            uses[read.number] = uses.get(read.number, 0) + 1
        for outside in op.before:
            held_uses[id(outside)] = held_uses.get(id(outside), 0) + 1
    with _alone():
        is_grad_enabled = False
        for settings, together in _runs(ops):
            with put(settings):
                for op in together:
                    if op.is_grad_enabled is not is_grad_enabled:
                        is_grad_enabled = op.is_grad_enabled
                        set_grad_enabled(is_grad_enabled)
                    if timed is None:
                        values.run(op)
                    else:
                        timed.run(op, values)
                    for read in op.reads:
                        uses[read.number] -= 1
                        if not uses[read.number]:
                            values.tensors.pop(read.number, None)
                    for each in op.made:
                        if not uses.get(each.number):
                            values.tensors.pop(each.number, None)
                    for outside in op.before:
                        held_uses[id(outside)] -= 1
                        if not held_uses[id(outside)]:
                            values.held.pop(id(outside), None)


def _leading_to(states: Iterable[State]) -> list[Op]:
    """Return the operations that compute ``states``, in order."""
    todo, seen = list(states), set()
    while todo:
        op = todo.pop().maker
        if op is not None and op not in seen:
            seen.add(op)
            for each in op.reads:
                todo.append(each.state)
    return sorted(seen, key=operator.attrgetter("index"))


def _runs(ops: Iterable[Op]) -> Iterator[tuple[Settings, list[Op]]]:
    """Yield the operations in order, grouped by consecutive equal settings."""
    some: list[Op] = []
    for op in ops:
        if some and some[0].settings is not op.settings:
            yield some[0].settings, some
            some = []
        some.append(op)
    if some:
        yield some[0].settings, some


class Given:
    """An operand that the caller passes to a replay, identified by its index."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


_OPERANDS = frozenset(
    (Given, Made, Outside, Scratch, list, tuple)
)  # arguments that are, or may have, operands


class Values:
    """The live values of a replay.

    Args:
        places: for each state's number, the places in its memory that the caller wants.
        unpack: return the tensor of an operand that no replay computes.
    """

    def __init__(self, places: dict[int, list[Place]], unpack: Callable[[Outside], Tensor]) -> None:
        self._places = places
        self._unpack = unpack
        self.given: Sequence[Tensor] = ()
        self.tensors: dict[int, Tensor] = {}
        """A tensor with the memory of a state, by the state's number."""
        self.held: dict[int, Tensor] = {}
        """Unpacked tensors by the ``id`` of their :class:`Outside`."""
        self.found: dict[tuple[int, Place], Tensor] = {}
        """The wanted values."""
        self._views: dict[int, list[tuple[int, Place]]] = {}
        """By the number of a memory's latest state: the wanted values that are views of that memory."""

    def run(self, op: Op) -> None:
        """Call an operation again and record what it computes."""
        written: list[Made] = []
        for each in op.made:
            if each.argument is not None:
                written.append(argument_of(op.args, op.kwargs, each.argument))
        views: list[tuple[int, Place]] = []
        for number in {before.number for before in written}:
            for which in self._views.pop(number, ()):
                if all(are_apart(which[1], before.place) for before in written):
                    views.append(which)
                else:  # it is about to be overwritten
                    self.found[which] = snapshot(self.found[which])
        args = []
        for argument in op.args:
            args.append(self._value(argument) if type(argument) in _OPERANDS else argument)
        kwargs = {}
        for name, argument in op.kwargs.items():
            kwargs[name] = self._value(argument) if type(argument) in _OPERANDS else argument
        result = op.func(*args, **kwargs)
        results = (result,) if type(result) is Tensor else flat(result)
        for each in op.made:
            if each.argument is None:
                tensor = results[each.result]
            else:
                tensor = argument_of(args, kwargs, each.argument)
            tensor.untyped_storage()  # raises if a transform of torch.func is active, whose results have none
            self.tensors[each.number] = tensor
            found = [(each.number, place) for place in self._places.get(each.number, ())]
            for which in found:
                self.found[which] = _at(tensor, which[1])
            if each.argument is not None:
                views += found
                found = views  # of any memory that it has written to
            if found:
                self._views[each.number] = found

    def _value(self, operand: Any) -> Any:
        kind = type(operand)
        if kind is Made:
            return _at(self.tensors[operand.number], operand.place)
        if kind is Given:
            return self.given[operand.index]
        if kind is Outside:
            known = self.held.get(id(operand))
            if known is None:
                known = self.held[id(operand)] = self._unpack(operand)
            return known
        if kind is Scratch:
            return torch.zeros(operand.place[1], dtype=operand.place[0], device=operand.device)
        if kind is list or kind is tuple:
            return kind([self._value(each) for each in operand])
        return operand


def are_apart(one: Place, other: Place) -> bool:
    """Whether two tensors in one memory are known to have no element in common.

    That is so where one ends before the other begins, and where they are in other columns of the same rows, as
    the gates of a cell are in one product.
    """
    if one[0].itemsize != other[0].itemsize:
        return False
    row, spans = 0, list[tuple[int, int, int]]()
    for _, shape, stride, offset, *_ in (one, other):
        if 0 in shape:
            return True
        width, last = 1, 0  # elements in a row without gaps, and the place of the last element
        for step, length in sorted(zip(stride, shape, strict=True)):
            last += (length - 1) * step
            if step <= width:
                width += (length - 1) * step
            elif length > 1:
                row = math.gcd(row, step)
        spans.append((offset, offset + last, width))
    (first, end, width), (other_first, other_end, other_width) = spans
    if end < other_first or other_end < first:
        return True
    if not row:
        return False
    begin, other_begin = first % row, other_first % row
    if begin + width > row or other_begin + other_width > row:
        return False
    return begin + width <= other_begin or other_begin + other_width <= begin


def _at(tensor: Tensor, place: Place) -> Tensor:
    """Return a tensor at ``place`` in the memory of ``tensor``."""
    dtype, shape, stride, offset, _, neg = place
    if tensor.dtype is dtype and not (neg or dtype.is_complex or tensor.is_neg()):
        if (
            tensor.shape == shape
            and tensor.stride() == stride
            and tensor.storage_offset() == offset
        ):
            return tensor
        return tensor.as_strided(shape, stride, offset)
    return view_of(tensor.untyped_storage(), tensor.device, place)


def view_of(storage: torch.UntypedStorage, device: torch.device, place: Place) -> Tensor:
    """Return a tensor at ``place`` in ``storage``."""
    dtype, shape, stride, offset, conj, neg = place
    view = torch.empty(0, dtype=dtype, device=device).set_(storage, offset, shape, stride)
    return toggle_bits(view, conj=conj, neg=neg) if conj or neg else view


@contextmanager
def _alone() -> Iterator[None]:
    """Disable what PyTorch puts between a call and its kernel: modes, autocast, autograd."""
    with ExitStack() as stack:
        stack.enter_context(without_function_modes())
        stack.enter_context(without_dispatch_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(below_autograd())
        stack.enter_context(without_autocast())
        yield
