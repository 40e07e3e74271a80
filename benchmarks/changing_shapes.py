"""How much memory a process holds after many steps whose tensors are never of the same size.

    python benchmarks/changing_shapes.py --disk DIR [--steps 1000] [--malloc glibc,tbb] [--json FILE]

An allocator that reuses what was freed may keep it in pieces that fit nothing later. Each allocator gets a
process of its own under ``backstash run --malloc``; each step is a chain of tensors of 64 KiB to 3 MiB whose
size is drawn again (the same draws for all). Printed: resident bytes over the start after a tenth of the steps
and at the end, their peak, and processor seconds and page faults of a step.
"""

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROWS = 64
LAYERS = 12


def worker(steps: int) -> dict[str, float]:
    """Train ``steps`` steps in this process and return the figures."""
    import torch

    from backstash.cli._resident import reset_resident_peak, resident_bytes, resident_peak_bytes

    draw = random.Random(0)
    weights = [torch.ones(ROWS, 1, requires_grad=True) for _ in range(LAYERS)]
    start = resident_bytes()
    reset_resident_peak()
    before = resource.getrusage(resource.RUSAGE_SELF)
    early = 0
    for step in range(steps):
        x = torch.full((ROWS, draw.randrange(256, 12_288)), 0.5)
        for weight in weights:
            x = torch.tanh(x * weight)
            if draw.random() < 0.3:  # a layer of another width
                x = x[:, : max(256, int(x.shape[1] * draw.uniform(0.5, 1.0)))].contiguous()
        x.sum().backward()
        if step == steps // 10:
            early = resident_bytes()
    after = resource.getrusage(resource.RUSAGE_SELF)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "early_bytes": early - start,
        "end_bytes": resident_bytes() - start,
        "peak_bytes": resident_peak_bytes() - start,
        "cpu_seconds_per_step": seconds / steps,
        "system_seconds_per_step": (after.ru_stime - before.ru_stime) / steps,
        "page_faults_per_step": (after.ru_minflt - before.ru_minflt) / steps,
        "gradient": sum(float(weight.grad.double().sum()) for weight in weights).hex(),
    }


def main() -> int:
    """Run every allocator in turn and print a table; 1 if the gradients differ."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--malloc", default="none,glibc,tbb,tcmalloc,jemalloc,mimalloc")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(options.steps)))
        return 0
    rows = {}
    for malloc in options.malloc.split(","):
        command = ["-m", "backstash", "run", "--quiet", "--disk", options.disk, "--malloc", malloc]
        command += [__file__, "--worker", "--steps", str(options.steps)]
        ended = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        if ended.returncode:
            print(f"{malloc}: {ended.stderr.strip().splitlines()[-1]}")
            continue
        rows[malloc] = row = json.loads(ended.stdout.splitlines()[-1])
        sizes = " ".join(
            f"{name} {row[name + '_bytes'] / 2**20:5.0f} MiB" for name in ("early", "end", "peak")
        )
        print(
            f"{malloc:9} {sizes}  cpu {row['cpu_seconds_per_step'] * 1e3:5.1f} ms "
            f"(system {row['system_seconds_per_step'] * 1e3:4.1f})  "
            f"page faults {row['page_faults_per_step']:6.0f}",
            flush=True,
        )
    if options.json:
        facts = {"steps": options.steps, "machine": f"{os.cpu_count()} cores, {platform.release()}"}
        options.json.write_text(json.dumps(facts | {"rows": rows}, indent=2) + "\n")
    return int(len({row["gradient"] for row in rows.values()}) > 1)


if __name__ == "__main__":
    sys.exit(main())
