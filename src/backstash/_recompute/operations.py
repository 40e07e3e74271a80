"""What a tape consists of: operations, the states of memory that they make, and operands.

A *state* is the bytes of a storage between two writes. An operand of an operation is a state and its place in
that memory, and either a replay computes it (:class:`Made`), or the stash holds it (:class:`Outside`), or the
operation only writes it (:class:`Scratch`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._device.fingerprint import fingerprint
from .._saved.view import UNALIGNED, dense, extent_bytes, raw_alias, reason_to_stay, snapshot
from .._torch.optimizer_steps import LeafRead, OptimizerStep
from .._torch.schemas import tensors_of
from .._torch.tensors import alive
from ..errors import InplaceError
from .settings import Settings

__all__ = [
    "Made",
    "Memory",
    "Needs",
    "Op",
    "Outside",
    "Place",
    "Product",
    "RawStep",
    "Scratch",
    "State",
    "Write",
    "WriteOp",
    "copied",
    "fingerprint_of",
    "flat",
    "is_small",
    "leaf_of",
    "operands_of",
    "place_of",
    "root_of",
    "unpacked",
    "version_of",
]

Place = tuple[Any, ...]
"""A tensor's place in its memory: dtype, shape, stride, offset, and its conj and neg bits."""

_MOST_COPIED_BYTES = 64 << 10


class Ints(list[int]):
    """A list of integers among an operation's arguments, which has no operands."""


def flat(result: Any) -> list[Tensor]:
    """As :func:`tensors_of`, in one call for most results."""
    found: list[Tensor] = []
    for each in result if isinstance(result, (list, tuple)) else (result,):
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            found += tensors_of(each)
    return found


def place_of(tensor: Tensor) -> Place:
    """Return the place of ``tensor`` in its memory."""
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def root_of(tensor: Tensor) -> weakref.ref[Tensor]:
    """Return a reference to the tensor that ``tensor`` is a view of, or to itself.

    All views of a tensor share its version counter, and references to one tensor are one object."""
    base = tensor._base
    return weakref.ref(tensor if base is None else base)


def version_of(tensor: Tensor) -> int:
    """Return the version of ``tensor``; 0 for one made in inference mode, which has none."""
    return 0 if tensor.is_inference() else tensor._version


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
        """The operation that wrote these bytes; ``None`` if the tape did not see it."""
        self.number = number
        """Its number among the states that the tape's operations made."""
        self.reason = reason
        """Why it cannot be replayed; ``""`` if it can."""
        self.key = key
        """A hash of the operations that lead to it and of their operands' shapes, if it can be replayed."""
        self.outside: MutableMapping[Place, Outside] | None = None
        """The held operands with these bytes, if there are any. On a context's tape, they refer to this
        state."""
        self.is_over = False
        """Whether its memory has been overwritten."""
        self.depth = 0
        """The longest chain of operations from held values to it."""
        self.saved: Any = None
        """A weak reference to what holds these bytes, once something does: a block of the stash, or the storage
        if autograd holds the tensor unpacked."""


class Memory(weakref.ref[torch.UntypedStorage]):
    """A storage that the tape has seen: a weak reference to it. Once it is dead, another storage may get its
    identity.

    PyTorch keeps a storage's Python object as long as the storage. A weak reference in C++ would keep the
    storage's description alive, which glibc has placed among large pieces of memory.
    """

    __slots__ = ("is_made", "is_written", "others", "root", "state", "version")

    state: State
    root: weakref.ref[Tensor]
    """A tensor with this memory, not a view, whose version counter :attr:`version` is of."""
    version: int
    """The root's version if nothing has written to the memory but the operations that the tape has seen."""
    is_written: bool
    """Whether one of these may have written through the root without raising its version yet."""
    others: tuple[Alias, ...]
    """Other tensors with this memory and version counters of their own."""
    is_made: bool
    """Whether the root is an operation's result. Else it may itself be an alias of another tensor."""

    @property
    def _aliases(self) -> tuple[Memory | Alias, ...]:
        return (self, *self.others)

    def shows(self, tensor: Tensor) -> bool:
        """Return whether ``tensor``, which has this memory, shows :attr:`state`.

        An alias with a version counter of its own, such as ``.data``, does not count what was written through
        the others. So it shows the state only if each of them that is alive does. An alias that the tape does
        not know shows it only if nothing was written at all.
        """
        base = tensor._base  # as in root_of() and version_of(), without their calls
        root = weakref.ref(tensor if base is None else base)
        version = 0 if tensor.is_inference() else tensor._version
        if not self.others:
            if root is self.root:
                return version == self.version or _is_at(self, version)
            of = alive(self.root) if self.is_made and not (version or self.is_written) else None
            return of is not None and not self.version and not version_of(of)
        is_known = False
        for each in self._aliases:
            is_known = is_known or each.root is root
            of = tensor if each.root is root else alive(each.root)
            if of is not None and not _is_at(each, version_of(of)):
                return False
        return is_known

    def begin(self, tensor: Tensor, state: State, *, is_made: bool = False) -> None:
        """Have this state, as ``tensor`` shows it. ``is_made``: ``tensor`` is an operation's result."""
        base = tensor._base  # see shows()
        self.root = weakref.ref(tensor if base is None else base)
        self.version = 0 if tensor.is_inference() else tensor._version
        self.state, self.is_written, self.is_made, self.others = state, False, is_made, ()

    def add(self, tensor: Tensor) -> bool:
        """Record that ``tensor`` has this memory, and shows the state. Return whether that was not known."""
        root = root_of(tensor)
        if any(each.root is root for each in self._aliases):
            return False
        if len(self.others) >= _MOST_ALIASES:
            # Such as the parts of a product in each step of a GRU, which are gone when it has ended.
            self.others = tuple(each for each in self.others if alive(each.root) is not None)
        if len(self.others) < _MOST_ALIASES:
            self.others = (*self.others, Alias(root, version_of(tensor)))
        return True

    def begin_write(self, tensor: Tensor) -> None:
        """Record that an operation is about to write through ``tensor``, whose version rises after that."""
        base = tensor._base
        root = weakref.ref(tensor if base is None else base)
        if not self.others:
            self.is_written = root is self.root
            return
        for each in self._aliases:
            each.is_written = each.is_written or each.root is root

    def end_write(self) -> None:
        """Record that the next operation begins: the version has risen by now, if it does."""
        aliases: tuple[Memory | Alias, ...] = (self, *self.others)  # in place of a call
        for each in aliases:
            if each.is_written:
                each.is_written = False
                root = alive(each.root)
                if root is not None and not root.is_inference():
                    each.version += root._version == each.version + 1


