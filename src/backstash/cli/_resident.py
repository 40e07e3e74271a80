"""Read the process's resident memory from the operating system."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

__all__ = ["reset_resident_peak", "resident_bytes", "resident_peak_bytes"]

_RESET_PEAK = "5"  # proc(5), /proc/pid/clear_refs: "reset the peak resident set size"


def resident_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Return the bytes that are resident now; 0 if the system does not count them."""
    return _field(status, "VmRSS")


def resident_peak_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Return the most bytes that were resident since the start, or since :func:`reset_resident_peak`."""
    peak = _field(status, "VmHWM")
    if peak:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_resident_peak(clear_refs: Path = Path("/proc/self/clear_refs")) -> bool:
    """Reset the peak to the bytes that are resident now. Return False if the system cannot."""
    try:
        clear_refs.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def _field(status: Path, name: str) -> int:
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0
