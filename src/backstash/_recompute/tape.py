"""The tape: the operations that PyTorch ran in a forward, so that a part of them can be called again.

A dispatch mode sees each operation below autograd, with its real arguments, after autocast, and after composite
operations were taken apart. The tape notes those that can be replayed. Nothing of the program's is run for it,
then or later, so nothing that the program does beside computing is done twice.

Memory is known by its storage, and forgotten when that dies, which a weak reference tells. A *state* is what
its bytes are between two writes. A write in place makes a new state from the one before. Views need no
operation of their own: an operand is a state, and where the operand lies in its memory.

What a state is made from and cannot be replayed itself is *outside*: a parameter, the input of a module, random
numbers, what a kernel of the program's has written. A tape refers to its tensor while it records, and has it
held once something that is let go needs it. The tape refers to no intermediate result.

The idea of replaying what a dispatch mode saw is that of this project. To let go of results and compute them
again operation by operation, chosen while a program runs, is that of DTR (Kirisame et al., ICLR 2021).
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._device.fingerprint import fingerprint
from .._saved.entry import Entry, WrapperEntry
from .._saved.view import extent_bytes, reason_to_stay, snapshot
from .._torch.dispatch import (
    SilentMode,
    dispatch_modes,
    innermost_mode,
    pop_mode,
    push_mode,
    take_off,
    with_lazy_bits,
)
from .._torch.engine import in_backward, queue_callback, task_or_none
from .._torch.mode_bits import ModeBits
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
    tensors_of,
)
from .._torch.storages import storage_identity, storage_of
from .declared import is_declared
from .settings import Settings, now

__all__ = [
    "TOO_FAR",
    "UNSEEN",
    "Leaver",
    "Made",
    "Op",
    "Outside",
    "Place",
    "Product",
    "Scratch",
    "State",
    "Tape",
    "copied",
    "is_small",
    "leaf_of",
    "leave_for_backward",
    "place_of",
]

Place = tuple[Any, ...]
"""Where a tensor lies in its memory: its type, shape, stride, offset, and its conj and neg bits."""

_UNSAVED = "it follows from a tensor that PyTorch does not save, and lets programs change"
_CHANGED = "its input was changed in place"
UNSEEN = "what made it was not seen"
_SUBCLASS = "a tensor subclass computed it"
_IN_FUNCTION = "an autograd.Function computed it"
_PRODUCT = "{} takes long: give its module to recompute()"
_OTHERWISE = "it is computed in another way while operations are recorded"
_OTHER_STREAM = "it was made on another stream"
_ANY_ORDER = "{} may add in another order each time"
_MOST_COPIED_BYTES = 64 << 10
_LOOKED_EVERY = 32  # operations
TOO_FAR = "it is {} operations away from what is held, more than {}"


def place_of(tensor: Tensor) -> Place:
    """Where ``tensor`` lies in its memory."""
    return (
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.is_conj(),
        tensor.is_neg(),
    )


class State:
    """The bytes of a memory between two writes."""

    __slots__ = (
        "__weakref__",
        "depth",
        "device",
        "is_over",
        "key",
        "maker",
        "number",
        "outside",
        "reason",
        "saved",
    )

    def __init__(
        self,
        device: torch.device,
        reason: str,
        key: int = 0,
        maker: Op | None = None,
        number: int = -1,
    ) -> None:
        self.device = device
        self.maker = maker
        """The operation that gave it these bytes; ``None``: one that was not seen."""
        self.number = number
        """Among all that the tape's operations made."""
        self.reason = reason
        """Why it cannot be replayed; ``""``: it can."""
        self.key = key
        """What the operations that lead to it are, and the shapes of what they are given."""
        self.outside: MutableMapping[Place, Outside] | None = None
        """The operands that are held, if it comes to that. Those of a context refer to this."""
        self.is_over = False
        """Whether its memory was written since."""
        self.depth = 0
        """How many operations one after another it is away from what is held."""
        self.saved: Any = None
        """A weak reference to what holds these bytes, once something does: the block of a stash, or the
        storage, where autograd holds a tensor as it is."""


class Memory:
    """A storage that the tape has seen."""

    __slots__ = ("ref", "state", "version", "writes")

    def __init__(self, ref: weakref.ref[torch.UntypedStorage], state: State, version: int) -> None:
        self.ref = ref
        """Of the storage, which takes this from the tape when it dies. PyTorch keeps a storage's object in
        Python as long as the storage. A weak reference in C++ would keep what describes the storage, which
        glibc has put among large pieces of memory."""
        self.state = state
        self.version = version
        """Of the tensor that was seen first."""
        self.writes = 0
        """That were seen since."""


