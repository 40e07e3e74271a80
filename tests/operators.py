"""torch's own lists of what can be differentiated, as cases to be run with a stash and without."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.testing._internal import common_methods_invocations as lists
from torch.testing._internal.autograd_function_db import autograd_function_db
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.custom_op_db import custom_op_db
from torch.testing._internal.opinfo.definitions.nested import njt_op_db
from torch.utils._pytree import tree_leaves, tree_map

from backstash import Action, Disk, Stash
from backstash._tiers import segments as _segments
from backstash.testing import TwinDevice, stash_on
from oracle import same_bits
from packers import ANYTHING

ATTEMPTS = 5

Forward = Callable[[], Any]
Case = Callable[[], tuple[list[Tensor], Forward]]
"""Makes new leaves, the same each time, and what computes with them."""


@dataclass(frozen=True, slots=True)
class Operator:
    """Something of one of torch's lists."""

    name: str
    """What torch calls it."""
    cases: Callable[[torch.dtype], Iterable[Case]]
    """Its samples in a dtype, none where it cannot be differentiated in that."""
    second: bool
    """Whether it can be differentiated twice."""


# What torch has, list by list.


def _fresh(values: Any) -> tuple[Any, list[Tensor]]:
    """Copies of all tensors: leaves, and results that were made of them in their place."""
    leaves: list[Tensor] = []

    def fresh(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        copy = value.detach().clone()
        if not value.requires_grad:
            return copy
        leaves.append(copy.requires_grad_())
        return copy.clone()  # a result, not a leaf

    return tree_map(fresh, values), leaves


def _case(function: Callable[..., Any], sample: Any, finish: Callable[[Any], Any]) -> Case:
    def case() -> tuple[list[Tensor], Forward]:
        (value, args, kwargs), leaves = _fresh((sample.input, sample.args, sample.kwargs))
        return leaves, lambda: finish(function(value, *args, **kwargs))

    return case


def _of(op: Any, function: Callable[..., Any], take: Callable[..., Iterable[Any]]) -> Operator:
    def cases(dtype: torch.dtype) -> Iterator[Case]:
        if dtype not in op.supported_backward_dtypes("cpu"):
            return
        torch.manual_seed(0)
        try:
            for sample in take("cpu", dtype, requires_grad=True):
                finish = getattr(sample, "output_process_fn_grad", None) or _as_it_is
                yield _case(function, sample, finish)
        except (NotImplementedError, RuntimeError):
            return  # the list has no samples of this kind

    return Operator(op.full_name, cases, op.supports_gradgrad)


def _as_it_is(result: Any) -> Any:
    return result


def _operators() -> list[Operator]:
    return [_of(op, op, op.sample_inputs) for op in lists.op_db if op.supports_autograd]


def _in_place() -> list[Operator]:
    return [
        _of(op, op.inplace_variant, functools.partial(_for_in_place, op))
        for op in lists.op_db
        if op.supports_autograd and op.supports_inplace_autograd and op.inplace_variant is not None
    ]


def _for_in_place(op: Any, *args: Any, **options: Any) -> Iterator[Any]:
    return (sample for sample in op.sample_inputs(*args, **options) if not sample.broadcasts_input)


_LAYOUTS = {
    "sparse": torch.sparse_coo,
    "sparse_csr": torch.sparse_csr,
    "sparse_csc": torch.sparse_csc,
    "sparse_bsr": torch.sparse_bsr,
    "sparse_bsc": torch.sparse_bsc,
}


def _sparse() -> list[Operator]:
    return [
        _of(op, op, functools.partial(op.sample_inputs_sparse, layout))
        for op in lists.op_db
        for name, layout in _LAYOUTS.items()
        if op.supports_autograd and getattr(op, f"supports_{name}")
    ]


def _nested() -> list[Operator]:
    return [_of(op, op, op.sample_inputs) for op in njt_op_db if op.supports_autograd]


def _foreach() -> list[Operator]:
    found = []
    for name in ("unary", "binary", "pointwise", "reduce", "other"):
        for op in getattr(lists, f"foreach_{name}_op_db"):
            for function in filter(None, (op.method_variant, op.inplace_variant)):
                if op.supports_autograd:
                    found.append(_of(op, functools.partial(_on_lists, function), op.sample_inputs))
    return found


def _on_lists(
    function: Callable[..., Any], tensors: list[Tensor], *args: Any, **options: Any
) -> Any:
    options.pop("disable_fastpath", None)  # for the tests of the list itself
    result = function(tensors, *args, **options)
    return tensors if result is None else result


def _functions() -> list[Operator]:
    return [_of(op, op.op, op.sample_inputs) for op in autograd_function_db + custom_op_db]


def _modules() -> list[Operator]:
    return [
        Operator(info.name, functools.partial(_module_cases, info), info.supports_gradgrad)
        for info in module_db
    ]


def _module_cases(info: Any, dtype: torch.dtype) -> Iterator[Case]:
    if dtype not in info.dtypes:
        return
    torch.manual_seed(0)
    for given in info.module_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=True, training=True
    ):
        yield functools.partial(_module_case, info.module_cls, given, dtype)


