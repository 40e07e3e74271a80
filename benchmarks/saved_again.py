"""What it costs to know that memory which is saved again has the same bytes, step by step.

    python benchmarks/saved_again.py --disk DIR [--steps 3]

Trains the GPT and the ResNet of `backstash bench` and prints for each step its seconds, how many fingerprints
were taken, the seconds they took, the bytes that went down, those that were shared and those that
were moved again.
"""

import argparse
import sys
import time

import torch

from backstash import Stash
from backstash._saved import block
from backstash.units import format_bytes
from bench._workloads import WORKLOADS, call


def main() -> int:
    """Print a table a workload."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--disk", required=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--workloads", nargs="*", default=["gpt", "resnet"])
    options = parser.parse_args()
    take, taken = block.fingerprint, []

    def timed(*arguments):
        began = time.perf_counter()
        found = take(*arguments)
        taken.append(time.perf_counter() - began)
        return found

    block.fingerprint = timed
    for name in options.workloads:
        torch.manual_seed(0)
        workload = WORKLOADS[name]()
        optimizer = torch.optim.SGD(workload.model.parameters(), lr=1e-3)
        stash = Stash(disk=options.disk)
        print(workload.description)
        for step in range(options.steps):
            before, began = stash.stats(), time.perf_counter()
            taken.clear()
            with stash:
                loss = workload.model(*workload.inputs, call)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds, after = time.perf_counter() - began, stash.stats()
            moved, shared, again = (
                format_bytes(getattr(after, key) - getattr(before, key))
                for key in ("written_bytes", "deduplicated_bytes", "moved_again_bytes")
            )
            print(
                f"  step {step + 1}: {seconds:6.2f} s, {len(taken):4} fingerprints {sum(taken):6.3f} s, "
                f"{moved} down, {shared} shared, {again} moved again"
            )
        stash.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
