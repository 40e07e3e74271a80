"""The tape: a record of operations, from which a part can be replayed.

A dispatch mode sees each operation below autograd: with its actual arguments, after autocast, and after
composite operations were decomposed. The tape records those that can be replayed. It never runs the program's
own code, so side effects of the program do not happen twice.

The tape identifies memory by its storage and forgets a storage when it dies (a weak reference's callback). A
*state* is the bytes of a storage between two writes; an in-place write makes a new state from the old one.
Views need no operation: an operand is a state and its place in that memory.

An operand that no replay can compute is *outside*: a parameter, a module's input, random numbers, the output of
one of the program's own kernels. A tape refers to no intermediate result.

Replaying what a dispatch mode recorded is this project's idea. Discarding results and recomputing them
operation by operation, chosen while the program runs, comes from DTR (Kirisame et al., ICLR 2021).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from .._torch.autocast import is_autocast_near, kernel_of
from .._torch.dispatch import (
    SilentMode,
    dispatch_modes,
    dual_level,
    innermost_mode,
    pause_mode,
    push_mode,
    resume_mode,
    take_off,
    with_lazy_bits,
)
from .._torch.engine import current_node, in_backward, queue_callback, task_or_none
from .._torch.mode_bits import NODES_THAT_DIFFER, ModeBits, is_in_func_grad, is_in_jvp
from .._torch.modules import is_running
from .._torch.schemas import (
    ALLOCATES,
    RANDOM,
    STATISTICS,
    Operation,
    argument_of,
    has_complex,
    is_of_operator,
    operation_of,
    operations,
    tensors_of,
)
from .._torch.storages import storage_identity, storage_of
from ..errors import UsageError
from .declared import is_declared
from .operations import (
    Ints,
    Made,
    Memory,
    Op,
    Outside,
    Place,
    Product,
    RawStep,
    Scratch,
    State,
    WriteOp,
    flat,
    place_of,
)
from .settings import Settings, now

__all__ = [
    "ALIAS",
    "CHANGED",
    "LOOKED_EVERY",
    "PLAIN",
    "UNSEEN",
    "Leaver",
    "Tape",
    "leave_for_backward",
]

CHANGED = "its input was changed in place"
ALIAS = "a tensor that shares its memory may have been written to unseen"
UNSEEN = "the operation that computed it was not recorded"
_SUBCLASS = "a tensor subclass computed it"
_IN_FUNCTION = "an autograd.Function computed it"
_PRODUCT = "{} is expensive to repeat: pass its module to recompute()"
_OTHERWISE = "PyTorch computes it differently while operations are recorded"
_NODE = (
    "{} of a backward inside of a forward computes differently while the forward is recorded: what it reads "
    "was saved without the stash's hooks (before the forward, under hooks of the program's own, or in "
    "torch.func.vjp, jacrev or hessian). Compute it outside of what is recomputed or planned, or give "
    "Stash(recompute=False)"
)
_TANGENT = (
    "forward-mode AD inside of a forward computes the tangent of {} differently while the forward is recorded: "
    "compute it outside of what is recomputed or planned, or give Stash(recompute=False)"
)
_CAST = "its kernel may call what torch.autocast handles, which a replay does not use"
_OTHER_STREAM = "it was made on another stream"
_ANY_ORDER = "{} may add in a different order each time"
PLAIN = frozenset((Tensor, torch.nn.Parameter))
_NONE: frozenset[int | str] = frozenset()
_LEAST_SWEPT = 64  # storages that a tape has seen, of which the dead are forgotten
LOOKED_EVERY = 32  # operations between two checks that the forward still runs


class Tape(SilentMode):
    """Record operations between :meth:`enter` and :meth:`leave`.

    Subclasses decide what becomes of operands that no replay computes."""

    is_of_context = False
    """Whether it records a whole context, and not one module's forward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memories = dict[int, Memory]()
        self._sweep_at = _LEAST_SWEPT
        self._count = self._states = 0
        self._written: Sequence[Memory] = ()  # by the latest operation
        self._outer_writes = 0  # how often one has written to memory that no operation has made
        # Whether a result of it shares memory with an argument, but not the version counter.
        self._has_new_root = False
        self._task = task_or_none()
        self._stream: Any = None
        self._detached: Any = None
        """The tensor that was detached since the latest operation. In ``(y - x).detach()`` the program holds
        it no longer, and only its version shows that nothing has written to the memory."""
        self._bits = ModeBits()
        self._is_complex = False  # whether an operand of the latest operation is complex
        self._settings: Settings = ()
        self._settings_hash = 0
        self.may_follow = False
        """Whether :meth:`_follow` is asked for each operation."""
        self.steps: list[RawStep] | None = None
        """What a route is made of; ``None``: none is."""
        self.is_recording = True
        self.frame: FrameType | None = None
        """Frame of the module call that it records."""
        self.recorded: Callable[[], None] | None = None
        """Called once, after the next operation."""

    def enter(self) -> None:
        """Start recording what this thread computes."""
        push_mode(self)

    def leave(self) -> None:
        """Stop recording, even if other modes were entered since and are still active."""
        take_off(self)

    def aside(self) -> _Aside:
        """Pause recording inside the context; if this is the innermost mode, also pop it."""
        return _Aside(self)

    def end(self) -> None:
        """Stop recording, and free what is not needed.

        Raises:
            UsageError: see :meth:`ModeBits.look`.
        """
        self.stop()
        self._bits.look()

    def stop(self) -> None:
        """Stop recording as :meth:`end` does, without raising."""
        self.is_recording = False
        self.recorded = self._detached = None
        self._memories.clear()
        self.may_follow, self.steps = False, None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See ``TorchDispatchMode``."""
        kwargs = kwargs or {}
        if (
            dual_level() >= 0
            and (operations.get(id(func)) or operation_of(func)).has_other_tangents
        ):
            if not is_in_jvp(sys._getframe(1)):
                raise UsageError(_TANGENT.format(func))
        # In a backward, perhaps on another thread, the tape may still be active. A context's tape skips what is
        # computed without a graph: only saved tensors matter, and version counters show writes to known memory.
        if (
            not self.is_recording
            or task_or_none() != self._task
            or (self.is_of_context and not torch.is_grad_enabled())
        ):
            return self._pass(func, args, kwargs)
        if self.may_follow and dual_level() >= 0:
            self._differ()
        if self.may_follow:
            operation = operations.get(id(func)) or operation_of(func)
            if not operation.is_view:
                result = self._follow(func, operation, types, args, kwargs)
                if result is not NotImplemented:
                    self._detached = None
                    return result
            elif args and type(viewed := args[0]) in PLAIN and not viewed.is_complex():
                if func is _DETACH:
                    self._detached = viewed
                if not operation.makes_bits:
                    return func(*args, **kwargs)
        if self._bits.vectors:
            self._bits.look()
        if not self._count % LOOKED_EVERY and self.frame and not is_running(self.frame):
            self.end()  # an interrupt ended the forward
        operation = operations.get(id(func)) or operation_of(func)
        if operation.is_view or not self.is_recording:
            viewed = args[0] if args else None
            if func is _DETACH:
                self._detached = viewed
            if type(viewed) is Tensor:
                has_bits = viewed.is_complex()
            else:
                has_bits = has_complex(args)
            return self._call(operation, args, kwargs, has_bits or operation.makes_bits)
        for each in types:
            if each is not Tensor and each is not torch.nn.Parameter:
                has_bits = operation.makes_bits or has_complex(args)
                result = self._call(operation, args, kwargs, has_bits)
                self._forget(operation, args, kwargs)
                break
        else:
            result = self._record(func, operation, args, kwargs)
        self._detached = None
        if (recorded := self.recorded) is not None:
            self.recorded = None
            recorded()
        return result

    def _pass(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._bits.vectors:
            self._bits.look()
        if task_or_none() not in (-1, self._task):
            name = type(current_node()).__name__
            if name in NODES_THAT_DIFFER and not is_in_func_grad(sys._getframe(2)):
                raise UsageError(_NODE.format(name))
        operation = operations.get(id(func)) or operation_of(func)
        with kernel_of(operation, args, kwargs):
            result = func(*args, **kwargs)
            if operation.lacks_formula:
                operation.check_formula(args, kwargs, result)
            return self._bits.saw(func, args, kwargs, result, depth=3)

    # Recording.

    def _follow(self, func: Any, operation: Operation, types: Any, args: Any, kwargs: Any) -> Any:
        """Call an operation that need not be recorded, and return its result; else ``NotImplemented``."""
        return NotImplemented

    def _differ(self) -> Any:
        """Follow no route from here on."""
        self.may_follow = False
        return NotImplemented

    def _call(self, operation: Operation, args: Any, kwargs: Any, has_bits: bool) -> Any:
        """Call an operation. ``has_bits``: its kernel may compute lazy conjugates, which of real numbers only
        some do."""
        if has_bits or operation.writes_inside or operation.may_autocast or dual_level() >= 0:
            with kernel_of(operation, args, kwargs):
                result = operation.func(*args, **kwargs)
        else:
            result = operation.func(*args, **kwargs)
        if operation.lacks_formula:
            operation.check_formula(args, kwargs, result)
        return result

    def _record(self, func: Any, operation: Operation, args: Any, kwargs: Any) -> Any:
        if self._written:
            self._end_writes()
        reason = operation.reason
        if reason and operation.dropout and operation.is_random:
            if not any(argument_of(args, kwargs, each) for each in operation.dropout):
                reason = ""
        if not reason and not torch.is_grad_enabled() and not self._may_replay_here():
            reason = _IN_FUNCTION
        if not reason and operation.is_product and self.is_of_context:
            reason = _PRODUCT.format(operation.name)
        in_training = operation.train_at >= 0 and operation.writes_statistics(args)
        writes: list[WriteOp] = []
        if operation.writes or in_training:
            writes, reason = self._writes_of(
                operation, args, kwargs, reason, in_training=in_training
            )
        op = Op(func, self._count)
        self._count += 1
        kinds: list[Any] = [id(func)]
        why, self._is_complex = reason, False
        if not reason:
            unread = frozenset(each.place for each in writes if each.fills) if writes else _NONE
            op.args = self._operands(
                enumerate(args), op, kinds, unread, STATISTICS if in_training else _NONE
            )
            if kwargs:
                kinds += kwargs
                values = self._operands(kwargs.items(), op, kinds, unread)
                op.kwargs = dict(zip(kwargs, values, strict=True))
        self._begin_writes(writes)
        has_bits = operation.makes_bits or (self._is_complex if not why else has_complex(args))
        try:
            result = self._call(operation, args, kwargs, has_bits)
        except BaseException:
            self._fail_writes(writes)
            raise
        if operation.is_seen_by_bits:
            found = result
            with with_lazy_bits():
                result = self._bits.saw(func, args, kwargs, found, depth=3)
            if result is not found:
                reason = reason or _OTHERWISE
        if not reason and operation.may_autocast and is_autocast_near():
            reason = _CAST
        if not reason:
            reason = self._reason_of(operation, op, args, result)
        key = 0
        if not reason:
            op.settings = self._settings_now(on_accelerator=self._stream is not None)
            kinds.append(self._settings_hash)
            key = hash(tuple(kinds))
        for each in writes:
            why = reason or (CHANGED if each.is_statistic else "")
            if each.tensor.untyped_storage().nbytes() != each.nbytes:
                why = why or f"{operation.name} resized its memory"
            each.memory.state = self._made(
                op, each.tensor.device, why, hash((key, each.place)), argument=each.place
            )
        states = self._add_results(operation, op, args, result, reason, key)
        if self.steps is not None:
            written = [
                (each.place, each.fills, each.is_statistic, each.memory.state) for each in writes
            ]
            is_plain = not (
                has_bits
                or operation.makes_bits
                or operation.writes_inside
                or operation.may_autocast
            )
            step = RawStep(op, reason, states, written, is_plain, self._has_new_root, self._states)
            self.steps.append(step)
        return result

    def _writes_of(
        self, operation: Operation, args: Any, kwargs: Any, reason: str, *, in_training: bool
    ) -> tuple[list[WriteOp], str]:
        """Return the writes that an operation is about to do, and why its results cannot be replayed."""
        places = (*operation.writes, *STATISTICS) if in_training else operation.writes
        found: list[WriteOp] = []
        for place in places:
            is_given = type(place) is int and place < len(args)
            given = args[place] if is_given else argument_of(args, kwargs, place)
            tensors = [given] if isinstance(given, Tensor) else [*tensors_of(given)]
            if len(tensors) > 1 or (tensors and given is not tensors[0]):
                reason = reason or f"{operation.name} writes to several tensors"
            for tensor in tensors:
                memory = self._memory(tensor, is_written=True)
                if memory is None:
                    reason = reason or UNSEEN
                    continue
                fills = (operation.fills or place in operation.out) and (
                    tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
                )
                before = memory.state.reason
                is_statistic = in_training and place in STATISTICS
                if before and not is_statistic and not (fills and before == ALLOCATES):
                    reason = reason or before
                found.append(
                    WriteOp(
                        place,
                        tensor,
                        memory,
                        tensor.untyped_storage().nbytes(),
                        fills,
                        is_statistic,
                    )
                )
        return found, reason

    def _begin_writes(self, writes: Sequence[WriteOp]) -> None:
        """Before an operation writes, copy what a replay needs of the memory."""
        written: list[Memory] = []
        for write in writes:
            memory = write.memory
            written.append(memory)
            if not write.is_statistic:
                memory.begin_write(write.tensor)
            self._outer_writes += not memory.is_made
            memory.state.is_over = True
            if memory.state.outside:
                self._lose(memory.state.outside)
        self._written = written

    def _end_writes(self) -> None:
        """Record that the operation that wrote last has ended."""
        for memory in self._written:
            memory.end_write()
        self._written = ()

    def _fail_writes(self, writes: Iterable[WriteOp]) -> None:
        """After an error in writes, forget what was known of the memory: some of it may have been written."""
        for write in writes:
            write.memory.begin(write.tensor, State(write.tensor.device, UNSEEN))

    def _add_results(
        self, operation: Operation, op: Op, args: Any, result: Any, reason: str, key: int
    ) -> list[State | None]:
        """Record the memory of the results. Return the state of each that has a memory of its own."""
        states: list[State | None] = []
        self._has_new_root = False
        for at, tensor in enumerate((result,) if type(result) is Tensor else flat(result)):
            states.append(None)
            try:
                storage = tensor.untyped_storage()
            except (NotImplementedError, RuntimeError):  # see storage_of()
                continue
            identity = storage_identity(storage)
            memory = self._memories.get(identity)
            if memory is not None and memory() is not None:
                # Memory of an argument or of an earlier result, perhaps with another version counter.
                self._has_new_root |= self._share(memory, tensor, args)
                continue
            why = reason or (ALLOCATES if operation.is_allocation else "")
            state = states[at] = self._made(op, tensor.device, why, hash((key, at)), result=at)
            self._know(storage, identity, state, tensor, is_made=True)
        return states

    def _share(self, memory: Memory, result: Tensor, args: Any) -> bool:
        """Record a result with the memory of an argument. Return whether it has another version counter."""
        for each in tensors_of(args):
            if each is not result and storage_of(each) is memory() and not memory.shows(each):
                memory.begin(result, State(result.device, UNSEEN))
                return True
        return memory.add(result)

    def _made(
        self,
        op: Op,
        device: torch.device,
        reason: str,
        key: int,
        *,
        result: int = -1,
        argument: int | str | None = None,
    ) -> State:
        if reason and reason != ALLOCATES:
            return State(device, reason)  # without a reference to the operation
        number, self._states = self._states, self._states + 1
        op.made.append(Product(number, result, argument))
        return State(device, reason, key, op, number)

    def _reason_of(self, operation: Operation, op: Op, args: Any, result: Any) -> str:
        """Return why the results cannot be replayed, for reasons that the operation's schema does not show."""
        first = result
        if type(result) is not Tensor:
            first = next(iter(flat(result)), None)
        if first is None:
            first = next((each for each in args if isinstance(each, Tensor)), None)
        if first is None or first.is_cpu:
            return ""
        if operation.sums_in_any_order and not torch.are_deterministic_algorithms_enabled():
            return _ANY_ORDER.format(operation.name)
        if first.device.type == "meta":
            return UNSEEN
        stream = torch.accelerator.current_stream(first.device)
        if self._stream is None:
            self._stream = stream
        return "" if stream == self._stream else _OTHER_STREAM

    def _settings_now(self, *, on_accelerator: bool) -> Settings:
        found = now(on_accelerator=on_accelerator)
        if found != self._settings:
            self._settings = found  # one shared object while they are equal
            self._settings_hash = hash(found)
        return self._settings

    def _may_replay_here(self) -> bool:
        """Without gradients: whether no ``autograd.Function`` runs that may call kernels unseen."""
        frame: FrameType | None = sys._getframe(3)
        while frame is not None:
            if frame.f_code is _APPLY:
                function = frame.f_locals.get("cls")
                if not is_of_operator(function):
                    return is_declared(function)
            frame = frame.f_back
        return True

    def _forget(self, operation: Operation, args: Any, kwargs: Any) -> None:
        """Forget what is known: a tensor subclass writes memory that the tape cannot see."""
        if operation.writes:
            for memory in self._memories.values():
                memory.state = State(memory.state.device, _SUBCLASS)

    # Operands.

    def _hold(self, memory: Memory | None, tensor: Tensor, op: Op) -> Outside:
        """Return the operand of ``op`` that no replay computes: ``tensor``, which has this memory."""
        raise NotImplementedError

    def _new_outside(
        self, tensor: Tensor, place: Place, state: State | None, *, is_random: bool
    ) -> Outside:
        """Return the operand at this place in a state."""
        raise NotImplementedError

    def _lose(self, operands: Mapping[Place, Outside]) -> None:
        """Copy what a replay needs of a memory with these operands, which is about to be overwritten."""
        raise NotImplementedError

    def _memory(self, tensor: Tensor, *, is_written: bool = False) -> Memory | None:
        """Return and record the memory of ``tensor``; ``None`` if it has none that can be identified.

        ``is_written``: an operation is about to write to it, perhaps through an alias that was not known."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # see storage_of()
            return None
        if tensor.layout is not torch.strided or tensor.is_nested:
            return None
        identity = storage_identity(storage)
        memory = self._memories.get(identity)
        if memory is None or memory() is None:
            memory = self._know(storage, identity, State(tensor.device, UNSEEN), tensor)
        elif not memory.shows(tensor):
            # Something that the tape did not see may have written to it.
            if is_written and memory.state.outside:
                self._lose(memory.state.outside)
            is_own = memory.is_made or memory.others or memory.state.reason == ALIAS
            memory.begin(tensor, State(tensor.device, ALIAS if is_own else UNSEEN))
        return memory

    def _know(
        self,
        storage: torch.UntypedStorage,
        identity: int,
        state: State,
        tensor: Tensor,
        *,
        is_made: bool = False,
    ) -> Memory:
        memories = self._memories
        if len(memories) >= self._sweep_at:  # the dead keep operations alive
            for dead in [at for at, each in memories.items() if each() is None]:
                del memories[dead]
            self._sweep_at = max(_LEAST_SWEPT, 2 * len(memories))
        memory = memories[identity] = Memory(storage)
        memory.begin(tensor, state, is_made=is_made)
        return memory

    def _operands(
        self,
        values: Iterable[tuple[int | str, Any]],
        op: Op,
        kinds: list[Any],
        unread: Collection[int | str] = _NONE,
        scratch: Collection[int | str] = _NONE,
    ) -> list[Any]:
        """Return the arguments of ``op`` with operands in place of tensors.

        Args:
            values: the arguments with their places.
            op: gets the operands.
            kinds: gets what decides, of these arguments, which kernel runs: all but the data.
            unread: places of arguments that it only writes.
            scratch: places of running statistics.
        """
        taken: list[Any] = []
        for place, value in values:
            kind = type(value)
            if kind is Tensor or isinstance(value, Tensor):
                if place in scratch:
                    value = Scratch(value)
                else:
                    value = self._operand(value, op, is_read=place not in unread)
                kinds.append(value.kind)
            elif kind is list and all(type(each) is int for each in value):
                value = Ints(value)
                kinds.append(tuple("-1" if each == -1 else each for each in value))
            elif kind is list or kind is tuple:
                inner: list[Any] = []
                value = kind(self._operands([(-1, each) for each in value], op, inner))
                kinds.append(tuple(inner))
            elif kind is float or kind is complex:
                kinds.append(kind)
            else:
                kinds.append("-1" if kind is int and value == -1 else value)  # hash(-1) is hash(-2)
            taken.append(value)
        return taken

    def _operand(self, tensor: Tensor, op: Op, *, is_read: bool) -> Made | Outside:
        memory = self._memory(tensor)
        if memory is None:
            return self._hold(None, tensor, op)
        state = memory.state
        if state.reason and (is_read or state.reason != ALLOCATES):
            return self._hold(memory, tensor, op)
        place = place_of(tensor)
        if place[0].is_complex:
            self._is_complex = True
        made = Made(state, place)
        op.reads.append(made)
        return made

    def _outside_at(self, state: State | None, tensor: Tensor) -> Outside:
        """Return the operand at the place of ``tensor`` in this state."""
        if tensor.is_complex():
            self._is_complex = True
        if state is None:
            return self._new_outside(tensor, (), None, is_random=False)
        if state.outside is None:
            state.outside = self._new_places()
        place = place_of(tensor)
        outside = state.outside.get(place)
        if outside is None:
            is_random = state.reason.endswith(RANDOM)
            outside = self._new_outside(tensor, place, state, is_random=is_random)
            state.outside[place] = outside
        return outside

    def _new_places(self) -> MutableMapping[Place, Outside]:
        return {}

    # Queries.

    def state_of(self, tensor: Tensor) -> State | None:
        """Return the current state of the tensor's memory; ``None`` if the tape did not see it."""
        try:
            memory = self._memories.get(storage_identity(tensor.untyped_storage()))
        except (NotImplementedError, RuntimeError):  # see storage_of()
            return None
        if memory is None or memory() is None:
            return None
        return memory.state if memory.shows(tensor) else None


