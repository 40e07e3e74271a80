"""Routes: what a forward of a module did, with which its next forwards are compared.

Most forwards of a module do what the one before did. Then the tape makes no objects for an operation: it checks
that the operation, its arguments and the places of its operands are those of the route, and takes the route's
states for its results. Of an operation that no replay runs only the name is compared, and what it computes is
as the program's own. A tensor that is to be discarded is looked up by the number of the save.

States, operations and operands have no values (the tape has them), so forwards can share them, on
several threads, too. Where a forward differs, its tape records from there on as if there were no route: it has
the same objects that it would have made itself.

Deciding once and comparing afterwards is how TransformerEngine and Megatron-Core offload activations; there,
the saves are counted and not the operations.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._saved.held import Held
from .._torch.autocast import is_autocast_near
from .._torch.modules import is_running
from .._torch.schemas import has_complex, tensors_of
from .._torch.storages import storage_identity, storage_of
from .._torch.streams import current_stream
from .holding import HoldingTape
from .operations import (
    Ints,
    Made,
    Memory,
    Needs,
    Op,
    Outside,
    Place,
    RawStep,
    Scratch,
    State,
    Write,
    WriteOp,
    flat,
    place_of,
)
from .settings import ON_CPU, now
from .tape import LOOKED_EVERY, PLAIN, UNSEEN

__all__ = ["Discard", "ForwardTape", "Route", "Routes"]

_MOST_STEPS = 4096
_MOST_ROUTES = 8
_MOST_MISSES = 3
_CONSTANTS = (
    int, bool, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


class Known:
    """A tensor among the arguments of a route's operation."""

    __slots__ = ("is_first", "outside", "place", "state")

    def __init__(self, state: State, place: Place, outside: Outside | None = None) -> None:
        self.state = state
        self.place = place
        self.outside = outside
        """Set if no replay computes it. Each forward has a value of its own for it."""
        self.is_first = False
        """Whether the forward uses this memory here for the first time."""


class RouteOp:
    """An operation of a route."""

    __slots__ = (
        "args",
        "device_index",
        "func",
        "has_new_root",
        "index",
        "is_grad_enabled",
        "is_needed",
        "is_plain",
        "kwargs",
        "settings",
        "states",
        "states_after",
        "written",
    )

    def __init__(self, raw: RawStep, known: Callable[[Any], Any], *, is_needed: bool) -> None:
        op = raw.op
        self.func = op.func
        self.index = op.index
        self.is_needed = is_needed
        """Whether a replay runs it. The arguments of others do not matter: what they compute is held."""
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        if is_needed:
            self.args = tuple(known(each) for each in op.args)
            self.kwargs = {name: known(each) for name, each in op.kwargs.items()}
        self.is_plain = raw.is_plain
        """Whether no kernel of it computes lazy conjugates, if no operand is complex."""
        self.has_new_root = raw.has_new_root
        """See :attr:`RawStep.has_new_root`."""
        self.settings = op.settings
        self.is_grad_enabled = op.is_grad_enabled
        self.states = tuple(raw.states) if is_needed else _without_makers(raw.states)
        """Of its results; ``None``: as the program's own."""
        self.written = tuple(raw.written)
        self.states_after = raw.ended
        """How many states there are after it."""
        made = [each for each in (*raw.states, *(each[3] for each in raw.written)) if each]
        device = made[0].device if made else torch.device("cpu")
        self.device_index = -1 if device.type == "cpu" else device.index or 0
        """Of its accelerator; -1: of the CPU."""


_ABSENT = object()


def _without_makers(states: Sequence[State | None]) -> tuple[State | None, ...]:
    """Those states that no replay makes, such as random numbers'; an empty tuple if there are none."""
    found = tuple(each if each is not None and each.maker is None else None for each in states)
    return found if any(found) else ()