class Outside:
    """An operand that no replay makes."""

    __slots__ = (
        "__weakref__",
        "is_lost",
        "is_random",
        "kept",
        "kind",
        "leaf",
        "packed",
        "state",
        "tensor",
        "told",
    )

    def __init__(
        self, tensor: Tensor, place: Place, state: State | None, *, is_random: bool = False
    ) -> None:
        self.state = state
        """On the tape of a context: that it is; ``None``: its memory cannot be told apart."""
        self.kind = place, str(tensor.device)
        """For the key of what is made from it."""
        self.told: Any = None
        """The fingerprint of its bytes, where the program may have them elsewhere, as NumPy's."""
        self.is_random = is_random
        """Whether it has random numbers, which mostly pack well: a dropout's noise has two values."""
        self.tensor: Tensor | None = tensor
        """While the tape records, and its memory is not written."""
        self.leaf: weakref.ref[Tensor] | None = None
        """On the tape of a context: the parameter that it is or is a view of, in place of ``tensor``."""
        self.kept: weakref.ref[torch.UntypedStorage] | None = None
        """Likewise, of another tensor that is small: its memory."""
        self.packed: Any = None
        """What the stash has made of it, once something needs it."""
        self.is_lost = False
        """Whether its memory was written before anything did."""


class Made:
    """An operand that a replay makes."""

    __slots__ = ("device", "number", "place", "state")

    def __init__(self, state: State, place: Place) -> None:
        self.state = state
        self.number = state.number
        self.device = state.device
        self.place = place


class Scratch:
    """An operand that an operation only writes, and that is not the tape's: running statistics."""

    __slots__ = ("device", "place")

    def __init__(self, tensor: Tensor) -> None:
        self.place = place_of(tensor)
        self.device = tensor.device


class Product(NamedTuple):
    """A state that an operation makes. It does not refer to the state, which refers to the operation."""

    number: int
    """The state's."""
    result: int
    """Which of the operation's results has the memory."""
    argument: int | str | None
    """Or which of its arguments, by place or name, where it writes there."""


class _WriteOp(NamedTuple):
    """What an operation is about to do to a memory."""

    place: int | str
    """The argument."""
    tensor: Tensor
    memory: Memory
    nbytes: int
    """Of the storage."""
    fills: bool
    """Whether each byte of it gets another value, and none is read."""
    is_statistic: bool
    """Whether it is none of the tape's, and no schema says that it is written."""


class Op:
    """An operation that can be replayed."""

    __slots__ = (
        "args",
        "before",
        "func",
        "index",
        "is_grad_enabled",
        "is_wanted",
        "kwargs",
        "made",
        "reads",
        "settings",
    )

    def __init__(self, func: Any, index: int) -> None:
        self.func = func
        self.args: list[Any] = []
        """With operands in place of tensors."""
        self.kwargs: dict[str, Any] = {}
        self.index = index
        """On the tape."""
        self.settings: Settings = ()
        self.is_grad_enabled = torch.is_grad_enabled()
        """Some kernels ask, oneDNN's LSTM for one."""
        self.reads: list[Made] = []
        """Its operands that a replay makes."""
        self.before: list[Outside] = []
        """Those that are held."""
        self.made: list[Product] = []
        self.is_wanted = False
        """Whether its operands are held, and those of what it needs."""


