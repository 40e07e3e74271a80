#!/usr/bin/env python
"""Compare what is replayed with plain PyTorch, for every operator that PyTorch lists for its own tests.

    scripts/soak_replays.py              # each operator in a module under Stash.recompute; a minute
    scripts/soak_replays.py --contexts   # each in a context whose policy recomputes all; a minute
    scripts/soak_replays.py --modes      # each under a dispatch mode that does nothing; two minutes
    scripts/soak_replays.py --backwards  # likewise, the backward alone

The first two run each sample input twice: what is freed is compared in the first run, and replayed in the
second. An operator that does not repeat itself in plain PyTorch is left out. The exit status is 1 if gradients
differ or an error is raised.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

from backstash import Action, Stash
from backstash._torch.dispatch import with_lazy_bits
from backstash.policy import SavedTensor

REPEATS = 4  # of plain PyTorch
UNREPEATED = "linalg.lstsq"  # LAPACK's least squares give other bits now and then


class Operator(nn.Module):
    """An operator between two others."""

    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, x: Tensor, args: Any, kwargs: Any) -> list[Tensor]:
        return [
            each * each
            for each in leaves(self.operator(x * 1.5, *args, **kwargs))
            if each.requires_grad
        ]


class Nothing(TorchDispatchMode):
    """A dispatch mode that calls the operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with with_lazy_bits():
            return func(*args, **(kwargs or {}))


def leaves(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    return (
        [leaf for each in found for leaf in leaves(each)]
        if isinstance(found, (tuple, list))
        else []
    )


def same(one: Any, other: Any) -> bool:
    """Whether two tensors have the same bits; NaNs are alike."""
    if one is None or other is None or one.layout is not torch.strided:
        return one is other or one is not None
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_complex():
        one, other = (torch.view_as_real(each.resolve_conj()) for each in (one, other))
    return bool(((one == other) | ((one != one) & (other != other))).all())


def gradients(module: nn.Module, sample: Any, mode: Any = None) -> list[Any]:
    torch.manual_seed(0)
    given = [sample.input, *sample.args, *sample.kwargs.values()]
    wanted = [each for each in given if isinstance(each, Tensor) and each.requires_grad]
    sums = [each.abs().sum() for each in module(sample.input, sample.args, sample.kwargs)]
    loss = sum(sums)
    with mode or nullcontext():
        return list(torch.autograd.grad(loss, wanted, allow_unused=True)) if sums else []


def samples(requires_grad: bool) -> Iterator[tuple[Any, Any]]:
    for info in op_db:
        if info.name == UNREPEATED:
            continue
        for dtype in (torch.float32, torch.complex64):
            if dtype in (info.supported_backward_dtypes("cpu") if requires_grad else info.dtypes):
                try:
                    found = list(info.sample_inputs("cpu", dtype, requires_grad=requires_grad))[:6]
                except Exception:  # of libraries that are not here
                    continue
                for sample in found:
                    if isinstance(sample.input, Tensor) and sample.input.layout is torch.strided:
                        yield info, sample


def repeating() -> Iterator[tuple[Any, Any, nn.Module, list[Tensor]]]:
    """Of each sample whose gradients plain PyTorch repeats: its operator, a module of it, and these."""
    for info, sample in samples(True):
        module = Operator(info.op)
        try:
            want = gradients(module, sample)
            again = [gradients(module, sample) for _ in range(REPEATS)]
        except Exception:  # not for such a sample
            continue
        if want and all(all(map(same, each, want)) for each in again):
            yield info, sample, module, want


def replays(*, in_context: bool) -> Counter[str]:
    said: Counter[str] = Counter()
    for info, sample, module, want in repeating():
        stash = Stash(min_bytes=0, policy=all_again if in_context else None)
        said["programs"] += 1
        with nullcontext() if in_context else stash.recompute(module):
            for _ in range(2):
                try:
                    with stash if in_context else nullcontext():
                        found = gradients(module, sample)
                    if not all(map(same, found, want)):
                        said["wrong: " + info.name] += 1
                except Exception as error:
                    said[f"wrong: {info.name}: {type(error).__name__}"] += 1
        said["with something let go"] += stash.stats().recomputed_bytes > 0
        said["held after a comparison"] += any("recomputing" in each for each in stash.stats().left)
    return said


def all_again(saved: SavedTensor) -> Action:
    return Action("recompute")


def backwards() -> Counter[str]:
    said: Counter[str] = Counter()
    for info, sample, module, want in repeating():
        said["programs"] += 1
        if not all(map(same, gradients(module, sample, Nothing()), want)):
            said["differs: " + info.name] += 1
    return said


def modes() -> Counter[str]:
    said: Counter[str] = Counter()
    for info, sample in [*samples(False), *samples(True)]:

        def run(info: Any = info, sample: Any = sample) -> list[Tensor]:
            torch.manual_seed(0)
            return leaves(info.op(sample.input * 1, *sample.args, **sample.kwargs))

        try:
            want, again = run(), [run() for _ in range(REPEATS)]
            if all(all(map(same, each, want)) for each in again):
                said["programs"] += 1
                with Nothing():
                    found = run()
                if not all(map(same, found, want)):
                    said["differs: " + info.name] += 1
        except Exception:  # not for such a sample
            continue
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--contexts", action="store_true", help="a policy in place of modules")
    parser.add_argument("--modes", action="store_true", help="dispatch modes instead")
    parser.add_argument(
        "--backwards", action="store_true", help="dispatch modes in backward instead"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.modes or options.backwards:
        said = modes() if options.modes else backwards()
    else:
        said = replays(in_context=options.contexts)
    for line, count in sorted(said.items()):
        print(f"{count:6} {line}")
    return any(each.startswith("wrong") for each in said)


if __name__ == "__main__":
    sys.exit(main())