class Discard(NamedTuple):
    """A save that a route discards."""

    state: State
    place: Place
    needed: tuple[Outside, ...]
    """Operands to hold first."""
    ops: tuple[Op, ...]
    """The operations that read them."""
    after: frozenset[Op]
    """The operations before these: their operands must be held already."""


_NO_DISCARDS: Mapping[int, Discard] = {}


class Route:
    """What a forward did.

    Args:
        tape: of the forward.
    """

    def __init__(self, tape: ForwardTape) -> None:
        self.saves = tape.saves
        self.given = tape.given
        self.large = tape.large
        self.misses = 0
        """The number of forwards that differed."""
        self._states = tape.outside_states
        self._needed = {op for each in self.saves.values() for op in each.ops}
        self._seen = {each for state, each in self.given.items() if state.maker in self._needed}
        self.steps = [self._step(each) for each in tape.steps or ()]
        del self._states, self._seen, self._needed

    def _step(self, raw: RawStep) -> RouteOp:
        step = RouteOp(raw, self._known, is_needed=raw.op in self._needed)
        self._seen.update(each for each in step.states if each is not None)
        written = [each[3] for each in raw.written]
        self._seen.update(each for each in written if step.is_needed or each.maker is None)
        return step

    def _known(self, argument: Any) -> Any:
        kind = type(argument)
        if kind is Made:
            return Known(argument.state, argument.place)
        if kind is Outside:
            state = self._states[argument]
            if state is None:
                raise _NoRouteError  # its memory cannot be identified
            known = Known(state, argument.kind[0], argument)
            known.is_first = state not in self._seen
            self._seen.add(state)
            return known
        if kind is Ints:
            return argument
        if kind is list or kind is tuple:
            return kind([self._known(each) for each in argument])
        if kind is not Scratch and not isinstance(argument, _CONSTANTS):
            raise _NoRouteError
        return argument


class _NoRouteError(Exception):
    """A route cannot have this operation."""


class Routes:
    """The routes of one module, by the first operation's operands and by what the plan keeps."""

    def __init__(self) -> None:
        self._routes: dict[Any, Route | None] = {}

    def find(self, key: Any) -> Route | None:
        """Return the route for ``key``; ``None`` if there is none, or too many forwards differed from it."""
        route = self._routes.get(key)
        return route if route is not None and route.misses < _MOST_MISSES else None

    def may_add(self, key: Any) -> bool:
        """Whether a forward that begins so may become a route."""
        return key not in self._routes and len(self._routes) < _MOST_ROUTES

    def forget(self, key: Any) -> None:
        """Let the next forward that begins so make a route of its own."""
        self._routes.pop(key, None)

    def add(self, key: Any, tape: ForwardTape) -> None:
        """Make a route of a forward, for those that begin so."""
        if tape.steps is not None and key is not None and self.may_add(key):
            try:
                made = Route(tape) if len(tape.steps) <= _MOST_STEPS else None
            except _NoRouteError:
                made = None
            self._routes[key] = made


