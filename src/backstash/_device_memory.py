"""How much memory an accelerator can spare, asked now and then: the driver takes its time to answer."""

from __future__ import annotations

from ._streams import Device

__all__ = ["DeviceMemory"]

_RESERVE_BYTES = 256 << 20  # not used for reading ahead


class DeviceMemory:
    """What one device has free. The caller holds the stash's lock.

    Args:
        device: that is asked.
    """

    __slots__ = ("_largest_bytes", "_unasked_bytes", "_unlooked_bytes", "device")

    def __init__(self, device: Device) -> None:
        self.device = device
        self._unasked_bytes = 0  # that may be taken before it is asked again
        self._unlooked_bytes = 0  # that may be saved before it is asked whether it runs short
        self._largest_bytes = 0  # of all blocks so far

    def has(self, nbytes: int) -> bool:
        """Whether the device can spare ``nbytes`` for bytes that are not needed yet."""
        self._unasked_bytes -= nbytes
        if self._unasked_bytes < 0:
            self._unasked_bytes = (self.device.free_bytes() - _RESERVE_BYTES) // 2 - nbytes
        return self._unasked_bytes >= 0

    def shortage(self, nbytes: int) -> int:
        """How many bytes the device lacks for what comes next.

        What comes next is taken to need four times the largest block so far: an operation's inputs and
        outputs, and what it works with. Asked when half of what was free has been saved since.
        """
        self._largest_bytes = max(self._largest_bytes, nbytes)
        self._unlooked_bytes -= nbytes
        if self._unlooked_bytes >= 0:
            return 0
        spare = self.device.free_bytes() - 4 * self._largest_bytes
        self._unlooked_bytes = max(0, spare) // 2
        return max(0, -spare)
