"""Which of PyTorch's operations may be replayed, and what each of them writes.

An operation may be replayed if its arguments decide its result: it belongs to the ``aten`` namespace and draws
no random numbers. This follows from its schema and its tags, which are the same for every call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from .dispatch import has_kernels, schema_of
from .mode_bits import OPERATIONS_SEEN, TANGENTS_THAT_DIFFER

__all__ = [
    "ALLOCATES",
    "OF_TRAINING",
    "RANDOM",
    "STATISTICS",
    "Operation",
    "argument_of",
    "declare_pure",
    "has_complex",
    "is_of_operator",
    "operation_of",
    "operations",
    "overloads_of",
    "tensors_of",
]

ALLOCATES = "its memory was allocated empty, and the operation that filled it was not recorded"
RANDOM = "draws random numbers"
_FOREIGN = "{} is not an operation of PyTorch's own"
_CHANGES_LAYOUT = "{} replaces the memory of a tensor"

_ALLOCATIONS = frozenset(
    (
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "new_empty_strided",
        "empty_permuted",
        "_empty_affine_quantized",
    )
)
_OTHER_MEMORY = frozenset(
    ("set_", "resize_", "resize_as_", "_resize_output_", "set_data", "swap_tensors")
)
_NOT_REPEATED = frozenset(("linalg_lstsq", "_ctc_loss", "_cudnn_ctc_loss"))
"""LAPACK's least squares give other bits each time, and CTC does not fill all that it saves for backward."""
_FILLS = frozenset(("copy_", "fill_", "zero_"))
"""In-place operations that do not read what they write to. The same holds for ``out=``."""
OF_TRAINING = dict.fromkeys(
    (
        "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm", "instance_norm",
        "_batch_norm_impl_index",
    ),
    5,
)  # fmt: skip
"""These write running statistics, their arguments 3 and 4, if the argument at this position is true. Their
schemas do not say so."""
_ALSO_WRITES: dict[str, tuple[int, ...]] = {
    "batch_norm_update_stats": (1, 2),
    "batch_norm_gather_stats": (3, 4),
    "batch_norm_gather_stats_with_counts": (3, 4),
}
"""Arguments that these write in any case, although their schemas do not say so."""
_COLLECTIVES = "c10d"
"""The namespace of ``torch.distributed``'s operators. Those whose name ends with an underscore write their
first argument, although no schema says so, and most raise no version."""
_NO_FORMULA = (
    "{} has no formula for backward, so autograd would have to look into its kernel, which it cannot while a "
    "forward is recorded: register one (torch.library.register_autograd), call it without gradients, or give "
    "Stash(recompute=False)"
)
_DROPOUTS = ("dropout_p", "dropout")
STATISTICS = (3, 4)
"""The arguments that hold running statistics."""
_SUMS_IN_ANY_ORDER = frozenset(
    (
        "index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_",
        "index_reduce", "index_reduce_", "index_put", "index_put_", "_index_put_impl_", "bincount", "histc",
        "put", "put_", "cumsum", "cumsum_", "_embedding_bag", "_ctc_loss", "_cudnn_ctc_loss",
    )
)  # fmt: skip
"""On an accelerator these may add in a different order each time."""


_PRODUCTS = frozenset(
    (
        "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "convolution",
        "_convolution", "cudnn_convolution", "thnn_conv2d", "_slow_conv2d_forward", "slow_conv3d_forward",
        "_trilinear", "_cdist_forward", "lstm", "gru", "_cudnn_rnn", "cholesky", "cholesky_inverse",
        "triangular_solve", "linear",
    )
)  # fmt: skip
_OF_PRODUCTS = (
    "linalg_", "_linalg_", "_fft_", "mkldnn_", "_scaled_dot_product_", "_flash_attention_",
    "_efficient_attention_", "_cudnn_attention_", "_thnn_fused_", "conv_",
)  # fmt: skip
"""Prefixes of other names."""


_MAKES_BITS = ("linalg_", "_linalg_", "_fft_", "cholesky", "triangular_solve")
"""Prefixes of operations whose kernels conjugate intermediate results, also those of real numbers."""

_AUTOCASTS_INSIDE = frozenset(("_trilinear", "linalg_lstsq", "linalg_pinv"))
"""Of 3,300 samples of PyTorch's operators these were computed otherwise by a mode under autocast."""

_COPIES = frozenset(("resolve_conj", "resolve_neg"))
"""Composites that only copy. A kernel in the middle of which a tape begins calls them."""

_HAVE_WORKSPACES = frozenset(("mkldnn_rnn_layer",))
"""Their last result is a workspace for backward, a part of which they do not write. In torch 2.13 backward did
not read that part: with other bytes there it returned the same gradients."""

