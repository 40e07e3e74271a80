"""What a stash asks of a device: copies that run beside compute, and what orders them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

__all__ = ["Copy", "Device"]


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
    def used(self, tensor: Tensor) -> None:
        """An operation on the current stream saves ``tensor``, whose memory may be let go before backward:
        not before that operation has run, then, whichever stream asked for it."""

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
    def pinned(self, nbytes: int) -> Tensor | str:
        """So much memory of the host that is locked already, or why there is none. ``nbytes`` is a power of
        two."""

    @abstractmethod
    def unpin(self, memory: Tensor) -> None:
        """Undo :meth:`pin`, after every copy has ended; where it was refused, only wait."""

    @abstractmethod
    def give_back(self, memory: Tensor) -> None:
        """Let go of what :meth:`pinned` gave, after every copy has ended."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until every copy that was begun has ended."""

    @abstractmethod
    def free_bytes(self) -> int:
        """The device's memory that is free, what the caching allocator keeps included."""

    @abstractmethod
    def failures(self) -> int:
        """How often there was no memory for what a program asked for, so far."""
