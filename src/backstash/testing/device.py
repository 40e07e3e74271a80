"""A device on the CPU whose copies a test lets run when it wants, in place of an accelerator.

Ordinary CPU tensors are its memory. What computes runs at once, as CPU operations do, so its stream is
always idle; the two copying streams are queues. A copy runs when the test says so (:meth:`TwinDevice.run`),
when the current stream is made to wait for it, when a thread waits for it, or by chance. Until then its
target is garbage, as memory is that nobody has filled. Whatever is asked of the device while ``capturing`` is
a fault, kept in ``faults``.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .._device.base import Check, Completion, Copy, Device, MemoryFigures
from .._device.fingerprint import fingerprint

__all__ = ["TwinDevice"]

_GARBAGE = 0xDD


class _TwinEvent(Completion):
    def __init__(self, device: TwinDevice, queue: list[_TwinCopy]) -> None:
        self._device = device
        self._queue = queue
        self.has_run = self._was_seen = False

    def ended(self) -> bool:
        if not self._device.capturing:
            self._device.by_chance()
            self._was_seen = self.has_run
        return self._was_seen

    def wait(self) -> None:
        self._device.touched("waited for")
        self._device.waits += 1
        self.run_up_to_here()

    def run_up_to_here(self) -> None:
        with self._device.lock:
            while not self.has_run:
                self._queue[0].run()


class _TwinCopy(Copy):
    """The queue that it waits in owns it, so its source is alive until it has run, as an allocator sees to."""

    completion: _TwinEvent

    def __init__(
        self,
        device: TwinDevice,
        queue: list[_TwinCopy],
        source: Tensor,
        memory: Tensor,
        after: _TwinEvent | None,
    ) -> None:
        self.memory = memory
        self.completion = _TwinEvent(device, queue)
        self._device = device
        self._queue = queue
        self._source: Tensor = source
        self._after = after
        queue.append(self)

    def done(self) -> bool:
        return self.ended()

    def order(self) -> None:
        self._device.touched("ordered")
        self._device.orders += 1
        self.completion.run_up_to_here()

    def run(self) -> None:
        """Copy. Everything before it in its queue has run."""
        if self._after is not None:
            self._after.run_up_to_here()
        assert self._queue[0] is self
        self.memory.data.copy_(self._source)
        self.completion.has_run, self._after = True, None
        self._queue.pop(0)  # last, so that an interrupt leaves it to run again


class _TwinCheck(Check):
    def __init__(self, found: bool) -> None:
        self._found = found

    def differs(self) -> bool:
        return self._found


class TwinDevice(Device):
    """Stands in for an accelerator in tests.

    Args:
        chance: how likely each look at a copy lets the next ones of each queue run.
        seed: of the chance.
        refuses: why memory cannot be pinned; ``""`` when it can.
        free: the bytes that :meth:`free_bytes` answers.

    What :meth:`failures` answers is ``failed``, which a test may raise, and what :meth:`memory` does is
    ``figures``. Its points in time are the host's.
    """

    def __init__(
        self, *, chance: float = 0.0, seed: int = 0, refuses: str = "", free: int = 1 << 40
    ) -> None:
        self.name = "twin"
        self.lock = threading.RLock()
        self.downs: list[_TwinCopy] = []
        self.ups: list[_TwinCopy] = []
        self.faults: list[str] = []
        self.orders = self.waits = 0
        self._pinned: dict[int, int] = {}
        self.capturing = False
        self.free = free
        self.failed = 0
        self.figures = MemoryFigures(0, 0, 0, 0)
        self._refuses = refuses
        self._chance = chance
        self._random = random.Random(seed)

    def run(self, downs: int = 0, ups: int = 0) -> None:
        """Let so many of the waiting copies run, oldest first; ``-1``: all."""
        with self.lock:
            for queue, count in ((self.downs, downs), (self.ups, ups)):
                for _ in range(len(queue) if count < 0 else min(count, len(queue))):
                    if queue:
                        queue[0].run()

    def touched(self, how: str) -> None:
        """Something is asked of the device, which ends a capture."""
        if self.capturing:
            self.faults.append(f"a copy was {how} while a graph was captured")

    def by_chance(self) -> None:
        """Somebody looks: what is waiting may have run meanwhile."""
        if self._chance:
            with self.lock:
                for queue in (self.downs, self.ups):
                    while queue and self._random.random() < self._chance:
                        queue[0].run()

    def stream(self) -> Any:
        """See :meth:`Device.stream`."""
        self.by_chance()
        return "the current stream"

    def used(self, tensor: Tensor) -> Any:
        """See :meth:`Device.used`. There is one stream, which has asked for all memory."""
        return self.stream()

    def is_capturing(self) -> bool:
        """See :meth:`Device.is_capturing`."""
        return self.capturing

    def down(self, source: Tensor, target: Tensor, made_on: Any) -> Copy:
        """See :meth:`Device.down`."""
        self.touched("begun")
        with self.lock:
            target.fill_(_GARBAGE)
            return _TwinCopy(self, self.downs, source, target, None)

    def up(self, source: Tensor, after: Completion | None) -> Copy:
        """See :meth:`Device.up`."""
        self.touched("begun")
        if source.numel() > self.free:
            raise torch.OutOfMemoryError(f"the twin has {self.free} bytes")
        with self.lock:
            memory = torch.full((source.numel(),), _GARBAGE, dtype=torch.uint8)
            return _TwinCopy(self, self.ups, source, memory, cast("_TwinEvent | None", after))

    def mark(
        self, storage: torch.UntypedStorage, made_on: Any, first: int = 0, nbytes: int = -1
    ) -> object:
        """See :meth:`Device.mark`."""
        return fingerprint(storage, first, nbytes)

    def compare(
        self, mark: Any, storage: torch.UntypedStorage, first: int = 0, nbytes: int = -1
    ) -> Check:
        """See :meth:`Device.compare`."""
        return _TwinCheck(mark != fingerprint(storage, first, nbytes))

    def compare_marks(self, marks: Sequence[tuple[Any, Any]]) -> Check:
        """See :meth:`Device.compare_marks`."""
        return _TwinCheck(any(before != now for before, now in marks))

    def pin(self, memory: Tensor) -> str:
        """See :meth:`Device.pin`."""
        if not self._refuses:
            self._pinned[memory.data_ptr()] = memory.nbytes
        return self._refuses

    def pinned(self, nbytes: int) -> Tensor | str:
        """See :meth:`Device.pinned`."""
        return "a twin has none"

    def unpin(self, memory: Tensor) -> None:
        """See :meth:`Device.unpin`."""
        self._pinned.pop(memory.data_ptr(), None)

    def give_back(self, memory: Tensor) -> None:
        """See :meth:`Device.give_back`."""

    @property
    def pinned_bytes(self) -> int:
        """The bytes that are pinned."""
        return sum(self._pinned.values())

    def finish(self) -> None:
        """See :meth:`Device.finish`."""
        self.run(-1, -1)

    def free_bytes(self) -> int:
        """See :meth:`Device.free_bytes`."""
        self.touched("planned")
        return self.free

    def memory(self) -> MemoryFigures:
        """See :meth:`Device.memory`."""
        return self.figures

    def time_mark(self) -> float:
        """See :meth:`Device.time_mark`."""
        return time.perf_counter()

    def seconds_between(self, since: float, until: float) -> float:
        """See :meth:`Device.seconds_between`."""
        return until - since

    def has_passed(self, mark: float) -> bool:
        """See :meth:`Device.has_passed`."""
        return True

    def failures(self) -> int:
        """See :meth:`Device.failures`."""
        return self.failed