_LINEAR = ("linalg_vector_norm", "linalg_cross", "linalg_vecdot", "linalg_diagonal")


def _is_product(base: str) -> bool:
    """Return whether the operation computes more than a few operations per element of its result."""
    return base in _PRODUCTS or (base.startswith(_OF_PRODUCTS) and base not in _LINEAR)


def _is_composite(func: Any) -> bool:
    """Return whether an operation has no kernel, but is composed of other operations."""
    if not has_kernels(func.name()):
        return False  # such as sym_size, for which has_kernel_for_dispatch_key aborts
    keys = torch._C.DispatchKey
    kernels = (
        keys.CPU,
        keys.CUDA,
        keys.MPS,
        keys.XPU,
        keys.PrivateUse1,
        keys.CompositeExplicitAutograd,
    )
    return func.has_kernel_for_dispatch_key(keys.CompositeImplicitAutograd) and not any(
        map(func.has_kernel_for_dispatch_key, kernels)
    )


def _autograd_keys() -> list[Any]:
    keys = torch._C.DispatchKey
    return [keys.AutogradCPU, keys.AutogradCUDA, keys.AutogradXPU, keys.AutogradPrivateUse1]


class Operation:
    """The properties of one overload of an operator."""

    __slots__ = (
        "_declares_writes",
        "dropout",
        "fills",
        "func",
        "has_other_tangents",
        "has_workspace",
        "is_allocation",
        "is_product",
        "is_random",
        "is_seen_by_bits",
        "is_view",
        "lacks_formula",
        "makes_bits",
        "may_autocast",
        "name",
        "out",
        "reason",
        "sums_in_any_order",
        "train_at",
        "writes",
        "writes_inside",
    )

    def __init__(self, func: Any) -> None:
        schema = schema_of(func)
        self.func = func
        self.name = str(func)
        base = schema.name.partition("::")[2] if schema is not None else ""
        self.reason = ""
        """Why it cannot be replayed; ``""`` if it can."""
        self.writes: tuple[int | str, ...] = ()
        """The arguments that it writes, by position or name."""
        self.writes_inside = False
        """Whether only the in-place operations that its kernel calls raise the versions of what it writes.
        Under any dispatch mode they raise none (seen in torch 2.13). So it is with ``_foreach_mul_``, and with
        custom operators, which may write more than they declare. There, versions may rise by one too much."""
        self.out: tuple[int | str, ...] = ()
        """The arguments among them that are given as ``out=``."""
        self.lacks_formula = False
        """Whether autograd has to look into its kernel, which it cannot under a dispatch mode."""
        self.is_view = False
        """Whether its result shares memory with an argument, and it writes nothing."""
        self.is_product = _is_product(base)
        self.is_allocation = base in _ALLOCATIONS
        self.is_seen_by_bits = base in OPERATIONS_SEEN
        """Whether :class:`~.mode_bits.ModeBits` has to see it."""
        self.has_other_tangents = base in TANGENTS_THAT_DIFFER
        self.has_workspace = base in _HAVE_WORKSPACES
        """Whether its result of bytes is a workspace, of which two calls may leave other bytes."""
        self.fills = base in _FILLS
        self.train_at = OF_TRAINING.get(base, -1)
        self.dropout: tuple[int | str, ...] = ()
        """The arguments that must be 0 so that it draws no random numbers."""
        self.sums_in_any_order = base in _SUMS_IN_ANY_ORDER
        self.is_random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        is_pytorch_s = getattr(func, "namespace", "") == "aten"
        isoperations = is_pytorch_s or func in _pure
        is_composite = schema is not None and isoperations and _is_composite(func)
        self.makes_bits = not is_pytorch_s or is_composite or base.startswith(_MAKES_BITS)
        """Whether its kernel needs :func:`~.dispatch.with_lazy_bits` even for real numbers."""
        calls_others = is_composite and base not in _COPIES
        self.may_autocast = not is_pytorch_s or calls_others or base in _AUTOCASTS_INSIDE
        """Whether its kernel may call operations that autocast handles."""
        if schema is None or not isoperations:
            self.reason = _FOREIGN.format(self.name)
        elif self.is_random:
            self.reason = f"{self.name} {RANDOM}"
        elif is_composite:
            # Inference mode does not decompose it, so the writes inside it are not seen.
            self.reason = f"{self.name} is composite and was not decomposed, as in inference mode"
        elif base in _NOT_REPEATED:
            self.reason = f"{self.name} does not give the same bits each time"
        elif base in _OTHER_MEMORY:
            self.reason = _CHANGES_LAYOUT.format(self.name)
        if schema is None or not has_kernels(func.name()):
            self.may_autocast = False
        if schema is None:
            return
        places = [
            (each.name if each.kwarg_only else at, each) for at, each in enumerate(schema.arguments)
        ]
        self.writes = tuple(
            place
            for place, each in places
            if each.alias_info is not None and each.alias_info.is_write
        )
        if (self.writes or not is_pytorch_s) and has_kernels(func.name()):
            raises = torch._C.DispatchKey.ADInplaceOrView
            may_write_more = bool(self.writes) and not is_pytorch_s
            self.writes_inside = may_write_more or not func.has_kernel_for_dispatch_key(raises)
        if not (is_pytorch_s or is_composite) and has_kernels(func.name()):
            self.lacks_formula = not any(map(func.has_kernel_for_dispatch_key, _autograd_keys()))
        self.out = tuple(place for place, each in places if each.is_out)
        self.dropout = tuple(place for place, each in places if each.name in _DROPOUTS)
        self.is_view = not self.writes and any(
            each.alias_info is not None and not each.alias_info.is_write for each in schema.returns
        )
        self._declares_writes = bool(self.writes)
        self.writes = (*self.writes, *_ALSO_WRITES.get(base, ()))
        if schema.name.startswith(f"{_COLLECTIVES}::") and base.endswith("_"):
            self.writes = (*self.writes, 0)

    def check_formula(self, args: Any, kwargs: Any, result: Any) -> None:
        """Raise if plain PyTorch would have differentiated through the kernel, after a call under a mode.

        Raises:
            UsageError: see above.
        """
        if not torch.is_grad_enabled():
            return
        given = [*tensors_of(args), *tensors_of((*kwargs.values(),))]
        made = given if self._declares_writes else tensors_of(result)
        if any(each.requires_grad for each in given):
            if any(each.is_floating_point() or each.is_complex() for each in made):
                raise UsageError(_NO_FORMULA.format(self.name))

    def writes_statistics(self, args: Any) -> bool:
        """Return whether a call with these arguments writes running statistics."""
        return self.train_at >= 0 and bool(args[self.train_at])

    def written(self, args: Any, kwargs: Any) -> Iterator[Tensor]:
        """Yield the tensors that a call with these arguments writes."""
        places = (*self.writes, *STATISTICS) if self.writes_statistics(args) else self.writes
        for place in places:
            yield from tensors_of(argument_of(args, kwargs, place))