class _Aside:
    """The context of :meth:`Tape.aside`."""

    __slots__ = ("_is_innermost", "_tape", "_was_recording")

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def __enter__(self) -> None:
        tape = self._tape
        self._is_innermost, self._was_recording = innermost_mode() is tape, tape.is_recording
        tape.is_recording = False
        if self._is_innermost:
            pause_mode(None)

    def __exit__(self, *_: object) -> None:
        if self._is_innermost:
            resume_mode(self._tape)
        self._tape.is_recording = self._was_recording


class Leaver:
    """Pop a tape when this object's owner drops it.

    The owner is a module call, which drops it when it returns, or the engine, which drops its callbacks at the
    end of a backward after restoring the modes of the calling thread.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def __call__(self, *_: object) -> None:
        """Do nothing: see :func:`queue_callback`. The engine's modes are still active, and a module call is not
        traced."""

    def __del__(self) -> None:
        self._tape.stop()
        self._tape.leave()


def leave_for_backward() -> None:
    """Deactivate all tapes while a node of the graph computes, and end a context's tape.

    Some backward formulas differ while a dispatch mode is active. The engine restores the modes of the calling
    thread for each node, and at the end.
    """
    if not in_backward():
        return
    for tape in [each for each in dispatch_modes() if isinstance(each, Tape)]:
        if tape.is_of_context and tape.is_recording:
            queue_callback(Leaver(tape))
            tape.end()
        tape.leave()


_DETACH = torch.ops.aten.detach.default
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
