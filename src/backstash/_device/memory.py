"""The free memory of an accelerator, queried only now and then, since the driver takes long to answer."""

from __future__ import annotations

from .base import Device

__all__ = ["DeviceMemory"]

_RESERVE_BYTES = 256 << 20  # not used for reading ahead
_AT_ONCE = 6  # a step is assumed to need so many of its largest tensors in addition to saved ones


class DeviceMemory:
    """The free memory of one device. The caller holds the stash's lock.

    Args:
        device: the device to query.
    """

    __slots__ = (
        "_failures",
        "_largest_bytes",
        "_unasked_bytes",
        "_unlooked_bytes",
        "device",
        "failed",
    )

    def __init__(self, device: Device) -> None:
        self.device = device
        self._unasked_bytes = 0  # bytes to load before free memory is queried again
        self._unlooked_bytes = 0  # bytes to save before the next check for a shortage
        self._largest_bytes = 0  # the largest block so far
        self._failures = device.failures()  # those that were handled
        self.failed = False
        """Whether the last check for a shortage found a failed allocation since :meth:`forget_failures`."""

    def has(self, nbytes: int) -> bool:
        """Return whether the device can spare ``nbytes`` for bytes that are not needed yet."""
        self._unasked_bytes -= nbytes
        if self._unasked_bytes < 0:
            self._unasked_bytes = (self.device.free_bytes() - _RESERVE_BYTES) // 2 - nbytes
        return self._unasked_bytes >= 0

    def shortage(self, nbytes: int) -> int:
        """Return how many bytes the device lacks for its next operations.

        They are assumed to need six times the largest block so far, for the inputs, outputs and temporary
        memory of an operation's backward; the backward of ``x.square()`` takes a little over four. The device
        is queried again when half of its free bytes have been saved since the last query.
        """
        self._largest_bytes = max(self._largest_bytes, nbytes)
        self._unlooked_bytes -= nbytes
        if self._unlooked_bytes >= 0:
            return 0
        self.failed = self.device.failures() > self._failures
        spare = self.device.free_bytes() - _AT_ONCE * self._largest_bytes
        self._unlooked_bytes = max(0, spare) // 2
        return max(0, -spare)

    def has_failed(self) -> bool:
        """Query now whether an allocation has failed since :meth:`forget_failures`."""
        return self.device.failures() > self._failures

    def forget_failures(self) -> None:
        """Count the failures so far as handled."""
        self._failures = self.device.failures()
        self.failed = False
