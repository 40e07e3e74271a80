"""Streams and events of an accelerator: copies that run beside compute, and what orders them.

This file alone knows how a device is driven; ``_streams_twin`` is the same for a test, on a CPU. The rules:

- A copy *down* waits for everything that the stream which made the tensor had been given, runs on a stream
  of its own, and its source is owned until the copy has ended or the current stream has been told to wait
  for it: memory that the current stream gets back is then not written before the copy has read it.
- A copy *up* goes to memory of the current stream, so that the caching allocator may use it again for what
  that stream does; the side stream waits for that memory, whoever uses the bytes waits for the copy.
- Nothing here makes the computing thread wait for the device. Whoever reads the host's bytes, a worker that
  writes them to disk, waits for the event itself.

Sources: PyTorch's notes on CUDA streams and on ``Tensor.record_stream``; Transformer Engine's offloading
allocates on the compute stream likewise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["Accelerator", "Copy", "Device", "accelerator"]

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


class Copy(ABC):
    """A copy that was begun. It owns its source and its target. Its face is a ``Future``'s, as far as the
    way down looks at one."""

    memory: Tensor
    """What it fills."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it has ended, or the stream that owns its source waits for it."""

    @abstractmethod
    def ended(self) -> bool:
        """Whether its bytes are there for the host."""

    @abstractmethod
    def order(self) -> None:
        """Let what the current stream does from now on come after it. The host does not wait."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until it has ended: for threads that compute nothing."""

    @abstractmethod
    def release(self) -> None:
        """No longer own the source, once :meth:`done`."""

    def exception(self) -> None:
        """Order it, as a ``Future``'s would wait; a copy does not fail once it has begun."""
        self.order()

    def cancel(self) -> bool:
        """What has begun is not called back."""
        return False


class Device(ABC):
    """What a stash needs of one device."""

    name: str
    """What messages call it."""

    @abstractmethod
    def stream(self) -> Any:
        """The stream that is current on this thread, to be asked at each save."""

    @abstractmethod
    def is_capturing(self) -> bool:
        """Whether what runs now is recorded into a graph, so that no event may be asked."""

    @abstractmethod
    def down(self, source: Tensor, target: Tensor, made_on: Any) -> Copy:
        """Begin to copy ``source`` (bytes on the device) to ``target`` (bytes of the host).

        Args:
            made_on: the stream that the source was made on.
        """

    @abstractmethod
    def up(self, source: Tensor, after: Copy | None) -> Copy:
        """Begin to copy the host's bytes to new memory of the device, after the copy that brings them.

        Raises ``torch.OutOfMemoryError``; nothing has begun then.
        """

    @abstractmethod
    def pin(self, memory: Tensor) -> str:
        """Lock the host's ``memory`` for fast copies. Returns why that was refused, or ``""``."""

    @abstractmethod
    def unpin(self, memory: Tensor) -> None:
        """Undo :meth:`pin`, after every copy has ended."""

    @abstractmethod
    def free_bytes(self) -> int:
        """The device's memory that is free, what the caching allocator keeps included."""


class _StreamCopy(Copy):
    def __init__(
        self, device: Accelerator, side: Any, owner: Any, source: Tensor, memory: Tensor
    ) -> None:
        self.memory = memory
        self._source = source
        self._device = device
        self._side = side  # the stream that copies
        self._owner = owner  # the stream whose memory the device's end is
        self._event = side.record_event()
        self._is_safe = False  # whether the device's end may be let go

    def __del__(self) -> None:
        # May run on any thread in the middle of anything: it only appends.
        if not self._is_safe:
            self._device.unfinished.append((self._event, self._source, self.memory))

    def done(self) -> bool:
        return self._is_safe or self.ended()

    def ended(self) -> bool:
        if self._event.query():
            self._is_safe = True
            return True
        return False

    def order(self) -> None:
        if self.ended():
            return
        stream = self._device.stream()
        stream.wait_event(self._event)
        if stream != self._owner:  # whose memory it is must know who else uses it, and until when
            on_device = self._source if self._source.device.type != "cpu" else self.memory
            on_device.record_stream(self._side)
            on_device.record_stream(stream)
        self._is_safe = True

    def wait(self) -> None:
        self._event.synchronize()

    def release(self) -> None:
        if not self.done():
            self._device.unfinished.append((self._event, self._source, self.memory))
        self._source = self.memory

    def follow(self, side: Any) -> None:
        """Let ``side`` come after it."""
        side.wait_event(self._event)