_MOST_ALIASES = 8


class Alias:
    """A tensor with a version counter of its own: see the attributes of :class:`Memory`."""

    __slots__ = ("is_written", "root", "version")

    def __init__(self, root: weakref.ref[Tensor], version: int) -> None:
        self.root, self.version, self.is_written = root, version, False


def _is_at(of: Memory | Alias, version: int) -> bool:
    if of.is_written and version == of.version + 1:
        of.version, of.is_written = version, False
    return version == of.version


class Outside:
    """An operand that no replay computes. On a forward's tape it has no value: see :class:`HoldingTape`."""

    __slots__ = (
        "__weakref__",
        "copy",
        "is_lost",
        "is_random",
        "kept",
        "kind",
        "leaf",
        "seen",
        "state",
        "unsaved",
    )

    def __init__(
        self, tensor: Tensor, place: Place, state: State | None, *, is_random: bool = False
    ) -> None:
        self.state = state
        """On a context's tape, its state; ``None``: the tape cannot identify its memory."""
        self.kind = place, tensor.device
        """Its place and device, for the keys of states computed from it."""
        self.is_random = is_random
        """Whether it holds random numbers, which usually pack well: a dropout mask has two values."""
        self.seen: object = None
        """Of a tensor whose memory cannot be identified: what shows whether something has written to it."""
        self.unsaved = ""
        """If the forward itself computed it: why what is computed from it is not recomputed, should autograd
        not save it."""
        self.leaf: weakref.ref[Tensor] | None = None
        """On a context's tape: the parameter that it is, or is a view of."""
        self.kept: weakref.ref[torch.UntypedStorage] | None = None
        """On a context's tape, for another small tensor: its storage."""
        self.copy: Tensor | None = None
        """On a context's tape: a copy of a small tensor."""
        self.is_lost = False
        """On a context's tape: whether its memory was overwritten."""


class Needs:
    """The operands that the replay of a discarded tensor reads. They are released with the last tensor that
    needs them."""

    __slots__ = ("before", "held")

    def __init__(self, held: dict[Outside, list[Any]], before: list[Needs]) -> None:
        self.held = held
        """What the stash packed each operand as, and a fingerprint of its bytes if the program may share them,
        as with NumPy."""
        self.before = before
        """What the operations before need."""


def operands_of(needs: Iterable[Needs]) -> dict[Outside, list[Any]]:
    """Return all held operands of these, and of what they need before."""
    found: dict[Outside, list[Any]] = {}
    todo, seen = list(needs), set[Needs]()
    while todo:
        each = todo.pop()
        if each not in seen:
            seen.add(each)
            found |= each.held
            todo += each.before
    return found


