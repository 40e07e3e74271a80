"""What moves bytes: a call that a worker makes, or a copy that a device was given."""

from __future__ import annotations

from abc import ABC, abstractmethod

__all__ = ["Transfer"]


class Transfer(ABC):
    """Bytes on their way from one memory to another.

    A disk write or read is one (:class:`~backstash._runtime.workers.Work`), a copy of an accelerator is
    another (:class:`~backstash._device.base.Copy`).
    """

    __slots__ = ()

    ends_in_order: bool
    """Whether it ends after those of its kind that began before it, as the copies of one stream do."""
    error: BaseException | None
    """Why it failed, once it has ended; a device's copy does not fail once it has begun."""

    @abstractmethod
    def done(self) -> bool:
        """Whether its source may be let go: it has ended, or what follows on its source waits for it."""

    @abstractmethod
    def ended(self) -> bool:
        """Whether the bytes have arrived, or it failed."""

    @abstractmethod
    def exception(self) -> BaseException | None:
        """Wait until it is :meth:`done`; the error, if there was one."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until it has :meth:`ended`, on a thread that computes nothing."""

    @abstractmethod
    def cancel(self) -> bool:
        """Call it off; whether that came before it began."""
