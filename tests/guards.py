"""What keeps gradients right, each thing that can be undone: a search that misses it is no search.

A guard is undone by a small patch of the library, for as long as a context lasts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from backstash._core import admission as _admission
from backstash._core import hook_scope as _hook_scope
from backstash._core import identity as _identity
from backstash._core.session import Session
from backstash._core.way_back import WayBack
from backstash._saved import block as _block
from backstash._saved import entry as _entry
from backstash._saved import view as _view
from backstash._saved.placement import Lost, Stored
from backstash._saved.thread_state import ThreadState
from backstash._tiers import host_backing as _host_backing
from backstash._tiers import host_writeback as _host_writeback
from backstash._tiers import packing as _packing
from backstash._tiers.ahead import ViewServer
from backstash._tiers.backing import DiskCleanup
from backstash._tiers.disk import DiskTier
from backstash._tiers.eviction import Evictor
from backstash._tiers.packing import Packer
from backstash._tiers.resident import ResidentSet
from backstash.stash import Stash
from backstash.stores._buffer_pool import BufferPool
from backstash.testing import device as _device

Step = tuple[str, int, int]
Patch = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Guard:
    """One thing that keeps gradients right."""

    why: str
    """What it is for, in a sentence."""
    undone: Patch
    """A context in which the library does without it."""
    ways: str = ""
    """The ways that are searched, as a pattern; ``""``: all."""
    short: int = 0
    """The programs within which the tests find it missing; 0: that takes too long for them."""
    witness: tuple[Step, ...] = ()
    """A program that cannot do without it."""
    not_searched: str = ""
    """Why no program can detect its absence, where none can."""
    elsewhere: str = ""
    """Which tests find it missing, where random programs seldom do."""
    may_crash: bool = False
    """Whether the process may end of what is wrong then: an index among other bytes points anywhere."""


def _replaced(target: Any, name: str, new: Any) -> Patch:
    return lambda: mock.patch.object(target, name, new)


def _before(target: Any, name: str, act: Callable[..., None]) -> Patch:
    """``act`` runs before the method, with its arguments."""
    original = getattr(target, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return original(*args, **kwargs)

    return _replaced(target, name, method)


def _after(target: Any, name: str, act: Callable[..., None]) -> Patch:
    """``act`` runs after the method, with its arguments."""
    original = getattr(target, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        act(*args, **kwargs)
        return result

    return _replaced(target, name, method)


def _all(*patches: Patch) -> Patch:
    def undone() -> AbstractContextManager[Any]:
        stack = ExitStack()
        for patch in patches:
            stack.enter_context(patch())
        return stack

    return undone


def _unchecked_in(caller: str) -> Patch:
    """The version is not looked at by one caller."""
    look = _block.StorageVersion.changed.fget
    assert look is not None

    def changed(storage_version: _block.StorageVersion) -> bool:
        return sys._getframe(1).f_code.co_name != caller and look(storage_version)

    return _replaced(_block.StorageVersion, "changed", property(changed))


def _by_address(
    identities: Any, tensor: torch.Tensor, storage: torch.UntypedStorage
) -> _block.StorageVersion:
    storage_version = identities._versions.get(storage.data_ptr())
    if storage_version is None or storage_version.version != tensor._version:
        storage_version = identities._versions[storage.data_ptr()] = _block.StorageVersion(
            tensor, storage
        )
    return storage_version


def _same_version(storage_version: _block.StorageVersion, tensor: torch.Tensor) -> bool:
    return tensor._version == storage_version.version == storage_version.probe._version


def _unowned(storage_version: _block.StorageVersion, *_: Any) -> None:
    storage_version.__del__()
    storage_version.__del__ = tuple  # which does nothing


def _unpack_unchecked(stash: Stash, packed: Any) -> Any:
    if type(packed) is tuple:
        return packed[0]
    return packed if type(packed) is torch.Tensor else _UNPACK(stash, packed)


_UNPACK = Stash.unpack
_ADMIT = Evictor.admit
_SEND_DOWN = Evictor._send
_TAKE_LOADED = ViewServer.take
_BEGIN = DiskTier.begin
_TAKE = BufferPool.take
_STAY = _admission.Admission._stay
_UP = _device.TwinDevice.up


def _admit_at_once(evictor: Evictor, block: Any, *, at_once: bool, complete: bool) -> None:
    _ADMIT(evictor, block, at_once=at_once, complete=True)


def _send_unchecked(evictor: Evictor, block: Any, thread_state: ThreadState) -> bool:
    source = block.storage_version
    version, source.version = source.version, source.probe._version
    try:
        return _SEND_DOWN(evictor, block, thread_state)
    finally:
        source.version = version


def _begin_and_free(disk: DiskTier, block: Any) -> Any:
    block.placement = Stored(None)
    return _BEGIN(disk, block)


def _delete(stash: Stash, entry: Any) -> None:
    if entry.block.placement.alias is None:
        entry.block.placement = Lost(-1)


def _take_what_is_lent(pool: BufferPool, nbytes: int) -> torch.Tensor:
    memory = _TAKE(pool, nbytes)
    _, mapping = list(pool._lent.values())[-1]
    pool._idle.setdefault(len(mapping), []).append(mapping)
    return memory


def _release_while_written(session: Session) -> None:
    for item in session.reclaim_queue:
        if type(item) is DiskCleanup:
            item.transfer = None


def _forget_the_change(server: ViewServer, entry: Any) -> None:
    loaded = entry.block.loaded
    if loaded is not None:
        loaded.version = loaded.root._version


def _do_not_wait(
    server: ViewServer,
    entry: Any,
    block: Any,
    backing: Any,
    memory: Any,
    arrival: Any,
    low: int = 0,
) -> Any:
    return _TAKE_LOADED(server, entry, block, backing, memory, None, low)


def _return_without_memory(resident: ResidentSet, block: Any) -> None:
    block.placement = Stored(None)


def _take_for_ordered(stash: Stash, entry: Any) -> None:
    placement = entry.block.placement
    if placement.is_unordered:
        placement.is_unordered = False


def _write_at_once(copy: Any, disk: Any, slot: Any, memory: torch.Tensor) -> None:
    disk.write(slot, memory.data_ptr())


def _stay_as_it_is(admission: Any, tensor: torch.Tensor, reason: str) -> object:
    _STAY(admission, tensor, reason)
    return tensor if tensor._version == 0 else (tensor, tensor._version, "")


# On the twin a copy is done when it has run; on an accelerator also when the stream that follows on its source
# waits for it.
_DONE_BEFORE_IT_RAN = _replaced(_device._TwinCopy, "done", lambda copy: True)


def _set(name: str, value: Any) -> Callable[..., None]:
    def act(target: Any, *_: Any, **__: Any) -> None:
        setattr(target, name, value)

    return act


def _lose_strides(entry: Any, *_: Any) -> None:
    if entry.region is None:
        entry.stride = torch.empty(entry.shape, device="meta").stride()


def _pop_the_top(scope: Any) -> None:
    torch._C._autograd._pop_saved_tensors_default_hooks()


# What compares bytes would notice, too, that they are not those of a storage by its identity and version.
_UNCOMPARED = _replaced(_block.Block, "has", lambda block, storage, device: True)

GUARDS: dict[str, Guard] = {
    # Which bytes are whose.
    "a storage is known by itself, not its address": Guard(
        "freed memory is handed out again at the same address",
        _all(_replaced(_identity.Identities, "_identify", _by_address), _UNCOMPARED),
        "below",
        short=150,
    ),
    "a storage's identity is owned": Guard(
        "an identity is handed out again as an address is",
        _after(_block.StorageVersion, "__init__", _unowned),
        not_searched="the version counter is asked too and distinguishes them; the next row undoes both",
    ),
    "a storage's identity is owned, the counter asked": Guard(
        "an identity is handed out again as an address is",
        _all(
            _after(_block.StorageVersion, "__init__", _unowned),
            _replaced(_block.StorageVersion, "is_of", _same_version),
            _UNCOMPARED,
        ),
        "below",
        short=100,
    ),
    "the version counter is asked": Guard(
        "x.data shares the memory and not the counter",
        _all(_replaced(_block.StorageVersion, "is_of", _same_version), _UNCOMPARED),
        "below",
        witness=(("sin", 0, 0), ("exp", 0, 0), ("through data", 0, 1)),
    ),
    "the version is part of what a block is": Guard(
        "what is saved again after a change has other bytes",
        _all(
            _replaced(
                _block.StorageVersion,
                "is_of",
                lambda storage_version, tensor: _block.same_counter(storage_version.probe, tensor),
            ),
            _UNCOMPARED,
        ),
        "below",
    ),
    "what is saved again is compared": Guard(
        "a program may write what has left through .data, unseen",
        _UNCOMPARED,
        "below",
        witness=(("fill", 0, 0),),
    ),
    "an operation has ended": Guard(
        "rrelu saves its noise before it makes it",
        _replaced(Evictor, "admit", _admit_at_once),
        "below",
        witness=(("rrelu", 0, 0), ("sin", 0, 0)),
    ),
    "a storage that moved": Guard(
        "a resize gives other memory and raises no version",
        _replaced(_block.Block, "has_moved", property(lambda block: False)),
        "on its way|some kept",
    ),
    # Changes in place.
    "the version at unpack, in place": Guard(
        "hooks make autograd skip its own check",
        _unchecked_in("tensor_of"),
        "all kept",
        short=150,
    ),
    "the version at unpack, left alone": Guard(
        "what is too small to move is checked too",
        _replaced(Stash, "unpack", _unpack_unchecked),
        "all left",
        short=150,
    ),
    "the version when a copy completes": Guard(
        "a change while it was being written makes a torn copy",
        _unchecked_in("complete"),
        "on its way, one|host, never",
    ),
    "the version before it goes": Guard(
        "a block that was kept may have changed since",
        _replaced(Evictor, "_send", _send_unchecked),
        "some kept",
        witness=(("sin", 0, 0), ("mul_", 1, 0), ("sin", 0, 0), ("sin", 0, 0)),
    ),
    "the version of a part's copy": Guard(
        "a backward may have changed the copy that it was given",
        _unchecked_in("_has_copied"),
        not_searched="no program saves a part again after such a backward; tests/core/test_inplace.py does",
    ),
    "only its own thread judges a copy": Guard(
        "the version is raised after the bytes have changed",
        _replaced(ThreadState, "may_judge", lambda thread_state, other: True),
        "on its way, one",
        witness=(("sin", 0, 0), ("seen late", 0, 0), ("sin", 1, 1)),
    ),
    # What is held, and how long.
    "memory is held until it is written": Guard(
        "early release: the allocator hands it to the next tensor",
        _replaced(DiskTier, "begin", _begin_and_free),
        "on its way, one",
        short=60,
        may_crash=True,
    ),
    "nothing is deleted at unpack": Guard(
        "retain_graph, double backward and looking unpack again",
        _after(WayBack, "tensor_of", _delete),
        "below",
        short=20,
    ),
    "memory that is still looked at is not used again": Guard(
        "a view that backward holds would change under it",
        _replaced(BufferPool, "take", _take_what_is_lent),
        "below, one by one|below, no",
        short=80,
    ),
    "a slot is kept while it is written to": Guard(
        "a dead block's late write would overwrite the next one's",
        _before(Session, "drain", _release_while_written),
        not_searched="two writes to one slot mostly end in the order in which they began",
    ),
    "a host buffer is given back when it is at rest": Guard(
        "host memory that a copy still reads or fills",
        _replaced(_host_backing.HostCleanup, "at_rest", lambda cleanup: True),
        "host",
    ),
    "what backward changed is read again": Guard(
        "a custom backward may change what it was given",
        _before(ViewServer, "at_hand", _forget_the_change),
        "below",
    ),
    "a write that failed": Guard(
        "the block stays where it was",
        _after(ResidentSet, "take_back", _return_without_memory),
        "fails",
    ),
    "autograd does not hold itself": Guard(
        "an output that is packed as it is makes a cycle that nobody collects",
        _replaced(_admission.Admission, "_stay", _stay_as_it_is),
        "policy",
    ),
    # Order, on an accelerator.
    "disk is written after the copy to the host": Guard(
        "the buffer is garbage until then",
        _replaced(_host_writeback, "_write_down", _write_at_once),
        "host",
    ),
    "a copy up comes after the copy down": Guard(
        "they run on two streams",
        _all(
            _DONE_BEFORE_IT_RAN,
            _replaced(
                _device.TwinDevice, "up", lambda twin, source, after: _UP(twin, source, None)
            ),
        ),
        "host",
        short=20,
    ),
    "who uses the bytes waits for the copy up": Guard(
        "the target is garbage until then",
        _replaced(ViewServer, "take", _do_not_wait),
        "host",
    ),
    "what completed while it was copied": Guard(
        "only the streams that wait are ordered after the copy",
        _all(
            _DONE_BEFORE_IT_RAN,
            _before(WayBack, "tensor_of", _take_for_ordered),
        ),
        "host, never",
        short=150,
    ),
    # Views.
    "the strides of a view": Guard(
        "k @ k.t() is two views of the same bytes",
        _after(_entry.Entry, "__init__", _lose_strides),
        "below",
        short=100,
    ),
    "the offset of a view": Guard(
        "views begin anywhere",
        _after(_entry.Entry, "__init__", _set("offset_bytes", 0)),
        "below",
    ),
    "the conj bit": Guard(
        "a raw copy loses it",
        _after(_entry.Entry, "__init__", _set("conj", False)),
        "below",
        witness=(("conj product", 0, 0),),
    ),
    "the neg bit": Guard(
        "a raw copy loses it",
        _after(_entry.Entry, "__init__", _set("neg", False)),
        "below",
        witness=(("neg product", 0, 0),),
    ),
    "a part with gaps is spread out again": Guard(
        "its copy is dense",
        _replaced(_view.StridedRegion, "is_dense", property(lambda region: True)),
        "below",
    ),
    "a part is known by all its strides": Guard(
        "two views of as many elements from the same place",
        _replaced(
            _view.StridedRegion, "key", property(lambda region: (region.first, region.count))
        ),
        "below",
        elsewhere="tests/saved/test_view.py has it",
    ),
    "a part whose elements overlap": Guard(
        "is copied from its first to its last",
        _replaced(_view, "_overlap", lambda runs: False),
        "below",
        elsewhere="tests/saved/test_view.py has it",
    ),
    # What is packed.
    "what is packed gives its bytes back": Guard(
        "a codec that says it is exact may not be",
        _replaced(Packer, "_comes_back", lambda packer, values, encoded, codec: True),
        "packed wrong",
        short=20,
    ),
    "the version when it is packed": Guard(
        "a block that waited may have changed since it was saved",
        _unchecked_in("pack"),
        "packed$",
    ),
    "a payload has memory of its own": Guard(
        "a codec may return a part of what it was given",
        _replaced(_packing, "_own", lambda payload, values, codec: payload),
        not_searched="the version of what they share shows a change; tests/tiers/test_packed.py has it",
    ),
    # What is recomputed.
    "the first replay of a class is compared": Guard(
        "an operation may have been called in another way, or its result written unseen",
        _replaced(Packer, "_reason_to_doubt", lambda packer, block, replay: ""),
        "recomputed",
    ),
    "each replay's fingerprint is compared": Guard(
        "an operand may have been written unseen since",
        _replaced(_packing, "_check", lambda *given: None),
        "recomputed",
        elsewhere="tests/recompute/test_recomputed.py has it",
    ),
    "the version when it is recomputed": Guard(
        "a block that waited may have changed since it was saved",
        _unchecked_in("discard"),
        "recomputed",
    ),
    # Subclasses and scopes.
    "a subclass that has changed": Guard(
        "is packed again",
        _replaced(_entry.WrapperEntry, "is_of", lambda entry, tensor: True),
        "below",
        elsewhere="tests/core/test_exact_kinds.py has it",
    ),
    "what a subclass is made of is copied": Guard(
        "a change of the whole raises no version of a part",
        _replaced(_admission, "snapshot", lambda part: part.detach()),
        "all kept|all left",
        witness=(("two tensors, changed", 0, 0),),
    ),
    "a stash that is left under another's hooks": Guard(
        "autograd pops whatever is on top",
        _replaced(_hook_scope, "_take_out", _pop_the_top),
        "below",
        witness=(
            ("enter aliases", 0, 0),
            ("leave ours first", 0, 0),
            ("sin", 0, 0),
            ("mul_", 1, 0),
        ),
    ),
}
