"""What verified deduplication adds to a step: the same step with it and without, in turn, in one process.

    python benchmarks/verification.py --disk DIR [--pairs 15] [--workloads gpt resnet]

Without it, what is saved again at the same version is taken for what left, which is what any key of a storage
and its version would do, and no fingerprint is taken. Each pair runs both, in an order that changes from
pair to pair; the first pair, in which fingerprints are taken and the stash learns what is saved again, is
printed separately. Reported of the others: medians of the step's seconds by the clock and of the processor,
the page faults, and the median of the pairs' ratios with the range of its middle half. The default takes some
six minutes on two cores. On a busy machine the clock says little; the processor's seconds say more.
"""

import argparse
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

import torch

from backstash import Stash
from backstash._saved.block import Block
from backstash._saved.save_counts import SaveCounts
from bench._workloads import WORKLOADS, call


def without_verification():
    """A context in which nothing is compared, and nothing waits for its last save."""
    return (
        mock.patch.object(Block, "take_fingerprint", lambda block, device: None),
        mock.patch.object(Block, "has", lambda block, storage, device: True),
        mock.patch.object(SaveCounts, "begin", lambda counts, block, in_pass, root: None),
        mock.patch.object(SaveCounts, "again", lambda counts, block: None),
    )


def measured_step(workload, optimizer, stash) -> dict[str, float]:
    """One step: seconds by the clock and of the processor, page faults, bytes down."""
    before, written = resource.getrusage(resource.RUSAGE_SELF), stash.stats().written_bytes
    began = time.perf_counter()
    with stash:
        loss = workload.model(*workload.inputs, call)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return {
        "clock": seconds,
        "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "faults": after.ru_minflt - before.ru_minflt,
        "written_bytes": stash.stats().written_bytes - written,
    }


def measure(name: str, disk: str, pairs: int) -> list[dict[str, dict[str, float]]]:
    """Pairs of steps of one workload; the first is the one in which the stash learns."""
    torch.manual_seed(0)
    workload = WORKLOADS[name]()
    print(workload.description)
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=1e-3)
    stashes = {"verified": Stash(disk=disk), "unverified": Stash(disk=disk)}
    patches = without_verification()
    found = []
    for pair in range(pairs + 1):
        figures = {}
        for kind in sorted(stashes, reverse=bool(pair % 2)):
            active = patches if kind == "unverified" else ()
            for patch in active:
                patch.start()
            try:
                figures[kind] = measured_step(workload, optimizer, stashes[kind])
            finally:
                for patch in active:
                    patch.stop()
        found.append(figures)
    for stash in stashes.values():
        stash.close()
    return found


def show(title: str, pairs: list[dict[str, dict[str, float]]]) -> None:
    """A line for each kind of step, and the ratios."""
    print(f"  {title}")
    for kind in ("unverified", "verified"):
        middle = {key: statistics.median(p[kind][key] for p in pairs) for key in pairs[0][kind]}
        print(
            f"    {kind:10} {middle['clock']:7.3f} s by the clock, {middle['cpu']:7.3f} s of the processor, "
            f"{middle['faults']:9.0f} page faults, {middle['written_bytes']:13.0f} bytes down"
        )
    for key in ("clock", "cpu"):
        ratios = sorted(p["verified"][key] / p["unverified"][key] for p in pairs)
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        print(f"    {key:10} x {statistics.median(ratios):.4f} ({low:.4f} to {high:.4f})")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--disk", required=True)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--workloads", nargs="*", default=["gpt", "resnet"])
    parser.add_argument("--out", type=Path, help="write all figures to this file, as JSON")
    options = parser.parse_args()
    results = {}
    for name in options.workloads:
        found = results[name] = measure(name, options.disk, options.pairs)
        show("the first pair", found[:1])
        show(f"the {options.pairs} after it", found[1:])
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