def unpacked(
    operands: Mapping[Outside, list[Any]], unpack: Callable[[Any], Tensor], operand: Outside
) -> Tensor:
    """Return an operand that is held among ``operands``.

    Raises:
        InplaceError: its bytes differ from those that the forward read.
    """
    packed, was = operands[operand]
    value = unpack(packed).detach()
    if was is not None and value.numel() and not value.untyped_storage().nbytes():
        raise InplaceError(
            f"an input of shape {tuple(value.shape)} has no memory any more: FSDP frees a parameter before "
            "backward reaches the module that it belongs to, so recompute the modules that were sharded, "
            "and not one around them"
        )
    if type(was) is OptimizerStep or type(was) is LeafRead:
        if was.is_outdated_by(value):
            raise InplaceError(
                f"an input of shape {tuple(value.shape)} may have been changed since forward without a new "
                "version, by an optimizer's step or a write to the DTensor that it comes from"
            )
    elif was is not None and fingerprint_of(value) != was:
        raise InplaceError(
            f"an input of shape {tuple(value.shape)} was changed since forward without a new version "
            "(NumPy, .data)"
        )
    return value


class Made:
    """An operand that a replay computes."""

    __slots__ = ("kind", "number", "place", "state")

    def __init__(self, state: State, place: Place) -> None:
        self.state = state
        self.number = state.number
        self.place = place
        self.kind = state.key, place
        """Its part in the keys of states computed from it."""


class Scratch:
    """An operand that an operation only writes and that the tape does not own: running statistics."""

    __slots__ = ("device", "kind", "place")

    def __init__(self, tensor: Tensor) -> None:
        self.place = self.kind = place_of(tensor)
        self.device = tensor.device


class Product(NamedTuple):
    """A state that an operation makes, without a reference to it: the state refers to the operation."""

    number: int
    """Number of the state."""
    result: int
    """Index of the result with this memory."""
    argument: int | str | None
    """Index or name of the argument with this memory, if the operation writes to it in place."""


class WriteOp(NamedTuple):
    """A write to a memory that an operation is about to do."""

    place: int | str
    """Index or name of the argument."""
    tensor: Tensor
    memory: Memory
    nbytes: int
    """Size of the storage."""
    fills: bool
    """Whether it overwrites every byte and reads none."""
    is_statistic: bool
    """Whether it is a running statistic: not the tape's memory, and written without its schema saying so."""


Write = tuple["int | str", bool, bool, State]
"""A write that was done: the argument, whether it fills its memory, whether it is a running statistic, and the
new state."""


class RawStep(NamedTuple):
    """An operation of a forward of which a route is to be made."""

    op: Op
    reason: str
    """Why it cannot be replayed; ``""`` if it can."""
    states: list[State | None]
    """The state of each result that has a memory of its own."""
    written: list[Write]
    """Its writes."""
    is_plain: bool
    """Whether no operand is complex, and no kernel conjugates."""
    has_new_root: bool
    """Whether a result shares the memory of an argument, but not its version counter."""
    ended: int
    """How many states there were after it."""


class Op:
    """An operation that can be replayed."""

    __slots__ = (
        "args",
        "before",
        "func",
        "index",
        "is_grad_enabled",
        "kwargs",
        "made",
        "reads",
        "settings",
    )

    def __init__(self, func: Any, index: int) -> None:
        self.func = func
        self.args: list[Any] = []
        """Its arguments, with operands in place of tensors."""
        self.kwargs: dict[str, Any] = {}
        self.index = index
        """Its index on the tape."""
        self.settings: Settings = ()
        self.is_grad_enabled = torch.is_grad_enabled()
        """Some kernels depend on it, such as oneDNN's LSTM."""
        self.reads: list[Made] = []
        """Its operands that a replay computes."""
        self.before: list[Outside] = []
        """Its operands that are held."""
        self.made: list[Product] = []


def leaf_of(tensor: Tensor) -> Tensor | None:
    """Return the leaf that ``tensor`` is or is a view of, if it requires a gradient (usually a parameter)."""
    leaf = tensor if tensor._base is None else tensor._base
    return leaf if leaf.is_leaf and leaf.requires_grad else None


def is_small(tensor: Tensor, *, also_trained: bool = False) -> bool:
    """Whether a replay copies the tensor instead of holding it, so that the program may write to it."""
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter)
    if not is_plain or (tensor.requires_grad and not also_trained) or reason_to_stay(tensor):
        return False
    return tensor.nbytes <= _MOST_COPIED_BYTES


def fingerprint_of(tensor: Tensor) -> Any:
    """Return a fingerprint of data from the program: a CPU tensor that requires no gradient."""
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter)
    if not is_plain or tensor.requires_grad or tensor.device.type != "cpu":
        return None
    if reason_to_stay(tensor) not in ("", UNALIGNED):
        return None
    low, high = extent_bytes(tensor)
    if high - low == tensor.nbytes:
        return fingerprint(tensor.untyped_storage(), low, tensor.nbytes)
    # The program may write between the elements.
    return fingerprint(dense(raw_alias(tensor)).untyped_storage())


def copied(tensor: Tensor) -> tuple[Tensor, int]:
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return copied(tensor)
    copy = snapshot(tensor.detach())
    return copy, copy._version