def _module_case(kind: Any, given: Any, dtype: torch.dtype) -> tuple[list[Tensor], Forward]:
    torch.manual_seed(0)
    made, call = given.constructor_input, given.forward_input
    module = kind(*made.args, **made.kwargs).to(dtype).train()
    (args, kwargs), leaves = _fresh((call.args, call.kwargs))
    return [*leaves, *module.parameters()], lambda: module(*args, **kwargs)


LISTS: dict[str, Callable[[], list[Operator]]] = {
    name: functools.cache(make)
    for name, make in (
        ("operators", _operators),
        ("in place", _in_place),
        ("sparse", _sparse),
        ("nested", _nested),
        ("foreach", _foreach),
        ("functions", _functions),
        ("modules", _modules),
    )
}


# Where their saves go.

_Make = Callable[[str], Stash]
MIXES: dict[str, _Make] = {
    "no tier below": lambda where: Stash(min_bytes=0),
    "in place": lambda where: Stash(keep=None, disk=where, min_bytes=0),
    "disk": lambda where: Stash(disk=where, min_bytes=0, inflight=0),
    "keep, disk": lambda where: Stash(keep="512B", disk=where, min_bytes=0, inflight=512),
    "in flight": lambda where: Stash(disk=where, min_bytes=0),
    "straight": lambda where: Stash(disk=Disk(where, verify=True), min_bytes=0),
    "packed": lambda where: Stash(
        policy=lambda saved: Action("pack", ANYTHING),
        keep="512B",
        disk=where,
        min_bytes=0,
        inflight=0,
    ),
    "recomputed": lambda where: Stash(
        policy=lambda saved: Action("recompute"), keep=None, disk=where, min_bytes=0
    ),
    "host": lambda where: stash_on(TwinDevice(chance=0.3), host="64MiB", min_bytes=0),
    "host, disk": lambda where: stash_on(
        TwinDevice(chance=0.3), host="256KiB", disk=where, min_bytes=0, inflight="16KiB"
    ),
}
"""``straight``: also the smallest block is written by a worker from the memory it lies in."""


class Stashes:
    """A stash of each mix, made when it is first wanted."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = str(directory)
        self._made: dict[str, Stash] = {}

    def of(self, mix: str) -> Stash:
        if mix not in self._made:
            self._made[mix] = MIXES[mix](self._directory)
        return self._made[mix]

    def close(self) -> None:
        for stash in self._made.values():
            stash.close()
            if isinstance(stash._store, Disk):
                stash._store.close()


# Comparing.


def results(case: Case, stash: Stash | None, *, second: bool) -> list[Any]:
    """The outputs and the first (and second) gradients of one case."""
    leaves, forward = case()
    torch.manual_seed(1)
    with stash or nullcontext():
        outputs = [out for out in tree_leaves(forward()) if isinstance(out, Tensor)]
        first = _grad(
            [_dense(out) for out in outputs if out.requires_grad], leaves, create_graph=second
        )
        found = outputs + first
        if second:
            again = [_dense(each) for each in first if each is not None and each.requires_grad]
            found += _grad(again, leaves)
    return [None if each is None else each.detach() for each in found]


def _dense(out: Tensor) -> Tensor:
    """What gradients of any layout can be asked of."""
    if out.is_nested:
        return (
            out.values()
            if out.layout is torch.jagged
            else torch.cat([each.reshape(-1) for each in out])
        )
    return out if out.layout is torch.strided else out.to_dense()


def _grad(outputs: list[Tensor], leaves: list[Tensor], **options: Any) -> list[Tensor | None]:
    if not outputs or not leaves:
        return []
    weights = [torch.linspace(0.5, 1.5, out.numel()).reshape(out.shape).to(out) for out in outputs]
    return list(torch.autograd.grad(outputs, leaves, weights, allow_unused=True, **options))


def difference(
    case: Case, stashes: Stashes, mixes: Iterable[str], *, second: bool
) -> dict[str, str]:
    """What each mix changes: ``""`` for nothing, else it starts with "plain", "differs" or "raises"."""
    found = dict.fromkeys(mixes, "differs")
    for _ in range(ATTEMPTS):  # some routines of LAPACK depend on where their memory happens to lie
        found |= _difference(case, stashes, [mix for mix in found if found[mix]], second=second)
        if not any(text.startswith("differs") for text in found.values()):
            break
    return found


def _difference(case: Case, stashes: Stashes, mixes: list[str], *, second: bool) -> dict[str, str]:
    try:
        want = results(case, None, second=second)
        again = results(case, None, second=second)
    except Exception as error:
        return dict.fromkeys(mixes, f"plain raises {error!r:.80}")
    if not _same(want, again):
        return dict.fromkeys(mixes, "plain does not repeat")
    return {mix: _of_mix(case, stashes.of(mix), mix, want, second=second) for mix in mixes}


def _of_mix(case: Case, stash: Stash, mix: str, want: list[Any], *, second: bool) -> str:
    try:
        with mock.patch.object(
            _segments, "SMALL_BYTES", 0 if mix == "straight" else _segments.SMALL_BYTES
        ):
            got = results(case, stash, second=second)
    except Exception as error:
        return f"raises {error!r:.400}"
    if _same(got, want):
        return ""
    wrong = [
        number for number, pair in enumerate(zip(got, want, strict=False)) if not same_bits(*pair)
    ]
    return f"differs in {wrong} of {len(want)}"


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(same_bits, one, other))
