#!/usr/bin/env python
"""Every operator that PyTorch can differentiate, under a stash on disk and without: the bits must agree.

    scripts/soak_operators.py                          # all dtypes, all samples, first and second gradients
    scripts/soak_operators.py --only 'linalg|nn.functional' --dtypes float64 --first-sample

The operators and their sample inputs are torch's own (``torch.testing._internal``). Each sample's inputs
are made to be results of another operation, since leaves stay where they are. An operator whose plain run
does not repeat to the bit, or does not run, says nothing and is counted as such.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_flatten, tree_map

from backstash import Disk, Stash

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from oracle import same_bits

ATTEMPTS = 5
DTYPES = (
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.bfloat16,
    torch.float16,
)


def operators(pattern: str = "") -> list[OpInfo]:
    """Those that can be differentiated on the CPU and match ``pattern``."""
    return [op for op in op_db if op.supports_autograd and re.search(pattern, op.full_name)]


def samples(op: OpInfo, dtype: torch.dtype) -> Iterator[SampleInput]:
    """torch's own sample inputs; the same ones at each call."""
    torch.manual_seed(0)
    yield from op.sample_inputs("cpu", dtype, requires_grad=True)


def gradients(op: OpInfo, sample: SampleInput, stash: Stash | None, *, second: bool) -> list[Any]:
    """The outputs and the first (and second) gradients of one sample."""
    leaves: list[Tensor] = []

    def fresh(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        copy = value.detach().clone()
        if not value.requires_grad:
            return copy
        leaves.append(copy.requires_grad_())
        return copy.clone()  # a result, not a leaf

    value, args, kwargs = tree_map(fresh, (sample.input, sample.args, sample.kwargs))
    torch.manual_seed(1)
    with stash or nullcontext():
        result = sample.output_process_fn_grad(op(value, *args, **kwargs))
        outputs = [out for out in tree_flatten(result)[0] if isinstance(out, Tensor)]
        first = _grad([out for out in outputs if out.requires_grad], leaves, create_graph=second)
        results = outputs + first
        if second:
            results += _grad([g for g in first if g is not None and g.requires_grad], leaves)
    return [None if each is None else each.detach() for each in results]


def _grad(outputs: list[Tensor], leaves: list[Tensor], **options: Any) -> list[Tensor | None]:
    if not outputs or not leaves:
        return []
    weights = [torch.linspace(0.5, 1.5, out.numel()).reshape(out.shape).to(out) for out in outputs]
    return list(torch.autograd.grad(outputs, leaves, weights, allow_unused=True, **options))


def difference(op: OpInfo, sample: SampleInput, stash: Stash, *, second: bool) -> str:
    """What the stash changes: ``""`` for nothing, else it starts with "plain", "differs" or "raises"."""
    found = ""
    for _ in range(ATTEMPTS):  # some routines of LAPACK depend on where their memory happens to lie
        found = _difference(op, sample, stash, second=second)
        if not found.startswith("differs"):
            break
    return found


def _difference(op: OpInfo, sample: SampleInput, stash: Stash, *, second: bool) -> str:
    try:
        want = gradients(op, sample, None, second=second)
        again = gradients(op, sample, None, second=second)
    except Exception as error:
        return f"plain raises {error!r:.80}"
    if not all(same_bits(*pair) for pair in zip(want, again, strict=True)):
        return "plain does not repeat"
    try:
        got = gradients(op, sample, stash, second=second)
    except Exception as error:
        return f"raises {error!r:.400}"
    pairs = enumerate(zip(got, want, strict=True))
    wrong = [number for number, pair in pairs if not same_bits(*pair)]
    return f"differs in {wrong} of {len(want)}" if wrong else ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="operators to run (default: all)"
    )
    parser.add_argument("--dtypes", nargs="+", default=[str(d).split(".")[1] for d in DTYPES])
    parser.add_argument("--first-sample", action="store_true", help="one sample an operator")
    parser.add_argument("--no-second", action="store_true", help="first gradients only")
    parser.add_argument("--directory", help="where the disk tier lies (default: a temporary one)")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        store = Disk(directory)
        stash = Stash(disk=store, min_bytes=0, inflight=0)
        chosen = operators(args.only)
        for number, op in enumerate(chosen, 1):
            for dtype in [getattr(torch, name) for name in args.dtypes]:
                if dtype not in op.supported_backward_dtypes("cpu"):
                    continue
                for index, sample in enumerate(
                    islice(samples(op, dtype), 1 if args.first_sample else None)
                ):
                    for second in (False,) if args.no_second else (False, op.supports_gradgrad):
                        found = difference(op, sample, stash, second=second)
                        kind = found.split()[0] if found else "equal"
                        counts[kind] += 1
                        if kind in ("differs", "raises"):
                            order = "second" if second else "first"
                            wrong.append(f"{op.full_name} {dtype} sample {index} {order}: {found}")
                            print(wrong[-1], flush=True)
                        if not op.supports_gradgrad:
                            break
            if sys.stderr.isatty():
                print(f"\r{number}/{len(chosen)} {op.full_name:60.60}", end="", file=sys.stderr)
        stats = stash.stats()
        stash.close()
        store.close()
    print(f"{len(chosen)} operators, {time.monotonic() - began:.0f} s: {dict(counts)}")
    print(stats)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