class Accelerator(Device):
    """An accelerator as ``torch.accelerator`` drives it.

    Args:
        device: with its index.

    Raises:
        RuntimeError: it has no streams.
    """

    def __init__(self, device: torch.device) -> None:
        self.name = str(device)
        self._device = device
        self._module: Any = getattr(torch, device.type)
        self._down = torch.Stream(device)
        self._up = torch.Stream(device)
        # What copies that nobody waits for any more still read and write.
        self.unfinished: deque[tuple[Any, Tensor, Tensor]] = deque()

    def stream(self) -> Any:
        """See :meth:`Device.stream`."""
        return torch.accelerator.current_stream(self._device)

    def is_capturing(self) -> bool:
        """See :meth:`Device.is_capturing`."""
        asks = getattr(self._module, "is_current_stream_capturing", None)
        return bool(asks()) if asks is not None else False

    def down(self, source: Tensor, target: Tensor, made_on: Any) -> Copy:
        """See :meth:`Device.down`."""
        self._let_go_of_ended()
        self._down.wait_event(made_on.record_event())
        with self._current(self._down):
            target.copy_(source, non_blocking=True)
            return _StreamCopy(self, self._down, made_on, source, target)

    def up(self, source: Tensor, after: Copy | None) -> Copy:
        """See :meth:`Device.up`."""
        self._let_go_of_ended()
        stream = self.stream()
        memory = torch.empty(source.numel(), dtype=torch.uint8, device=self._device)
        self._up.wait_event(stream.record_event())
        if isinstance(after, _StreamCopy):
            after.follow(self._up)
        with self._current(self._up):
            memory.data.copy_(source, non_blocking=True)  # its version stays 0: nobody changed it
            return _StreamCopy(self, self._up, stream, source, memory)

    def pin(self, memory: Tensor) -> str:
        """See :meth:`Device.pin`. By registering memory that exists: exact in size, aligned to pages."""
        if self._device.type != "cuda":
            return f"{self._device.type} cannot lock memory that exists"
        runtime: Any = self._module.cudart()
        status = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))
        return f"cudaHostRegister answers {status}" if status else ""

    def unpin(self, memory: Tensor) -> None:
        """See :meth:`Device.unpin`."""
        if self._device.type == "cuda":
            self._module.cudart().cudaHostUnregister(memory.data_ptr())

    def free_bytes(self) -> int:
        """See :meth:`Device.free_bytes`."""
        asks = getattr(torch.accelerator, "get_memory_info", None) or self._module.mem_get_info
        statistics = torch.accelerator.memory_stats(self._device)
        idle = statistics.get("reserved_bytes.all.current", 0)
        idle -= statistics.get("allocated_bytes.all.current", 0)
        return int(asks(self._device)[0]) + int(idle)

    def _let_go_of_ended(self) -> None:
        for _ in range(len(self.unfinished)):
            try:
                event, source, memory = self.unfinished.popleft()
            except IndexError:  # another thread looks too
                return
            if not event.query():
                self.unfinished.append((event, source, memory))

    @contextmanager
    def _current(self, stream: Any) -> Iterator[None]:
        index = torch.accelerator.current_device_index()
        before = self.stream()
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            torch.accelerator.set_device_index(index)


def accelerator(device: torch.device) -> Device | str:
    """What drives ``device``, or the reason why nothing does."""
    current = torch.accelerator.current_accelerator()
    if current is None or current.type != device.type:
        return f"device {device.type}"
    try:
        return Accelerator(device)
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return f"device {device.type} has no streams: {error}"
