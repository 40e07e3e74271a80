"""Test stores and codecs: conformance checks, and stores that wait, fill up or fail on command.

The wrappers make races and faults repeatable: a test decides when a write ends, instead of sleeping and
hoping. backstash's own tests use them.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..errors import StashClosedError, StashFullError, StashIOError
from ..stash import Stash, _levels_of
from ..stores import Slot, Store
from .codecs import check_codec
from .counted import CountedDevice
from .device import TwinDevice

__all__ = [
    "CountedDevice",
    "Failing",
    "Gated",
    "MemoryStore",
    "TwinDevice",
    "check_codec",
    "check_store",
    "stash_on",
]

_PAGE_BYTES = 4096
_ALIGNMENT_BYTES = 64  # of tensors on the CPU
_SIZES = (1, 63, 64, 511, 512, 513, 4095, 4096, 4097, 70_001, 1 << 20, (1 << 20) + 24)


class MemoryStore(Store):
    """Holds bytes in ordinary memory: the simplest store there is.

    >>> check_store(MemoryStore)
    """

    def __init__(self, *, max_bytes: int | None = None) -> None:
        self.name = "memory"
        self.threads = 2
        self.notes = ()
        self.max_bytes = max_bytes
        self._bytes: dict[int, bytes] | None = {}
        self._used = 0
        self._next = 0

    def reserve(self, nbytes: int) -> Slot:
        """See :meth:`Store.reserve`."""
        self._contents()
        if self.max_bytes is not None and self._used + nbytes > self.max_bytes:
            raise StashFullError(errno.ENOSPC, f"{self.name} has no space for {nbytes} bytes")
        self._used += nbytes
        self._next += 1
        return Slot(nbytes, self._next)

    def write(self, slot: Slot, address: int) -> None:
        """See :meth:`Store.write`."""
        self._contents()[slot.offset] = ctypes.string_at(address, slot.nbytes)

    def read(self, slot: Slot, address: int) -> None:
        """See :meth:`Store.read`."""
        found = self._contents().get(slot.offset)
        if found is None:
            raise StashIOError(errno.EIO, f"{self.name} has nothing at {slot.offset}")
        ctypes.memmove(address, found, slot.nbytes)

    def release(self, slot: Slot) -> None:
        """See :meth:`Store.release`."""
        if self._bytes is not None:
            self._bytes.pop(slot.offset, None)
        self._used -= slot.nbytes

    @property
    def used_bytes(self) -> int:
        """See :attr:`Store.used_bytes`."""
        return self._used

    def close(self) -> None:
        """See :meth:`Store.close`."""
        self._bytes = None

    def _contents(self) -> dict[int, bytes]:
        if self._bytes is None:
            raise StashClosedError(f"{self.name} is closed")
        return self._bytes


class _Wrapping(Store):
    def __init__(self, store: Store) -> None:
        self.store = store
        self.name = f"{type(self).__name__.lower()} {store.name}"
        self.threads = store.threads
        self.notes = store.notes
        self.max_bytes = store.max_bytes
        self.lock = store.lock
        self.begins_anew_when_forked = store.begins_anew_when_forked

    def reserve(self, nbytes: int) -> Slot:
        return self.store.reserve(nbytes)

    def stage(self, slot: Slot, address: int) -> None:
        self.store.stage(slot, address)

    def write(self, slot: Slot, address: int) -> None:
        self.store.write(slot, address)

    def read(self, slot: Slot, address: int) -> None:
        self.store.read(slot, address)

    def release(self, slot: Slot) -> None:
        self.store.release(slot)

    @property
    def used_bytes(self) -> int:
        return self.store.used_bytes

    def close(self) -> None:
        self.store.close()


class Gated(_Wrapping):
    """A store whose writes and reads wait until the test lets them go.

    Both gates are open at first. ``writes.clear()`` shuts the way down, ``writes.set()`` opens it;
    ``reads`` likewise. ``begun`` counts the writes that have arrived at the gate.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.writes = threading.Event()
        self.reads = threading.Event()
        self.writes.set()
        self.reads.set()
        self.begun = threading.Semaphore(0)

    def write(self, slot: Slot, address: int) -> None:
        """Wait for ``writes``, then write."""
        self.begun.release()
        self.writes.wait()
        self.store.write(slot, address)

    def read(self, slot: Slot, address: int) -> None:
        """Wait for ``reads``, then read."""
        self.reads.wait()
        self.store.read(slot, address)


