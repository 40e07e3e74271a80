"""An accelerator on the CPU that counts what it is asked: what a stash costs a program that runs ahead of its
device.

The code that drives a real accelerator drives this one, too: the same copies, events and waits. Only the
streams are stand-ins. Ordinary CPU tensors are its memory, and a copy has run when it was begun; but an event
says that it has ended only when the device was given so much more, as it is where the host runs ahead.
"""

from __future__ import annotations

import collections
import functools
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .._core.admission import Admission
from .._device.accelerator import Accelerator
from .._device.base import Check, Completion, Copy, MemoryFigures
from .._device.copies import Lane
from .._device.fingerprint import fingerprint
from .._saved.thread_state import ThreadState

__all__ = ["CountedDevice"]


class _CountedEvent:
    def __init__(self, device: CountedDevice) -> None:
        self._device = device
        self.number = device.given
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        self._device.counts["event_queries"] += 1
        return self._device.has_come_to(self.number)

    def synchronize(self) -> None:
        self._device.synchronize(self.number)


class _Stream:
    def __init__(self, device: CountedDevice) -> None:
        self._device = device
        self._before: list[_Stream | None] = []

    def record_event(self, event: Any = None) -> _CountedEvent:
        self._device.counts["event_records"] += 1
        self._device.given += 1
        return _CountedEvent(self._device)

    def wait_event(self, event: _CountedEvent) -> None:
        self._device.counts["stream_waits"] += 1

    def synchronize(self) -> None:
        self._device.synchronize(self._device.given)

    def __enter__(self) -> _Stream:
        current = self._device.current
        self._before.append(getattr(current, "stream", None))
        current.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        self._device.current.stream = self._before.pop()


class _CountedCheck(Check):
    __slots__ = ("_device", "check")

    def __init__(self, device: CountedDevice, check: Check) -> None:
        self._device, self.check = device, check

    def differs(self) -> bool:
        self._device.counts["host_syncs"] += 1
        return self.check.differs()


