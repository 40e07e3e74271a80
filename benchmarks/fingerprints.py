"""What a fingerprint of a GPU's memory takes: by the kernel, and by PyTorch's operations.

    python benchmarks/fingerprints.py

Medians of the device's time and of the host's, for storages of 1, 32 and 128 MiB, each twenty times.
"""

from __future__ import annotations

import statistics
import time

import torch

from backstash._device import fingerprint

SIZES = (1, 32, 128)
REPEATS = 20


def main() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    made = fingerprint.kernel(device)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; kernel: {made}")
    for mib in SIZES:
        words = torch.randint(1 << 30, (mib << 18,), dtype=torch.int32, device=device)
        storage = words.untyped_storage()
        for name, compute in (
            ("kernel", fingerprint.sums),
            ("operations", fingerprint._sums),
        ):
            given = storage, 0, storage.nbytes()
            compute(*given)
            spans, hosts = [], []
            for _ in range(REPEATS):
                torch.cuda.synchronize()
                marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                began = time.perf_counter()
                marks[0].record()
                compute(*given)
                marks[1].record()
                hosts.append(time.perf_counter() - began)
                torch.cuda.synchronize()
                spans.append(marks[0].elapsed_time(marks[1]) / 1e3)
            device_us, host_us = (statistics.median(each) * 1e6 for each in (spans, hosts))
            print(f"{mib:4} MiB  {name:10}  {device_us:6.0f} us  host {host_us:6.0f} us")


if __name__ == "__main__":
    main()