def argument_of(args: Any, kwargs: Any, place: int | str) -> Any:
    """Return the argument at ``place``; ``None`` if it was not given."""
    if isinstance(place, str):
        return kwargs.get(place)
    return args[place] if place < len(args) else None


def tensors_of(result: Any) -> Iterator[Tensor]:
    """Yield the tensors in an operation's arguments or result, in order."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for each in result:
            yield from tensors_of(each)


def has_complex(values: Any) -> bool:
    """Return whether a tensor in an operation's arguments is complex."""
    for each in values:
        kind = type(each)
        if kind is Tensor or isinstance(each, Tensor):
            if each.is_complex():
                return True
        elif (kind is list or kind is tuple) and not (each and type(each[0]) is int):
            if has_complex(each):
                return True
    return False


operations: dict[int, Operation] = {}
"""What :func:`operation_of` has looked up, by the ``id`` of the overload, which its entry keeps alive."""

_pure: set[Any] = (
    set()
)  # overloads that are not PyTorch's, and that the program declares to be like these


def overloads_of(operator: Any) -> list[Any]:
    """Return the overloads of a custom operator, given as in ``torch.ops`` or as ``torch.library.custom_op``
    returns it; an empty list if ``operator`` is no operator."""
    operator = getattr(operator, "_opoverload", operator)
    if isinstance(operator, torch._ops.OpOverload):
        return [operator]
    if isinstance(operator, torch._ops.OpOverloadPacket):
        names: list[str] = operator.overloads()  # type: ignore[no-untyped-call]
        return [getattr(operator, name) for name in names]
    return []


def is_of_operator(function: Any) -> bool:
    """Return whether ``register_autograd`` of a custom operator created this ``torch.autograd.Function``. Such
    a function calls that operator and nothing else. It is recognized by its module in torch 2.11 to 2.15."""
    return getattr(function, "__module__", "") == "torch._library.autograd"


def declare_pure(overload: Any) -> None:
    """Declare that the results of ``overload`` depend only on its arguments."""
    _pure.add(overload)
    operations.pop(id(overload), None)


def operation_of(func: Any) -> Operation:
    """Return the properties of a dispatched operation."""
    known = operations.get(id(func))
    if known is None:
        known = operations[id(func)] = Operation(func)
    return known
