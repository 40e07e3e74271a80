"""Plain PyTorch as the oracle: a program is run without a stash and with one, and every bit must agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backstash import Stash

# A program runs its forward pass and returns the backward pass, which returns tensors to compare.
Program = Callable[[], Callable[[], Sequence[Any]]]

# Every way that bytes can go; with inflight=0 all of them are below before forward goes on.
WAYS: dict[str, dict[str, Any]] = {
    "all on disk": {"min_bytes": 0, "inflight": 0},
    "no read ahead": {"min_bytes": 0, "inflight": 0, "prefetch": 0},
    "in flight": {"min_bytes": 0},
    "defaults": {},
    "keep all": {"min_bytes": 0, "keep": None},
    "keep some": {"min_bytes": 0, "inflight": 0, "keep": "1MiB"},
    "no tier below": {"min_bytes": 0, "disk": None},
}


def same_bits(one: Any, other: Any) -> bool:
    """Whether two results are the same to the last bit, NaN payloads and signs of zeros included."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and bool(one == other)
    if (one.dtype, one.layout, one.device) != (other.dtype, other.layout, other.device):
        return False
    if one.is_nested or other.is_nested:
        pieces = zip(one.unbind(), other.unbind(), strict=True)
        return len(one.unbind()) == len(other.unbind()) and all(same_bits(*pair) for pair in pieces)
    if one.shape != other.shape:
        return False
    if one.layout is not torch.strided:
        return all(same_bits(*pair) for pair in zip(_parts(one), _parts(other), strict=True))
    return torch.equal(_bytes(one), _bytes(other))


def _parts(tensor: Tensor) -> list[Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.to_dense()]


def _bytes(tensor: Tensor) -> Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return torch.empty(flat.shape, dtype=flat.dtype).copy_(flat).view(torch.uint8)


def run(program: Program, stash: Stash | None = None) -> list[Any]:
    """The results of ``program``, its forward pass under ``stash``."""
    torch.manual_seed(0)
    with stash or nullcontext():
        backward = program()
    return list(backward())


def check(program: Program, directory: Path, ways: Sequence[str] = tuple(WAYS)) -> None:
    """``program`` gives the same bits in each of ``ways``."""
    want = run(program)
    assert want
    for way in ways:
        stash = Stash(**{"disk": directory, "name": way, **WAYS[way]})
        try:
            got = run(program, stash)
            assert len(got) == len(want)
            for number, pair in enumerate(zip(got, want, strict=True)):
                assert same_bits(*pair), f"{way}: result {number} differs\n{stash.stats()}"
        finally:
            stash.close()


def on_disk(program: Program, directory: Path, **options: Any) -> Stash:
    """Check ``program`` with everything on disk, and return the stash that held it, for its figures."""
    stash = Stash(**{"disk": directory, "min_bytes": 0, "inflight": 0, **options})
    want, got = run(program), run(program, stash)
    assert len(got) == len(want) > 0
    assert all(same_bits(*pair) for pair in zip(got, want, strict=True)), str(stash.stats())
    return stash


def gradients(loss: Tensor, *inputs: Tensor, **options: Any) -> tuple[Tensor | None, ...]:
    """Gradients of ``loss``'s sum, which may be complex or of any shape."""
    total = torch.view_as_real(loss).sum() if loss.is_complex() else loss.sum()
    return torch.autograd.grad(total, inputs, allow_unused=True, **options)