class Tape(SilentMode):
    """Records between :meth:`enter` and :meth:`leave`.

    Args:
        recomputable: asked of the class of each ``torch.autograd.Function`` whose forward runs: whether what it
            computes may be replayed.
        most: how many operations a state may be away from what is held. Then it holds no tensor but those that
            the program keeps anyway, and what takes long is not replayed: products of matrices, convolutions
            and the like. ``None``: any number.
    """

    def __init__(
        self,
        recomputable: Callable[[Any], bool] = is_declared,
        *,
        most: int | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memories: dict[int, Memory] = {}
        self._outside: list[Outside] = []
        self._count = self._states = 0
        self._recomputable = recomputable
        self._task = task_or_none()
        self._most = most
        self._stream: Any = None
        self._bits = ModeBits()
        self._settings: Settings = ()
        self._seconds = self._called_seconds = 0.0
        self.is_recording = True
        self.number = -1
        """Of the step that it is for, where it is a context's."""
        self.is_marked = False
        """Whether it ends with the outermost module call that runs."""
        self.frame: FrameType | None = None
        """Of the module call that it covers."""
        self.recorded: Callable[[], None] | None = None
        """Called once, after the next operation."""

    def enter(self) -> None:
        """Record what this thread computes."""
        push_mode(self)

    def leave(self) -> None:
        """Record it no more, whatever modes were entered since and are active yet."""
        take_off(self)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Nothing is recorded, and where it is the innermost mode it is not there at all."""
        is_innermost, was_recording = innermost_mode() is self, self.is_recording
        self.is_recording = False
        if is_innermost:
            pop_mode()
        try:
            yield
        finally:
            if is_innermost:
                push_mode(self)
            self.is_recording = was_recording

    def end(self) -> None:
        """Record no more. What is not needed is let go.

        Raises:
            UsageError: see :meth:`ModeBits.look`.
        """
        self.stop()
        self._bits.look()

    def stop(self) -> None:
        """As :meth:`end`, without an error."""
        self.is_recording = False
        self.recorded = None
        for each in self._outside:
            each.tensor = None
        self._outside.clear()
        self._memories.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See ``TorchDispatchMode``."""
        kwargs = kwargs or {}
        # In a backward, perhaps on another thread, it may not be taken off yet. What is computed in a context
        # without a graph is no operand but where it is saved: a write to what was seen tells a version.
        is_off = not self.is_recording or task_or_none() != self._task
        if is_off or (self._most is not None and not torch.is_grad_enabled()):
            return self._pass(func, args, kwargs)
        began, self._called_seconds = time.perf_counter(), 0.0
        try:
            return self._note(func, types, args, kwargs)
        finally:
            self._seconds += time.perf_counter() - began - self._called_seconds

    def _pass(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._bits.is_asked:
            self._bits.look()
        with with_lazy_bits():
            result = func(*args, **kwargs)
            return self._bits.saw(func, args, kwargs, result, depth=3)

    def take_seconds(self) -> float:
        """What recording took since this was asked last, without the operations themselves."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    # What is seen.

    def _note(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if self._bits.is_asked:
            self._bits.look()
        if not self._count % _LOOKED_EVERY and self.frame and not is_running(self.frame):
            self.end()  # the forward was left by an interrupt
        operation = operation_of(func)
        if operation.is_view or not self.is_recording:
            return self._call(func, operation, args, kwargs)
        if any(each is not Tensor and each is not torch.nn.Parameter for each in types):
            result = self._call(func, operation, args, kwargs)
            self._forget(operation, args, kwargs)
        else:
            result = self._record(func, operation, args, kwargs)
        if (recorded := self.recorded) is not None:
            self.recorded = None
            recorded()
        return result

    @property
    def is_of_context(self) -> bool:
        """Whether it is of a whole context, and not of one module's forward."""
        return self._most is not None

    def _call(self, func: Any, operation: Operation, args: Any, kwargs: Any) -> Any:
        began = time.perf_counter()
        # No kernel that computes element by element conjugates what it has made of real numbers.
        if operation.is_product or has_complex(args):
            with with_lazy_bits():
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        self._called_seconds += time.perf_counter() - began
        return result

    def _record(self, func: Any, operation: Operation, args: Any, kwargs: Any) -> Any:
        reason = operation.reason
        if reason and operation.dropout and operation.is_random:
            if not any(argument_of(args, kwargs, each) for each in operation.dropout):
                reason = ""
        if not reason and not torch.is_grad_enabled() and not self._may_replay_here():
            reason = _IN_FUNCTION
        if not reason and operation.is_product and self._most is not None:
            reason = _PRODUCT.format(operation.name)
        in_training = operation.writes_statistics(args)
        writes: list[_WriteOp] = []
        if operation.writes or in_training:
            writes, reason = self._writes_of(
                operation, args, kwargs, reason, in_training=in_training
            )
        op = Op(func, self._count)
        self._count += 1
        if not reason:
            unread = {each.place for each in writes if each.fills}
            op.args = [
                Scratch(each)
                if in_training and at in STATISTICS and isinstance(each, Tensor)
                else self._operand(each, op, is_read=at not in unread)
                for at, each in enumerate(args)
            ]
            op.kwargs = {
                name: self._operand(each, op, is_read=name not in unread)
                for name, each in kwargs.items()
            }
        for each in writes:
            self._begin_write(each)
        result = self._call(func, operation, args, kwargs)
        if operation.is_product:
            found = result
            with with_lazy_bits():
                result = self._bits.saw(func, args, kwargs, found, depth=4)
            if result is not found:
                reason = reason or _OTHERWISE
        if not reason:
            reason = self._reason_of(operation, args, result)
        key = 0
        if not reason:
            op.settings = self._settings_now(on_accelerator=self._stream is not None)
            key = hash((func, _signature(op.args), _signature(op.kwargs), op.settings))
            if self._most is not None and (depth := _depth(op)) > self._most:
                reason = TOO_FAR.format(depth, self._most)
        for each in writes:
            why = reason or (_CHANGED if each.is_statistic else "")
            if each.tensor.untyped_storage().nbytes() != each.nbytes:
                why = why or f"{operation.name} gave it other memory"
            each.memory.state = self._made(
                op, each.tensor.device, why, hash((key, each.place)), argument=each.place
            )
        self._add_results(operation, op, result, reason, key)
        return result

    def _writes_of(
        self, operation: Operation, args: Any, kwargs: Any, reason: str, *, in_training: bool
    ) -> tuple[list[_WriteOp], str]:
        """What it is about to write, and why what it makes cannot be replayed."""
        places = (*operation.writes, *STATISTICS) if in_training else operation.writes
        found: list[_WriteOp] = []
        for place in places:
            given = argument_of(args, kwargs, place)
            tensors = [*tensors_of(given)]
            if len(tensors) > 1 or (tensors and given is not tensors[0]):
                reason = reason or f"{operation.name} writes to several tensors"
            for tensor in tensors:
                memory = self._memory(tensor)
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
                    _WriteOp(
                        place,
                        tensor,
                        memory,
                        tensor.untyped_storage().nbytes(),
                        fills,
                        is_statistic,
                    )
                )
        return found, reason

    def _begin_write(self, write: _WriteOp) -> None:
        """What is held for a replay, and is about to be written, is copied."""
        write.memory.writes += 1
        write.memory.state.is_over = True
        outside = write.memory.state.outside
        for each in outside.values() if outside is not None else ():
            if each.packed is None:
                each.is_lost = True
            elif each.tensor is not None:
                each.packed, each.tensor = copied(each.tensor), None

    def _add_results(
        self, operation: Operation, op: Op, result: Any, reason: str, key: int
    ) -> None:
        for at, tensor in enumerate(tensors_of(result)):
            storage = storage_of(tensor)
            if storage is None:
                continue
            identity = storage_identity(storage)
            if identity in self._memories:
                continue  # of an argument, or of a result before this one
            why = reason or (ALLOCATES if operation.is_allocation else "")
            state = self._made(op, tensor.device, why, hash((key, at)), result=at)
            self._know(storage, identity, state, 0)

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
            return State(device, reason)  # which keeps nothing of the operation
        number, self._states = self._states, self._states + 1
        op.made.append(Product(number, result, argument))
        state = State(device, reason, key, op, number)
        state.depth = _depth(op)
        return state

    def _reason_of(self, operation: Operation, args: Any, result: Any) -> str:
        """Why what was computed cannot be replayed, as far as its schema does not tell."""
        first = next(tensors_of(result), None)
        if first is None:
            first = next((each for each in args if isinstance(each, Tensor)), None)
        if first is None or first.device.type == "cpu":
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
            self._settings = found  # one object for as long as they are the same
        return self._settings

    def _may_replay_here(self) -> bool:
        """Without gradients: whether no ``autograd.Function`` runs, whose kernels may not all be seen."""
        frame: FrameType | None = sys._getframe(4)
        while frame is not None:
            if frame.f_code is _APPLY:
                function = frame.f_locals.get("cls")
                if not is_of_operator(function):
                    return self._recomputable(function)
            frame = frame.f_back
        return True

    def _forget(self, operation: Operation, args: Any, kwargs: Any) -> None:
        """A subclass computes: what it writes inside is not seen."""
        if operation.writes and self._most is not None:
            self.stop()
        elif operation.writes:
            for each in self._outside:
                each.is_lost = each.packed is None
            for memory in [*self._memories.values()]:
                memory.state = State(memory.state.device, _SUBCLASS)

    # Operands.

    def _memory(self, tensor: Tensor) -> Memory | None:
        """That of ``tensor``, known from now on; ``None``: it has none that can be told apart."""
        storage = storage_of(tensor)
        if storage is None or tensor.layout is not torch.strided or tensor.is_nested:
            return None
        identity = storage_identity(storage)
        memory = self._memories.get(identity)
        version = _version(tensor)
        if memory is None:
            memory = self._know(storage, identity, _outside(tensor), version)
        elif version > memory.version + memory.writes:
            # It was written, and not by what was seen.
            memory.state, memory.version = _outside(tensor), version - memory.writes
        return memory

    def _know(
        self, storage: torch.UntypedStorage, identity: int, state: State, version: int
    ) -> Memory:
        memories = self._memories
        ref = weakref.ref(storage, lambda _: memories.pop(identity, None))
        memory = memories[identity] = Memory(ref, state, version)
        return memory

    def _operand(self, value: Any, op: Op, *, is_read: bool = True) -> Any:
        if isinstance(value, Tensor):
            memory = self._memory(value)
            if memory is None:
                return self._hold(None, value, op)
            state = memory.state
            if state.reason and (is_read or state.reason != ALLOCATES):
                return self._hold(state, value, op)
            made = Made(state, place_of(value))
            op.reads.append(made)
            return made
        if isinstance(value, (list, tuple)):
            return (
                type(value)([self._operand(each, op) for each in value])
                if type(value) in (list, tuple)
                else value
            )
        return value

    def _hold(self, state: State | None, tensor: Tensor, op: Op) -> Outside:
        known = state.outside if state is not None else None
        place = place_of(tensor) if state is not None else ()
        outside = known.get(place) if known is not None else None
        if outside is None:
            is_random = state is not None and state.reason.endswith(RANDOM)
            in_context = self._most is not None
            outside = Outside(tensor, place, state if in_context else None, is_random=is_random)
            if self._most is not None:
                leaf = leaf_of(tensor)
                outside.leaf = weakref.ref(leaf) if leaf is not None else None
                if state is not None and is_small(tensor):
                    outside.kept = weakref.ref(tensor.untyped_storage())
                outside.tensor = None
            else:
                self._outside.append(outside)
            if state is not None:
                if known is None:
                    known = weakref.WeakValueDictionary() if in_context else {}
                    state.outside = known
                known[place] = outside
        op.before.append(outside)
        return outside

    # What is asked.

    def note_packed(self, tensor: Tensor, packed: object) -> None:
        """The stash has saved ``tensor``, as ``packed``: from now on others can be computed from that."""
        if type(packed) is not Entry:
            if type(packed) is not WrapperEntry:
                self._note_saved(tensor, None)
            return
        block = packed.block
        source = block.storage_version
        is_whole = not block.is_copy and not source.is_parted and packed.source is source
        if is_whole and not block.is_rounded and packed.check is None:
            self._note_saved(tensor, block)

    def _note_saved(self, tensor: Tensor, block: Any) -> None:
        """The stash holds ``tensor``: as ``block``, which is all of its memory, or as it is (``None``)."""
        memory = self._memory(tensor)
        if memory is None or memory.state.reason == ALLOCATES:
            return
        state = memory.state
        state.depth = 0
        if block is not None:
            state.saved = weakref.ref(block)
        elif state.saved is None:
            state.saved = weakref.ref(tensor.untyped_storage())
        if self._most is not None:
            state.maker = None  # from now on it is given, and what led to it is not needed

    def take_as_given(self, tensor: Tensor) -> None:
        """The stash holds ``tensor``, and will: what is computed from it is replayed from that, and not from
        what
        has led to it."""
        memory = self._memory(tensor)
        if memory is not None and not memory.state.reason:
            memory.state = State(tensor.device, UNSEEN, hash((memory.state.key, "given")))

    def state_of(self, tensor: Tensor) -> State | None:
        """The state of its memory now; ``None``: it was not seen."""
        storage = storage_of(tensor)
        memory = self._memories.get(storage_identity(storage)) if storage is not None else None
        if memory is None:
            return None
        if _version(tensor) > memory.version + memory.writes:
            return None
        return memory.state

    def want(
        self,
        state: State,
        pack: Callable[[Tensor, bool], object],
        relies_on: Callable[[Tensor], bool] = lambda tensor: True,
    ) -> str:
        """Have held what a replay of ``state`` needs.

        Args:
            state: that is to be let go.
            pack: holds a tensor in the stash, and is told whether it has random numbers.
            relies_on: whether an operand that is not copied may be relied on to stay as it is.

        Returns:
            Why it cannot be let go; ``""``: it can.
        """
        if state.reason:
            return state.reason
        new = [*_wanted(state)]
        outside = [each for op in new for each in op.before]
        if any(each.is_lost or (each.packed is None and each.tensor is None) for each in outside):
            return _CHANGED
        copies: set[Outside] = set()
        for each in outside:
            if each.packed is None and (tensor := each.tensor) is not None and not each.is_random:
                # A buffer may be written before backward, which is no error where it is not saved.
                if is_small(tensor):
                    copies.add(each)
                elif not relies_on(tensor):
                    if not is_small(tensor, also_trained=True):
                        return _UNSAVED
                    copies.add(each)
        for each in outside:
            if each.packed is None and (tensor := each.tensor) is not None:
                is_buffer = each in copies
                each.told = None if is_buffer or each.is_random else told(tensor)
                each.packed = copied(tensor) if is_buffer else pack(tensor, each.is_random)
        for op in new:
            op.is_wanted = True
        return ""


class Leaver:
    """Takes a tape off when its owner drops it: a module call that returns, or the engine, which drops what was
    to be called at the end of a backward when it has put back the modes of the thread that called it."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def __call__(self, *_: object) -> None:
        """See :func:`queue_callback`: the modes are the engine's yet. Nor is a module call traced by it."""

    def __del__(self) -> None:
        self._tape.stop()
        self._tape.leave()


def leave_for_backward() -> None:
    """A node of the graph is about to compute, perhaps inside a context that records: no tape is active while
    it does, and that of the context ends.

    Some formulas of backward are others where a dispatch mode is active. The engine puts the modes of the
    thread that called it back for each node, and when it has ended.
    """
    if not in_backward():
        return
    for tape in [each for each in dispatch_modes() if type(each) is Tape]:
        if tape.is_of_context and tape.is_recording:
            queue_callback(Leaver(tape))
            tape.end()
        tape.leave()


_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def _wanted(state: State) -> Iterator[Op]:
    """The operations that lead to ``state``, but for those whose operands are held."""
    todo, seen = [state], set()
    while todo:
        op = todo.pop().maker
        if op is None or op.is_wanted or op in seen:
            continue
        seen.add(op)
        yield op
        todo += [each.state for each in op.reads]


def _depth(op: Op) -> int:
    return 1 + max((each.state.depth for each in op.reads), default=0)


def _outside(tensor: Tensor) -> State:
    is_weight = isinstance(tensor, torch.nn.Parameter)
    key = hash((is_weight, place_of(tensor), str(tensor.device)))
    return State(tensor.device, UNSEEN, key)


def leaf_of(tensor: Tensor) -> Tensor | None:
    """The leaf that requires a gradient, a parameter mostly, that it is or is a view of."""
    leaf = tensor if tensor._base is None else tensor._base
    return leaf if leaf.is_leaf and leaf.requires_grad else None


def is_small(tensor: Tensor, *, also_trained: bool = False) -> bool:
    """Whether it is copied rather than held, so that it may be written."""
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter)
    if not is_plain or (tensor.requires_grad and not also_trained) or reason_to_stay(tensor):
        return False
    return tensor.nbytes <= _MOST_COPIED_BYTES


def told(tensor: Tensor) -> Any:
    """The fingerprint of data that the program has put in: a tensor of the CPU that needs no gradient."""
    if type(tensor) is not Tensor or tensor.requires_grad or tensor.device.type != "cpu":
        return None
    return (
        None if reason_to_stay(tensor) else fingerprint(tensor.untyped_storage(), *_extent(tensor))
    )


def _extent(tensor: Tensor) -> tuple[int, int]:
    low, high = extent_bytes(tensor)
    return low, high - low


def copied(tensor: Tensor) -> tuple[Tensor, int]:
    copy = snapshot(tensor.detach())
    return copy, copy._version


def _version(tensor: Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # an inference tensor has none
        return 0


def _signature(value: Any) -> Any:
    """What decides which kernel runs, but for the bytes that it is given."""
    kind = type(value)
    if kind is Made:
        return value.state.key, value.place
    if kind is Outside:
        return value.kind
    if kind is Scratch:
        return value.place
    if kind is list or kind is tuple:
        return tuple(_signature(each) for each in value)
    if kind is dict:
        return tuple((name, _signature(each)) for name, each in value.items())
    if kind is float or kind is complex:
        return kind
    return value