class Failing(_Wrapping):
    """A store that fails on command: set ``on_reserve``, ``on_write`` or ``on_read`` to an exception."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.on_reserve: Exception | None = None
        self.on_write: Exception | None = None
        self.on_read: Exception | None = None

    def reserve(self, nbytes: int) -> Slot:
        """Reserve, or raise ``on_reserve``."""
        if self.on_reserve is not None:
            raise self.on_reserve
        return self.store.reserve(nbytes)

    def write(self, slot: Slot, address: int) -> None:
        """Write, or raise ``on_write``."""
        if self.on_write is not None:
            raise self.on_write
        self.store.write(slot, address)

    def read(self, slot: Slot, address: int) -> None:
        """Read, or raise ``on_read``."""
        if self.on_read is not None:
            raise self.on_read
        self.store.read(slot, address)


def stash_on(device: TwinDevice | CountedDevice, **options: Any) -> Stash:
    """A stash to which CPU tensors are an accelerator's: what a :class:`TwinDevice` copies, and when, a test
    decides; a :class:`CountedDevice` counts what it is asked.

    Args:
        device: stands in for the accelerator.
        options: the stash's.

    >>> device = TwinDevice()
    >>> x = torch.ones(200, 200, requires_grad=True)
    >>> with stash_on(device, host="1MiB") as stash:
    ...     y = x.exp().sum()
    >>> len(device.downs)  # it has begun and not yet run
    1
    >>> y.backward()
    """
    stash = Stash(**options)
    stash._session.put(torch.device("cpu"), stash._config.tiers(device, 1))
    if isinstance(device, CountedDevice):
        device.watch(stash._admission)
        device.holds = functools.partial(_held_bytes, weakref.ref(stash), device)
    return stash


def _held_bytes(stash: weakref.ref[Stash], device: CountedDevice) -> int:
    """What a stash holds in the memory of its device, with copies under way and what it leaves there."""
    resident, inflight, _, _, ahead = _levels_of(stash)
    return resident + inflight + ahead + device.left_bytes


def check_store(make: Callable[[], Store]) -> None:
    """Check that what ``make()`` returns keeps a store's promises; ``AssertionError`` says which it breaks.

    Bytes come back exactly, for sizes around every alignment and at every residue. Slots are independent, and
    their space is reused. Reads may be repeated, and may run during writes on other threads. Closing twice is
    fine, and a closed store refuses work.
    """
    store = make()
    try:
        _check_bytes(store)
        _check_room(store)
        _check_threads(store)
    finally:
        store.close()
    store.close()
    try:
        store.reserve(64)
    except StashClosedError:
        return
    raise AssertionError("a closed store still reserves")


def _memory(nbytes: int, residue: int) -> tuple[torch.Tensor, int]:
    """A tensor that owns memory and an address in it with ``residue`` modulo a page."""
    owner = torch.zeros(nbytes + 2 * _PAGE_BYTES, dtype=torch.uint8)
    base = -(-owner.data_ptr() // _PAGE_BYTES) * _PAGE_BYTES
    return owner, base + residue


def _check_bytes(store: Store) -> None:
    generator = torch.Generator().manual_seed(0)
    held = []
    for number, nbytes in enumerate(_SIZES):
        residue = (number * _ALIGNMENT_BYTES) % _PAGE_BYTES
        owner, address = _memory(nbytes, residue)
        owner.random_(0, 256, generator=generator)
        slot = store.reserve(nbytes)
        assert slot.nbytes == nbytes, f"asked for {nbytes} bytes, got a slot of {slot.nbytes}"
        store.write(slot, address)
        held.append((slot, residue, ctypes.string_at(address, nbytes)))
    for slot, residue, expected in [*held, *reversed(held)]:
        owner, address = _memory(slot.nbytes, residue)
        store.read(slot, address)
        assert ctypes.string_at(address, slot.nbytes) == expected, f"{slot.nbytes} bytes differ"
        rest = owner.data_ptr() + owner.numel() - address - slot.nbytes
        assert not any(ctypes.string_at(address + slot.nbytes, min(rest, 64))), "read past the end"
    for slot, _, _ in held:
        store.release(slot)


def _check_room(store: Store) -> None:
    before = store.used_bytes
    slots = [store.reserve(10_000) for _ in range(10)]
    assert store.used_bytes >= before + 100_000, "used_bytes does not count what is reserved"
    for slot in slots:
        store.release(slot)
    assert store.used_bytes == before, "released space is still counted"


def _check_threads(store: Store) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            owner, address = _memory(100_000, 64)
            owner.fill_(seed)
            slot = store.reserve(100_000)
            store.write(slot, address)
            target, back = _memory(100_000, 64)
            store.read(slot, back)
            assert ctypes.string_at(back, 100_000) == bytes([seed]) * 100_000, "slots overlap"
            store.release(slot)
            del target
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
