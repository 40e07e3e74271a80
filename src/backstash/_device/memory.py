"""How much memory an accelerator can spare, asked now and then: the driver takes its time to answer."""

from __future__ import annotations

from .base import Device

__all__ = ["DeviceMemory"]

_RESERVE_BYTES = 256 << 20  # not used for reading ahead
_AT_ONCE = 6  # how many of its largest tensors a step is taken to need beside what is saved


class DeviceMemory:
    """What one device has free. The caller holds the stash's lock.

    Args:
        device: that is asked.
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
        self._unasked_bytes = 0  # that may be taken before it is asked again
        self._unlooked_bytes = 0  # that may be saved before it is asked whether it runs short
        self._largest_bytes = 0  # of all blocks so far
        self._failures = device.failures()  # that are known of
        self.failed = False
        """Whether an allocation has failed since :meth:`forget_failures`, when last asked for a shortage."""

    def has(self, nbytes: int) -> bool:
        """Whether the device can spare ``nbytes`` for bytes that are not needed yet."""
        self._unasked_bytes -= nbytes
        if self._unasked_bytes < 0:
            self._unasked_bytes = (self.device.free_bytes() - _RESERVE_BYTES) // 2 - nbytes
        return self._unasked_bytes >= 0

    def shortage(self, nbytes: int) -> int:
        """How many bytes the device lacks for what comes next.

        What comes next is taken to need six times the largest block so far: the inputs and outputs of an
        operation's backward, and what it works with; that of ``x.square()`` takes four and a little. Asked
        when half of what was free has been saved since.
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
        """Whether an allocation has failed since :meth:`forget_failures`, asked now."""
        return self.device.failures() > self._failures

    def forget_failures(self) -> None:
        """Those so far have been answered."""
        self._failures = self.device.failures()
        self.failed = False
