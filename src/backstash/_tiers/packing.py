"""Packing: a block is encoded to a smaller payload, which is itself a block.

The payload takes the place of the packed block among the blocks that can be evicted: the ``keep`` budget
counts it, and it is written and loaded like any other block. The packed block has no bytes. When one of its
entries is needed, the bytes are decoded once for all views.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .._device.base import Check, Device
from .._device.fingerprint import fingerprint
from .._runtime.critical_section import CriticalSection
from .._runtime.reclaim import ReclaimQueue
from .._runtime.trace import profiled
from .._saved.block import Block, Mark, StorageVersion
from .._saved.entry import Entry, recomputed_otherwise
from .._saved.placement import Arrival, Derivation, Derived
from .._torch.dispatch import count_dispatch_modes, without_dispatch, without_function_modes
from .._torch.engine import in_backward, queue_callback, running_task
from ..codecs import Codec, Encoded
from ..codecs._base import NOT_SMALLER, integers
from ..errors import InplaceError, UsageError
from ..stores._base import PAGE_BYTES
from ..stores._buffer_pool import BufferPool, own_memory
from .making import MadeAhead
from .resident import ResidentSet

__all__ = ["Packer", "Price", "Replayable", "decode_separately"]

_AHEAD_SECONDS = 5e-4  # as the host needs for one replay or codec


class Price(NamedTuple):
    """The cost of packing or recomputing a block."""

    resident_bytes: int
    """Bytes held in place from the save until the block is freed."""
    save_seconds: float
    """Seconds when the block is saved."""
    use_seconds: float
    """Seconds when backward uses the block."""
    made_bytes: int
    """Bytes in memory from the first use until the block is freed."""


class Replayable(Protocol):
    """The recomputation of a block: see :mod:`backstash._recompute.blocks`."""

    depth: int
    """How many blocks must be recomputed one after another to get this one, itself included."""
    sources: tuple[Tensor | None, ...]
    """The memory that each operand was saved from, if it is alive, for one comparison."""

    def result(self, values: Sequence[Tensor]) -> Tensor:
        """Return the recomputed elements, in memory order, from the value of each operand."""

    def key(self, block: Block) -> tuple[Any, ...]:
        """Return what decides the bits of the result in addition to the operands. Replays of one class are
        those with an equal key."""

    def reason_against(self, block: Block) -> str:
        """Return why ``block``, which is complete and in place, cannot be recomputed; ``""`` if it can."""

    def given(self) -> list[Tensor] | None:
        """Return the values of all operands, if they are in place."""

    def derivation(self, block: Block, fingerprint: Any) -> Derivation:
        """Return the derivation of ``block``, whose bytes have this fingerprint."""


class Packer:
    """Encodes the blocks of one device, and decodes them. The caller holds the stash's lock.

    Args:
        resident: the blocks in place, including payloads.
        reclaim_queue: receives the cleanups of payloads.
        section: the critical section of the stash.
        pool: provides memory for decoding on the CPU.
        device: the device of the blocks; ``None`` for the CPU.
        made: notified when some block is derived from others.
    """

    def __init__(
        self,
        resident: ResidentSet,
        reclaim_queue: ReclaimQueue,
        section: CriticalSection,
        pool: BufferPool,
        *,
        device: Device | None,
        made: MadeAhead,
    ) -> None:
        self._made = made
        self._resident = resident
        self._reclaim_queue = reclaim_queue
        self._section = section
        self._pool = pool
        self._device = device
        self._checked: set[tuple[type, str, torch.dtype]] = set()  # on an accelerator
        self._replayed: set[tuple[Any, ...]] = set()  # classes whose replay gave equal bits
        self._priced: set[tuple[Any, ...]] = set()  # keys whose kernels were loaded
        self.has_room: Callable[[int], bool] | None = None
        """Called before bytes are decoded. Frees memory if a budget is nearly used up."""
        # By the number of a backward: what to check on an accelerator when it ends. Only the engine holds the
        # value, and drops it if that backward raises.
        self._endings: weakref.WeakValueDictionary[int, _Ending] = weakref.WeakValueDictionary()
        self._replay_seconds = 0.0  # of the last replay that was compared
        self.saw_unknown = True
        """Whether a replay of a class that was not compared yet was requested since this was last reset."""
        self.recomputed_bytes = 0
        """Bytes of the blocks that were freed so far, to be recomputed."""
        self.packed_bytes = self.payload_bytes = 0
        """Bytes of the blocks that were packed so far, and of their payloads."""
        self.refused: dict[str, list[int]] = {}
        """By reason: how many blocks were not packed, and their bytes."""

    def pack(self, codec: Codec, block: Block) -> Block | None:
        """Encode a complete block in place with ``codec``.

        Returns the block to move: the payload's, or ``block`` itself if it is not packed. Returns ``None`` if
        the payload needs no bytes, or if ``block`` was modified in place and is lost.
        """
        encoded = self._reason_against(block, exact=codec.exact) or self._encode(block, codec)
        if block.storage_version.changed:
            self._resident.lose(block)
            return None
        if isinstance(encoded, str):
            return self._refuse(block, f"not packed: {encoded}")
        return self._replace(block, codec, encoded)

    def _refuse(self, block: Block, reason: str) -> Block:
        refused = self.refused.setdefault(reason, [0, 0])
        refused[0] += 1
        refused[1] += block.nbytes
        return block

    def discard(self, replay: Replayable, block: Block) -> Block | None:
        """Free a complete block in place, which ``replay`` recomputes later.

        Returns ``None``, or ``block`` itself if it cannot be freed and has to move.
        """
        digest: Any = None
        reason = self._reason_against(block, exact=True) or replay.reason_against(block)
        try:
            reason = reason or self._reason_to_doubt(block, replay)
            replay.sources = ()
            alias = block.placement.alias
            if not reason and alias is not None:
                digest = self._mark(alias.untyped_storage())
                reason = "" if digest is not None else "no memory to fingerprint it"
        except (torch.OutOfMemoryError, MemoryError):
            reason = "no memory to recompute it"
        if block.storage_version.changed:
            self._resident.lose(block)
            return None
        if reason:
            block.reduction = None
            return self._refuse(block, f"not recomputed: {reason}")
        if not block.saves.are_as_expected:
            block.mark = Mark(digest)
        block.placement = Derived(replay.derivation(block, digest))
        self._made.has_derived = True
        self._resident.leave(block)
        self.recomputed_bytes += block.nbytes
        if self._resident.event_log.on:
            self._resident.event_log.emit("drop", *block.facts)
        return None

    def _mark(self, storage: torch.UntypedStorage) -> Any:
        device = self._device
        return fingerprint(storage) if device is None else device.mark(storage, device.stream())

    def _reason_to_doubt(self, block: Block, replay: Replayable) -> str:
        """Return why a replay is not known to give the bytes of ``block``. This stash compares the first
        replay of each class (the same module, operations, shapes, alignment and threads)."""
        key = replay.key(block)
        if key in self._replayed:
            return ""
        self.saw_unknown = True
        given = replay.given()
        if given is None:
            return "its input was moved out of memory before the replay could be compared"
        reason = self._compare(block, replay, given)
        if not reason:
            self._replayed.add(key)
        return reason

    def _compare(
        self, block: Block, replay: Replayable, given: list[Tensor], *, is_timed: bool = False
    ) -> str:
        """Return why ``replay`` of these values is not ``block``; ``""`` if it is. ``is_timed``: record its
        duration."""
        alias = block.placement.alias
        assert alias is not None
        with without_function_modes(), torch.no_grad(), profiled("replay", block.cleanup.module):
            values = alias.as_strided((block.nbytes // alias.element_size(),), (1,), 0)
            if is_timed:
                self._keep_busy()
            began = self._now()
            try:
                out = replay.result(given)
            except (RuntimeError, TypeError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                return f"PyTorch raised an error when {replay!r}"
            if is_timed:
                self._replay_seconds = self._seconds_since(began)
            if not torch.equal(integers(values.view(block.dtype)), integers(out)):
                return f"{replay!r} does not give the same bytes"
        return ""

    def price(self, block: Block, codec: Codec) -> Price | None:
        """Return the cost of packing ``block``, unchanged, with ``codec``; ``None`` if impossible."""
        if self._reason_against(block, exact=codec.exact) or block.placement.alias is None:
            return None
        try:
            if self._is_first(type(codec), block.dtype):
                self._encode(block, codec)
            self._keep_busy()
            began = self._now()
            encoded = self._encode(block, codec)
            seconds = self._seconds_since(began)
        except (torch.OutOfMemoryError, MemoryError):
            return None
        if isinstance(encoded, str):
            return None
        nbytes = encoded.payload.nbytes if encoded.payload is not None else 0
        # On the CPU the encoding was also decoded for comparison, which takes about half of the time.
        use_seconds = seconds if self._device is not None else seconds / 2
        return Price(nbytes, seconds, use_seconds, block.nbytes)

    def price_of_replay(self, block: Block, replay: Replayable) -> Price | None:
        """Return the cost of freeing ``block`` and replaying it; ``None`` if impossible."""
        alias = block.placement.alias
        if alias is None or self._reason_against(block, exact=True):
            return None
        key = replay.key(block)
        self.saw_unknown = self.saw_unknown or key not in self._replayed
        given = None if replay.reason_against(block) else replay.given()
        try:
            if given is None:
                return None
            if self._is_first(key):
                self._compare(block, replay, given)
                self._mark(alias.untyped_storage())
            if self._compare(block, replay, given, is_timed=True):
                return None
            self._replayed.add(key)
            self._keep_busy()
            began = self._now()
            if self._mark(alias.untyped_storage()) is None:
                return None
            mark_seconds = self._seconds_since(began)
        except (torch.OutOfMemoryError, MemoryError):
            return None
        return Price(0, mark_seconds, self._replay_seconds + mark_seconds, block.nbytes)

    def _is_first(self, *key: Any) -> bool:
        """Return whether an accelerator must still load the kernels for ``key``: do not time that."""
        if self._device is None or key in self._priced:
            return False
        self._priced.add(key)
        return True

    def _keep_busy(self) -> None:
        if self._device is not None:
            self._device.keep_busy(_AHEAD_SECONDS)

    def _now(self) -> Any:
        device = self._device
        return time.perf_counter() if device is None else device.time_mark()

    def _seconds_since(self, began: Any) -> float:
        """Return the seconds since ``began``. On an accelerator this is device time, and the host waits."""
        device, now = self._device, self._now()
        return float(now - began) if device is None else device.seconds_between(began, now)

    def _reason_against(self, block: Block, *, exact: bool) -> str:
        if block.has_moved:
            return "its storage was resized"
        if block.nbytes % block.dtype.itemsize:
            return "its storage is not a whole number of elements"
        if not exact and block.reduction is not None and not block.reduction.is_whole:
            return "it does not fill its storage, and its codec is lossy"
        if count_dispatch_modes() > 0:
            return "a dispatch mode of the program would see it"
        if self._device is not None and self._device.stream() != block.stream:
            return "it was made on another stream"
        return ""

    def _encode(self, block: Block, codec: Codec) -> Encoded | str:
        """Return the encoding of ``block`` by ``codec``, or why it is not used."""
        alias = block.placement.alias
        assert alias is not None
        count = block.nbytes // block.dtype.itemsize
        try:
            with without_function_modes(), torch.no_grad(), profiled("pack", block.cleanup.module):
                values = alias.as_strided((block.nbytes // alias.element_size(),), (1,), 0)
                values = values.view(block.dtype) if alias.dtype != block.dtype else values
                assert values.numel() == count
                encoded = codec.encode(values)
                if isinstance(encoded, str):
                    return encoded
                if not isinstance(encoded, Encoded):
                    raise UsageError(
                        f"{codec!r} returned {type(encoded).__name__}; allowed: an Encoded, or a str "
                        "with the reason why it does not encode"
                    )
                encoded = Encoded(_own(encoded.payload, values, codec), encoded.recipe)
                if encoded.payload is not None and encoded.payload.nbytes >= block.nbytes:
                    return NOT_SMALLER
                if codec.exact and not self._comes_back(values, encoded, codec):
                    return f"{codec!r} does not restore the same bytes"
        except (torch.OutOfMemoryError, MemoryError):
            return "no memory to pack it in"
        return encoded

    def _comes_back(self, values: Tensor, encoded: Encoded, codec: Codec) -> bool:
        """Return whether decoding gives ``values``. An accelerator checks each codec and dtype once."""
        key = type(codec), repr(codec), values.dtype
        if self._device is not None and key in self._checked:
            return True
        root = self._memory(values.nbytes, values.device)
        out = root[: values.nbytes].view(values.dtype)
        codec.decode(encoded.payload, encoded.recipe, out)
        is_same = torch.equal(integers(values), integers(out))
        if is_same and self._device is not None:
            self._checked.add(key)
        return is_same

    def _memory(self, nbytes: int, device: torch.device) -> Tensor:
        if device.type == "cpu":
            return self._pool.take(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def _replace(self, block: Block, codec: Codec, encoded: Encoded) -> Block | None:
        resident, payload, inner, entry = self._resident, encoded.payload, None, None
        if payload is not None:
            inner = self._payload_block(block, payload)
            entry = Entry(inner, payload, 0)
            inner.entries = 1
            resident.admit(inner)
        # Another thread may have written to a part since it was encoded, so no later save may share its block.
        if not block.saves.are_as_expected and not block.storage_version.is_parted:
            block.take_fingerprint(self._device)
        # From here on only the payload is held. The counts and queues are updated to match.
        block.placement = Derived(_Packing(codec, encoded.recipe, block.dtype, entry))
        resident.leave(block)
        nbytes = inner.nbytes if inner is not None else 0
        if inner is not None and block.index < len(block.forward_pass.blocks):
            block.forward_pass.blocks[block.index] = weakref.ref(inner)
        self._made.has_derived = True
        self.packed_bytes += block.nbytes
        self.payload_bytes += nbytes
        if resident.event_log.on:
            resident.event_log.emit("pack", nbytes, *block.facts[1:])
        return inner

    def _payload_block(self, block: Block, payload: Tensor) -> Block:
        version = StorageVersion(payload, payload.untyped_storage())
        inner = Block(version, payload, self._reclaim_queue, block.number)
        inner.thread_state, inner.stream, inner.tier = block.thread_state, block.stream, block.tier
        inner.saves.expected = inner.saves.done  # it will not be saved again
        inner.forward_pass, inner.index = block.forward_pass, block.index
        cleanup = inner.cleanup
        cleanup.module, cleanup.packs = block.cleanup.module, weakref.ref(block)
        cleanup.serial = block.cleanup.serial
        return inner

    def decode(
        self, entry: Entry, derivation: Derivation, given: Any
    ) -> tuple[Tensor, int, Arrival | None]:
        """Return a storage with the bytes of a derived block, their offset, and what users of it must be
        ordered after. Called outside the section.

        Args:
            entry: an entry of the block.
            derivation: how to compute the bytes.
            given: the inputs of ``derivation``.

        Raises ``MemoryError`` or ``torch.OutOfMemoryError`` if there is no memory for the bytes.
        """
        block, device = entry.block, self._device
        if device is not None and isinstance(given, Tensor):
            # The program may have waited for the tensor itself, but not for the payload made from it.
            _MadeOn(device, block.stream, given).order()
        elif device is not None:
            for operand in given or ():
                device.used(operand)
        low = block.address % PAGE_BYTES if device is None else 0
        with self._section.lock, self._section:
            if self.has_room is not None:
                self.has_room(block.nbytes)
        began = time.perf_counter()
        with profiled("unpack", block.cleanup.module):
            with without_function_modes(), without_dispatch(), torch.no_grad():
                whole = derivation.whole(given, block.address)
            if whole is not None:
                root, low = whole, 0
                check = _check(entry, derivation, root, low, device)
            else:
                with self._section.lock, self._section:
                    root = self._memory(low + block.nbytes, entry.device)
                check = _fill(entry, derivation, given, root, low, device)
            if check is not None:
                self.ask_at_the_end(recomputed_otherwise(entry, derivation), check)
        event_log = self._resident.event_log
        if event_log.on:
            event_log.emit("decode", *block.facts, cause=block.where, began=began)
        return root, low, None if device is None else _MadeOn(device, device.stream(), root)

    # On an accelerator the comparison of recomputed bytes ends when the device gets to it.

    def ask_at_the_end(self, error: InplaceError, check: Check) -> None:
        """Raise ``error`` if the device finds a difference. The check is made when the running backward ends,
        so that the host waits once, or immediately if no backward runs."""
        if not in_backward():
            if check.differs():
                raise error
            return
        task = running_task()
        with self._section.lock, self._section:
            ending = self._endings.get(task)
            if ending is not None and ending.has_asked:  # a later callback of that backward unpacks
                ending = None
            is_new = ending is None
            if ending is None:
                assert self._device is not None
                ending = self._endings[task] = _Ending(self._device)
            ending.due.append((error, check))
        if is_new:
            queue_callback(ending)


class _Ending:
    """The checks to make on an accelerator when one backward ends."""

    __slots__ = ("__weakref__", "_device", "due", "has_asked")

    def __init__(self, device: Device) -> None:
        self._device = device
        self.has_asked = False
        self.due: list[tuple[InplaceError, Check]] = []

    def __call__(self) -> None:
        """Raise the error of the first check in which the device found a difference.

        Raises:
            InplaceError: recomputed bits differ. The gradients of the backward that has just ended are
                invalid.
        """
        self.has_asked = True
        found = self._device.first_difference([check for _, check in self.due])
        if found >= 0:
            raise self.due[found][0]


class _Packing(Derivation):
    """The bytes are decoded from a payload by ``codec``."""

    __slots__ = ("_codec", "_payload", "_recipe", "dtype")
    where = "packed"
    fingerprint = threads = None

    def __init__(
        self, codec: Codec, recipe: Any, dtype: torch.dtype, payload: Entry | None
    ) -> None:
        self._codec = codec
        self._recipe = recipe
        self._payload = payload  # None if the recipe is enough
        self.dtype = dtype

    def given(self, unpack: Callable[[Any], Tensor]) -> Tensor | None:
        """See :meth:`Derivation.given`."""
        return None if self._payload is None else unpack(self._payload)

    def given_ahead(self, unpack: Callable[[Any], Tensor]) -> Tensor | None:
        """See :meth:`Derivation.given_ahead`: the program has no access to a payload."""
        return self.given(unpack)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """See :attr:`Derivation.entries`."""
        return () if self._payload is None else (self._payload,)

    def make(self, given: Any, out: Tensor) -> None:
        """See :meth:`Derivation.make`."""
        self._codec.decode(given, self._recipe, out)


class _MadeOn:
    """Memory of an accelerator that one stream has filled, for other streams that use it."""

    __slots__ = ("_device", "_memory", "_stream")

    def __init__(self, device: Device, stream: Any, memory: Tensor) -> None:
        self._device = device
        self._stream = stream
        self._memory = memory

    def order(self) -> None:
        """See :meth:`Arrival.order`."""
        stream = self._device.stream()
        if stream != self._stream:
            stream.wait_stream(self._stream)
            self._device.used(self._memory)


def decode_separately(
    entry: Entry, derivation: Derivation, given: Any, device: Device | None
) -> tuple[Tensor, int]:
    """Like :meth:`Packer.decode`, but in new memory and without touching anything shared."""
    block = entry.block
    root, low = torch.empty(block.nbytes, dtype=torch.uint8, device=entry.device), 0
    if entry.device.type == "cpu":
        root, low = own_memory(block.nbytes, block.address)
    check = _fill(entry, derivation, given, root, low, device)
    if check is not None and check.differs():
        raise recomputed_otherwise(entry, derivation)
    return root, low


def _fill(
    entry: Entry, derivation: Derivation, given: Any, root: Tensor, low: int, device: Device | None
) -> Check | None:
    """Compute the bytes in ``root`` from ``low`` on, hidden from the program's modes. Return the check that an
    accelerator has to make."""
    with without_function_modes(), without_dispatch(), torch.no_grad():
        derivation.make(given, root[low : low + entry.block.nbytes].view(derivation.dtype))
        return _check(entry, derivation, root, low, device)


def _check(
    entry: Entry, derivation: Derivation, root: Tensor, low: int, device: Device | None
) -> Check | None:
    """Check recomputed bytes against their fingerprint: an input may have been written unnoticed."""
    if derivation.fingerprint is None:
        return None
    storage, nbytes = root.untyped_storage(), entry.block.nbytes
    if device is None:
        if derivation.fingerprint != fingerprint(storage, low, nbytes):
            raise recomputed_otherwise(entry, derivation)
        return None
    check = device.compare(derivation.fingerprint, storage, low, nbytes)
    if check is None:
        raise torch.OutOfMemoryError("no memory to compare a recomputed tensor with the saved one")
    return check


def _own(payload: Tensor | None, values: Tensor, codec: Codec) -> Tensor | None:
    """Return ``payload`` in a storage of its own."""
    if payload is None:
        return None
    if type(payload) is not Tensor or payload.device != values.device or payload.numel() == 0:
        is_tensor = isinstance(payload, Tensor)
        what = f"{tuple(payload.shape)} on {payload.device}" if is_tensor else repr(payload)
        raise UsageError(
            f"{codec!r} has the payload {type(payload).__name__} {what}; allowed: a nonempty Tensor on "
            f"{values.device}, or None"
        )
    storage = payload.untyped_storage()
    is_own = storage.data_ptr() != values.untyped_storage().data_ptr()
    if is_own and payload.is_contiguous() and storage.nbytes() == payload.nbytes:
        return payload.detach()
    return payload.detach().clone(memory_format=torch.contiguous_format)