class CountedDevice(Accelerator):
    """Counts what a stash asks of an accelerator; for :func:`~backstash.testing.stash_on`.

    Args:
        ahead: the device has not reached the last so many of the copies, fingerprints and events that it was
            given: a query of a later event says no, unless the host has waited for it.

    ``counts`` is a :class:`collections.Counter` with the keys

    - ``"kernels"``: fingerprints, one for each storage that is read. What the program runs is not counted;
    - ``"copies_down"``, ``"copies_up"``: copies that were begun, to the host and from it;
    - ``"event_records"``, ``"stream_waits"``, ``"event_queries"``, ``"record_stream"``: such calls;
    - ``"host_syncs"``: how often the host waited for the device;
    - ``"memory_queries"``: how often the allocator was asked for its figures.

    The memory that it reports is what the stash holds on it or leaves there for autograd, and nothing else: a
    budget of half of what a step saves has half of it moved or recomputed.

    >>> from backstash.testing import stash_on
    >>> device = CountedDevice()
    >>> x = torch.ones(512, 512, requires_grad=True)
    >>> with stash_on(device, host="64MiB") as stash:
    ...     y = x.exp().sum()
    >>> y.backward()
    >>> device.counts["copies_down"], device.counts["kernels"]
    (1, 1)
    """

    def __init__(self, ahead: int = 16) -> None:
        self.counts: Counter[str] = Counter()
        self.current = threading.local()
        self.holds: Callable[[], int] = int
        """The bytes that are held on it; :func:`~backstash.testing.stash_on` sets it."""
        self.given = 0
        """How many copies, fingerprints and events it was given so far."""
        self._left: Counter[tuple[int, int]] = Counter()
        self._ahead = ahead
        self._reached = self._peak_bytes = 0
        # As Accelerator's, without a device of PyTorch's.
        self.name = "counted"
        self._device = torch.device("cpu")
        self._pid = os.getpid()
        self.is_capturing = bool
        self._compute = _Stream(self)
        self._down, self._up = Lane(_Stream(self)), Lane(_Stream(self))
        self._asking = cast(Any, (_Stream(self), threading.RLock()))
        self._savers = []
        self.unfinished, self.dropped = collections.deque(), collections.deque()

    def watch(self, admission: Admission) -> None:
        """Count what the hooks of a stash leave in place without managing it: :attr:`left_bytes`."""
        for name in ("hook", "hook_leaving"):
            hook = functools.partial(self._watching, admission, getattr(admission, name))
            setattr(admission, name, hook)

    def _watching(
        self,
        admission: Admission,
        hook: Callable[..., Callable[[Tensor], object]],
        thread_state: ThreadState,
        *given: Any,
    ) -> Callable[[Tensor], object]:
        pack = hook(thread_state, *given)

        def packed(tensor: Tensor) -> object:
            before = thread_state.fitting_saves
            given = pack(tensor)
            if thread_state.fitting_saves > before and not admission.identities.has_in_place(
                tensor
            ):
                left = cast(Tensor, given[0] if type(given) is tuple else given)
                storage = left.untyped_storage()
                key = storage.data_ptr(), storage.nbytes()
                self._left[key] += 1
                weakref.finalize(left, self._is_gone, key)
            return given

        return packed

    def _is_gone(self, key: tuple[int, int]) -> None:
        self._left[key] -= 1
        if not self._left[key]:
            del self._left[key]

    @property
    def left_bytes(self) -> int:
        """The bytes of storages that are left in place, each counted once."""
        return sum(nbytes for _, nbytes in [*self._left])

    def has_come_to(self, number: int) -> bool:
        """Whether the device has reached the work of that number."""
        return number <= max(self._reached, self.given - self._ahead)

    def synchronize(self, number: int) -> None:
        """The host waits for the work of that number, if the device has not reached it."""
        if not self.has_come_to(number):
            self.counts["host_syncs"] += 1
            self._reached = number

    def stream(self) -> Any:
        """See :meth:`Device.stream`."""
        return getattr(self.current, "stream", None) or self._compute

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """See :meth:`Accelerator.record_stream`."""
        self.counts["record_stream"] += 1

    def down(self, source: Tensor, target: Tensor, made_on: Any) -> Copy:
        """See :meth:`Device.down`."""
        self.counts["copies_down"] += 1
        self.given += 1
        return super().down(source, target, made_on)

    def up(self, source: Tensor, after: Completion | None) -> Copy:
        """See :meth:`Device.up`."""
        self.counts["copies_up"] += 1
        self.given += 1
        return super().up(source, after)

    def keep_busy(self, seconds: float) -> None:
        """See :meth:`Device.keep_busy`. What it counts has no time."""

    def sums(self, storage: torch.UntypedStorage, first: int = 0, nbytes: int = -1) -> Tensor:
        """See :meth:`Accelerator.sums`."""
        self.counts["kernels"] += 1
        self.given += 1
        found = fingerprint(storage, first, nbytes)
        if isinstance(found, bytes):
            return torch.frombuffer(bytearray(found), dtype=torch.int64)
        return torch.tensor(found, dtype=torch.int64)

    def compare(
        self, mark: Any, storage: torch.UntypedStorage, first: int = 0, nbytes: int = -1
    ) -> Check | None:
        """See :meth:`Device.compare`."""
        check = super().compare(mark, storage, first, nbytes)
        return check and _CountedCheck(self, check)

    def first_difference(self, checks: Sequence[Check]) -> int:
        """See :meth:`Device.first_difference`."""
        self.counts["host_syncs"] += 1
        return super().first_difference(
            [each.check if isinstance(each, _CountedCheck) else each for each in checks]
        )

    def compare_marks(self, marks: Sequence[tuple[Any, Any]]) -> Check | None:
        """See :meth:`Device.compare_marks`."""
        check = super().compare_marks(marks)
        return check and _CountedCheck(self, check)

    def pin(self, memory: Tensor) -> str:
        """See :meth:`Device.pin`."""
        return ""

    def pinned(self, nbytes: int) -> Tensor | str:
        """See :meth:`Device.pinned`."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def unpin(self, memory: Tensor) -> None:
        """See :meth:`Device.unpin`."""

    def give_back(self, memory: Tensor) -> None:
        """See :meth:`Device.give_back`."""

    def free_bytes(self) -> int:
        """See :meth:`Device.free_bytes`."""
        self.counts["memory_queries"] += 1
        return 1 << 40

    def memory(self) -> MemoryFigures:
        """See :meth:`Device.memory`."""
        self.counts["memory_queries"] += 1
        held = self.holds()
        self._peak_bytes = max(self._peak_bytes, held)
        return MemoryFigures(held, self._peak_bytes, 0, 0)

    def failures(self) -> int:
        """See :meth:`Device.failures`."""
        self.counts["memory_queries"] += 1
        return 0

    def _mark_on(self, stream: Any) -> Any:
        return stream.record_event()

    def seconds_between(self, since: Any, until: Any) -> float:
        """See :meth:`Device.seconds_between`. By the host's clock: it computes what the device would."""
        for mark in (since, until):
            mark.synchronize()
        return float(until.seconds - since.seconds)
