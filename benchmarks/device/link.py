"""The speed of a device's link to pinned host memory, each way and both at once, and of its matrix product."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

__all__ = ["measure_link"]

_REPEATS = 5


def measure_link(device: torch.device, nbytes: int, side: int) -> dict[str, float]:
    """Measure the link and the matrix product; each figure is the median of five repeats.

    Args:
        device: an accelerator; on the CPU, for tests, copies are ordinary ones.
        nbytes: bytes of one copy.
        side: rows and columns of the matrices.

    Returns:
        Bytes per second down, up, and of each while both run; operations per second of a bfloat16
        matrix product.
    """
    pins = device.type != "cpu"
    hosts = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=pins) for _ in range(2)]
    there = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]

    def down() -> None:
        hosts[0].copy_(there[0], non_blocking=True)

    def up() -> None:
        there[1].copy_(hosts[1], non_blocking=True)

    def both() -> None:
        if not pins:
            down()
            up()
            return
        before = torch.accelerator.current_stream(device)
        for copy in (down, up):
            torch.accelerator.set_stream(torch.Stream(device))
            copy()
        torch.accelerator.set_stream(before)

    one = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    return {
        "down_bytes_per_second": nbytes / _seconds(down, device),
        "up_bytes_per_second": nbytes / _seconds(up, device),
        "each_of_both_bytes_per_second": nbytes / _seconds(both, device),
        "matmul_operations_per_second": 2 * side**3 / _seconds(lambda: one @ one, device),
    }


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    found = []
    for _ in range(_REPEATS + 1):
        _synchronize(device)
        started = time.perf_counter()
        run()
        _synchronize(device)
        found.append(time.perf_counter() - started)
    return statistics.median(found[1:])  # the first one touches the memory


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