class ForwardTape(HoldingTape):  # type: ignore[no-untyped-call]
    """The tape of a module's forward, which follows a route or makes one.

    Args:
        routes: of the module; ``None``: it only records.
        kept: the numbers of the saves that the plan keeps.
    """

    def __init__(self, routes: Routes | None = None, kept: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self._routes, self._kept = routes, kept
        self.may_follow = routes is not None
        self._key: Any = None
        self.route: Route | None = None
        """The route that it follows."""
        self._at = 0  # the number of the route's operations that it has followed
        self.discards: Mapping[int, Discard] = _NO_DISCARDS
        """What the route that it follows discards, by the number of the save."""
        self.saves: dict[int, Discard] = {}
        """What the route that it makes will discard."""
        self.large = frozenset[int]()
        """Numbers of the saves that were large enough to be discarded, in the forward that made the route."""

    def _begin(self, func: Any, args: Any) -> Route | None:
        """Return the route to follow. If there is none, begin to make one."""
        routes = self._routes
        assert routes is not None
        try:
            places = [place_of(each) for each in args if isinstance(each, Tensor)]
            self._key = func, self._kept, *places
            self.route = routes.find(self._key)
            if self.route is not None:
                self.given, self.discards = self.route.given, self.route.saves
                self.large = self.route.large
            elif routes.may_add(self._key):
                self.steps = []
        except (RuntimeError, TypeError):
            pass  # a tensor without strides; sizes that have no hash
        return self.route

    def _differ(self) -> Any:
        """Follow no route from here on."""
        if self.route is not None:
            self.route.misses += 1
            self.given, self.discards = self.given.copy(), _NO_DISCARDS
        self.route, self.may_follow = None, False
        return NotImplemented

    def _follow(self, func: Any, operation: Any, types: Any, args: Any, kwargs: Any) -> Any:
        route, at = self.route, self._at
        if route is None and not self._count:
            route = self._begin(func, args)
        if route is None or at >= len(route.steps):
            return self._differ()
        if not at % LOOKED_EVERY and self.frame is not None and not is_running(self.frame):
            return self._differ()
        if self._written:
            self._end_writes()
        step = route.steps[at]
        if func is not step.func or not PLAIN.issuperset(types):
            return self._differ()
        if step.is_needed and not self._is_as(step, args, kwargs):
            return self._differ()
        if operation.is_seen_by_bits and self._bits.may_differ(func, args, depth=3):
            return self._differ()
        if operation.may_autocast and step.is_needed and is_autocast_near():
            return self._differ()
        writes: list[WriteOp] = []
        in_training = operation.train_at >= 0 and operation.writes_statistics(args)
        if step.written or operation.writes or in_training:
            writes, why = self._writes_of(operation, args, kwargs, "", in_training=in_training)
            if (why and step.is_needed) or not _are_as(writes, step.written):
                return self._differ()
            self._begin_writes(writes)
        try:
            if step.is_plain and step.is_needed:
                result = func(*args, **kwargs)
            else:
                has_bits = operation.makes_bits or has_complex(args)
                if step.is_plain and not (has_bits or kwargs):
                    result = func(*args, **kwargs)
                else:
                    result = self._call(operation, args, kwargs, has_bits)
            if operation.is_seen_by_bits:
                self._bits.note_clone(func, args, result, depth=3)
        except BaseException:
            self._differ()  # the program may call it again, with other operands
            self._fail_writes(writes)
            raise
        self._at, self._count, self._states = at + 1, step.index + 1, step.states_after
        for each, (*_, state) in zip(writes, step.written, strict=True):
            if each.tensor.untyped_storage().nbytes() != each.nbytes:
                state = State(each.tensor.device, f"{operation.name} resized its memory")
            elif not step.is_needed and state.maker is not None:
                state = State(each.tensor.device, UNSEEN)
            each.memory.state = state
        if step.states or step.has_new_root:
            self._take_results(step, args, (result,) if type(result) is Tensor else flat(result))
        if (recorded := self.recorded) is not None:
            self.recorded = None
            recorded()
        return result

    def _is_as(self, step: RouteOp, args: Any, kwargs: Any) -> bool:
        """Whether an operation has the arguments of ``step``, and the settings."""
        if torch.is_grad_enabled() is not step.is_grad_enabled or len(args) != len(step.args):
            return False
        if not step.is_grad_enabled and not self._may_replay_here():
            return False
        if not self._are_operands(zip(args, step.args, strict=True)):
            return False
        if kwargs or step.kwargs:
            if len(kwargs) != len(step.kwargs):
                return False
            for name, value in kwargs.items():
                known = step.kwargs.get(name, _ABSENT)
                if value is not known and not self._is_same(value, known):
                    return False
        settings = step.settings
        if step.device_index >= 0:
            stream = current_stream(step.device_index)
            if self._stream is None:
                self._stream = stream
            elif stream != self._stream:
                return False
        return now(on_accelerator=len(settings) > ON_CPU) == settings

    def _are_operands(self, pairs: Iterable[tuple[Any, Any]]) -> bool:
        """Whether arguments are those of the route."""
        memories, held = self._memories, self._held
        for value, known in pairs:
            if value is known:
                continue
            kind = type(known)
            if kind is not Known or type(value) not in PLAIN:
                if kind is Ints:
                    if type(value) is not list or value != known:
                        return False
                elif kind is Scratch and type(value) in PLAIN:
                    if place_of(value) != known.place:  # their type decides which kernel runs
                        return False
                elif kind is float and type(value) is float and value and value == known:
                    continue  # 0.0 is not -0.0: see _is_same()
                elif kind is Known or not self._is_same(value, known):
                    return False
                continue
            try:
                if known.place != (
                    value.dtype,
                    value.shape,
                    value.stride(),
                    value.storage_offset(),
                    value.is_conj(),
                    value.is_neg(),
                ):
                    return False
                storage = value.untyped_storage()
                memory = memories.get(storage_identity(storage))
                base = value._base
                if (
                    memory is None
                    or memory() is None
                    or (
                        # The usual case of Memory.shows(), without its calls.
                        (
                            memory.others
                            or value._version != memory.version
                            or weakref.ref(value if base is None else base) is not memory.root
                        )
                        and not memory.shows(value)
                    )
                ):
                    if not self._is_first(value, storage, known):
                        return False
                elif memory.state is not known.state:
                    return False
            except (NotImplementedError, RuntimeError):  # it has no storage, strides, or version
                return False
            outside = known.outside
            if outside is not None and outside not in held:
                self.tensors.setdefault(outside, value)
        return True

    def _is_same(self, value: Any, known: Any) -> bool:
        """Whether an argument is the one of the route."""
        kind = type(value)
        if type(known) is Known:
            return kind in PLAIN and self._are_operands(((value, known),))
        if kind is not type(known):
            return False
        if kind is list or kind is tuple:
            if len(value) != len(known):
                return False
            return self._are_operands(zip(value, known, strict=True))
        if value and kind is not complex:
            return bool(value == known)
        return repr(value) == repr(known)  # 0.0 is not -0.0

    def _is_first(self, tensor: Tensor, storage: torch.UntypedStorage, known: Known) -> bool:
        """Whether the tape sees the tensor's memory for the first time, as the route did; then record it.

        Which memory it is does not matter, as long as no other has the state: each forward holds its own."""
        if not known.is_first or tensor.layout is not torch.strided:
            return False
        if tensor.device != known.state.device:
            return False
        identity = storage_identity(storage)
        memory = self._memories.get(identity)
        if memory is None or memory() is None:
            self._know(storage, identity, known.state, tensor)
        elif memory.others:
            return False  # begin() would forget them
        else:
            memory.begin(tensor, known.state)
        return True

    def _take_results(self, step: RouteOp, args: Any, results: Sequence[Tensor]) -> None:
        """Give the results the states of ``step``. Any other result is as the program's own."""
        memories = self._memories
        states = step.states if len(step.states) == len(results) else (None,) * len(results)
        for tensor, state in zip(results, states, strict=True):
            try:
                storage = tensor.untyped_storage()
            except (NotImplementedError, RuntimeError):  # see storage_of()
                continue
            identity = storage_identity(storage)
            memory = memories.get(identity)
            if memory is not None and memory() is not None:
                # Memory of an argument or of an earlier result, as in _add_results().
                if step.has_new_root:
                    self._share(memory, tensor, args)
                continue
            if step.has_new_root and self._share_first(tensor, storage, args):
                continue
            if state is None:
                continue
            if len(memories) >= self._sweep_at:
                self._know(storage, identity, state, tensor, is_made=True)
                continue
            memory = memories[identity] = Memory(storage)
            memory.state, memory.is_made, memory.is_written, memory.others = state, True, False, ()
            memory.root = weakref.ref(tensor)
            memory.version = 0 if tensor.is_inference() else tensor._version

    def _share_first(self, tensor: Tensor, storage: torch.UntypedStorage, args: Any) -> bool:
        """Record a result with the memory of an argument that the tape has not looked at. Return whether there
        is one."""
        for each in tensors_of(args):
            if storage_of(each) is storage and (memory := self._memory(each)) is not None:
                memory.add(tensor)
                return True
        return False

    # What a route is made of.

    def note_discarded(self, number: int, state: State, place: Place) -> None:
        """Record that the save of this number was discarded, after :meth:`want`."""
        if self.steps is not None:
            ops = self._latest
            before = {state.maker, *(each.state.maker for op in ops for each in op.reads)}
            self.saves[number] = Discard(
                state,
                place,
                tuple(dict.fromkeys(each for op in ops for each in op.before)),
                tuple(ops),
                frozenset(each for each in before.difference(ops) if each is not None),
            )

    def note_large(self, number: int) -> None:
        """Record that this save is large enough to be discarded.

        If the route's was not, what it was computed from may count as the program's own there, so the next
        forward makes another route.
        """
        if self.route is not None and self._routes is not None:
            self._routes.forget(self._key)
            self._differ()
        self.large |= {number}

    def is_as(self, discard: Discard, tensor: Tensor) -> bool:
        """Whether ``tensor``, whose operation has filled it, is what the route discards so."""
        # The place as in place_of(), without its call.
        if type(tensor) is not Tensor or not tensor.requires_grad:
            return False
        try:
            memory = self._memories.get(storage_identity(tensor.untyped_storage()))
        except (NotImplementedError, RuntimeError):  # see storage_of()
            return False
        base = tensor._base
        root = weakref.ref(tensor if base is None else base)
        return (
            memory is not None
            and memory.state is discard.state
            and memory() is not None
            and (
                (not memory.others and tensor._version == memory.version and root is memory.root)
                or memory.shows(tensor)
            )
            and discard.place
            == (
                tensor.dtype,
                tensor.shape,
                tensor.stride(),
                tensor.storage_offset(),
                tensor.is_conj(),
                tensor.is_neg(),
            )
            and self._needs.keys() >= discard.after
        )

    def discard_of(self, number: int, held: Held) -> Discard | None:
        """Return the route's discard for the save of this number, which was filled later, if it is this."""
        found = self.discards.get(number)
        if found is None or found.state is not held.state or found.place != held.place:
            return None
        return found if self._needs.keys() >= found.after else None

    def hold_for(
        self,
        discard: Discard,
        tensor: Tensor,
        pack: Callable[[Tensor, bool], object],
    ) -> Needs | str:
        """Hold what a replay of ``discard`` needs, after :meth:`is_as`. Return it, or why that fails."""
        needed, held, known = discard.needed, self._held, self._needs
        if needed and (reason := self.hold(needed, tensor, pack)):
            return reason
        own: dict[Outside, list[Any]] = {}
        before: list[Needs] = []
        for operand in needed:
            own[operand] = held[operand]
        for op in discard.after:
            before.append(known[op])
        needs = Needs(own, before)
        for op in discard.ops:
            known[op] = needs
        return needs

    def make_route(self) -> None:
        """Make a route of this forward."""
        if self._routes is not None:
            self._routes.add(self._key, self)


def _are_as(writes: Sequence[WriteOp], written: Sequence[Write]) -> bool:
    """Whether an operation's writes are those of a route."""
    if len(writes) != len(written):
        return False
    for one, (place, fills, is_statistic, _) in zip(writes, written, strict=True):
        if (one.place, one.fills, one.is_statistic) != (place, fills, is_statistic):
            return False
    return True
