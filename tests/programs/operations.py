"""Steps that compute: what each operation does with its operands ``x`` and ``y``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from .functions import (
    Both,
    Fails,
    FromTwo,
    Mutates,
    Once,
    ReturnsSaved,
    SavesInputs,
    SavesOutputs,
    Scales,
    ToTwo,
)

Operation = Callable[[Tensor, Tensor], Any]


def _pair(operation: Operation) -> Operation:
    def run(x: Tensor, y: Tensor) -> Tensor:
        return operation(x, y if y.shape == x.shape else y.mean())

    return run


def _no_grad(operation: Operation) -> Operation:
    def run(x: Tensor, y: Tensor) -> None:
        with torch.no_grad():
            operation(x, y)

    return run


def _rows(x: Tensor) -> Tensor:
    return x[: max(1, len(x) // 3)]


def _through(out: Tensor, x: Tensor) -> Tensor:
    """``out``'s values with a gradient to ``x``, where ``out`` has none of its own."""
    return x * out if out.shape == x.shape else x.mean() * out


# Checkpoints: forward runs again in backward.


def _body(x: Tensor, y: Tensor) -> Tensor:
    h = (x.sin() * y.mean()).exp()
    return h[..., :1].tanh() * h.cos().add_(0.5)


def _random_body(x: Tensor, y: Tensor) -> Tensor:
    return F.dropout(x.sin(), 0.4) * Mutates.apply(x)


def _twice(x: Tensor, y: Tensor) -> Tensor:
    inner = checkpoint(_body, x, y, use_reentrant=False, preserve_rng_state=False)
    return inner.tanh() * x.cos()


def _checkpoint(body: Operation, **options: Any) -> Operation:
    options = {"preserve_rng_state": False, "use_reentrant": False, **options}
    return lambda x, y: checkpoint(body, x, y, **options)


def _selective() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.sin.default])


# Subclasses, transforms, and what fills a tensor of its own.


def _jagged(x: Tensor, y: Tensor) -> Tensor:
    offsets = torch.tensor([0, 1, len(x)], device=x.device)
    nested = torch.nested.nested_tensor_from_jagged(x.reshape(len(x), -1), offsets)
    return (nested.sin() * nested).values()


def _two_tensors(x: Tensor, y: Tensor) -> Tensor:
    two = ToTwo.apply(x)
    return FromTwo.apply(two.sin() * two.exp() * two)


def _two_tensors_changed(x: Tensor, y: Tensor) -> Tensor:
    two = ToTwo.apply(x)
    first = two * two.detach()
    with torch.no_grad():
        two.mul_(0.5)  # seen or not, backward of the first must not be wrong
    return FromTwo.apply(first + two.sin())


def _rrelu(x: Tensor, y: Tensor) -> Tensor:
    torch.manual_seed(3)
    return F.rrelu(x, training=True)


def _dropout(x: Tensor, y: Tensor) -> Tensor:
    torch.manual_seed(4)
    return F.dropout(x, 0.4)


def _batch_norm(x: Tensor, y: Tensor) -> Tensor:
    wide = x.reshape(len(x), -1)
    mean, var = torch.zeros(wide.shape[1]).to(x), torch.ones(wide.shape[1]).to(x)
    once = F.batch_norm(wide, mean, var, training=True)
    return F.batch_norm(once, mean, var, training=False)


def _convolve(x: Tensor, y: Tensor) -> Tensor:
    wide = x.reshape(1, 1, len(x), -1)
    return F.max_pool2d(F.conv2d(wide, wide[..., :3, :3].detach()), 2)[0, 0]


def _attend(x: Tensor, y: Tensor) -> Tensor:
    wide = x.reshape(1, 1, len(x), -1)
    parts = (wide * 0.1).chunk(2, -1)
    return F.scaled_dot_product_attention(*parts, parts[0])[0, 0]


def _with_other_memory(x: Tensor, y: Tensor) -> Tensor:
    """Its ``data`` is set between two saves. Of its own: where there are views, torch itself may crash."""
    own = x.clone()
    first = own.detach() * x
    own.data = own.detach().cos()
    return first + own.detach() * x


PURE: dict[str, Operation] = {
    "sin": lambda x, y: x.sin(),
    "exp": lambda x, y: x.tanh().exp(),
    "tanh": lambda x, y: x.tanh(),
    "relu": lambda x, y: x.relu(),
    "square": lambda x, y: x * x,
    "mul": _pair(torch.mul),
    "add": _pair(torch.add),
    "where": lambda x, y: torch.where(x > 0, x, x.sin()),
    "matmul": lambda x, y: x.reshape(len(x), -1) @ x.reshape(len(x), -1).t() / x.numel(),
    "softmax": lambda x, y: torch.softmax(x, -1),
    "gather": lambda x, y: x.gather(0, x.detach().argsort(0)),
    "index": lambda x, y: x[torch.arange(len(x), device=x.device) % 2 == 0],
    "norm": lambda x, y: F.layer_norm(x, x.shape[-1:]),
    "convolve": _convolve,
    "attend": _attend,
    "batch norm": _batch_norm,
    "total": lambda x, y: x.sum() / 16,
    "clone": lambda x, y: x.clone(),
    "rrelu": _rrelu,
    "dropout": _dropout,
    # custom Functions
    "own": lambda x, y: Mutates.apply(x),
    "saves inputs": lambda x, y: SavesInputs.apply(x, y if y.shape == x.shape else x),
    "saves outputs": lambda x, y: SavesOutputs.apply(x)[0],
    "once": lambda x, y: Once.apply(x),
    "both": lambda x, y: Both.apply(x),
    "returns saved": lambda x, y: ReturnsSaved.apply(x),
    "fails in forward": lambda x, y: Fails.apply(x, "forward"),
    "fails in backward": lambda x, y: Fails.apply(x, "backward"),
    # checkpoints
    "checkpoint": _checkpoint(_body),
    "checkpoint, reentrant": _checkpoint(_body, use_reentrant=True),
    "checkpoint, random": _checkpoint(_random_body, preserve_rng_state=True),
    "checkpoint twice": _checkpoint(_twice),
    "checkpoint, reentrant outside": _checkpoint(_twice, use_reentrant=True),
    "checkpoint, to the end": _checkpoint(_body, early_stop=False),
    "checkpoint, selective": _checkpoint(_body, context_fn=_selective),
    # types, subclasses, transforms
    "complex": lambda x, y: torch.complex(x, x.cos()),
    "conj product": lambda x, y: (torch.complex(x, x.cos()).conj() * torch.complex(x, x)).real,
    "neg product": lambda x, y: torch.complex(x, x.cos()).conj().imag * x.sin(),
    "real part": lambda x, y: (x * x.conj()).imag + x.real if x.is_complex() else x * 2,
    "absolute": lambda x, y: x.abs(),
    "float32": lambda x, y: x.to(torch.float32),
    "bfloat16": lambda x, y: x.to(torch.bfloat16),
    "jagged": _jagged,
    "two tensors": _two_tensors,
    "two tensors, changed": _two_tensors_changed,
    "vmap": lambda x, y: torch.vmap(lambda row: row.sin() * row)(x),
    "jvp": lambda x, y: torch.func.jvp(lambda a: a.sin() * a, (x,), (x.cos(),))[1],
    "jvp of a Function": lambda x, y: torch.func.jvp(Both.apply, (x,), (x.cos(),))[1],
}
VIEWS: dict[str, Operation] = {
    "t": lambda x, y: x.transpose(0, -1),
    "flat": lambda x, y: x.view(-1),
    "rows": lambda x, y: _rows(x),
    "first rows": lambda x, y: x[:2],
    "last rows": lambda x, y: x[-2:],
    "second half": lambda x, y: x[len(x) // 2 :],
    "column": lambda x, y: x[..., 1:3],
    "corner": lambda x, y: x[-2:, ..., -2:],
    "every other": lambda x, y: x[::2],
    "expand": lambda x, y: x[..., :1].expand(*x.shape[:-1], 5),
    "expand all": lambda x, y: x.expand(2, *x.shape),
    "unfold": lambda x, y: x.unfold(0, 2, 1),
    "strided": lambda x, y: x.as_strided((3, 4), (2, 1)),
    "overlapping": lambda x, y: x.as_strided((4, 4), (1, 1)),
    "chunk": lambda x, y: x.chunk(3, -1)[-1],
    "one element": lambda x, y: x.reshape(-1)[1],
    "nothing of it": lambda x, y: x[:0],
    "detach": lambda x, y: x.detach(),
    "data": lambda x, y: x.data,
    "integers": lambda x, y: x.detach().view(torch.int64) % 7 * 1.0,
    "as bytes": lambda x, y: x.detach().view(torch.uint8) * 0.5,
    "conj": lambda x, y: x.conj(),
    "imag of conj": lambda x, y: x.conj().imag,
    "as real": lambda x, y: torch.view_as_real(x.resolve_conj()),
    "neg": lambda x, y: torch._neg_view(x),
    "set data": _with_other_memory,
    "buffer": lambda x, y: torch.full((8, 6), 0.5, dtype=torch.float64, device=x.device),
    "matrix": lambda x, y: x.detach().sin().reshape(-1)[:144].clone().view(12, 12),
}


def _out(x: Tensor, y: Tensor) -> None:
    torch.sin(x.detach().clone(), out=x.detach())


def _grow(x: Tensor, y: Tensor) -> None:
    storage = x.untyped_storage()
    storage.resize_(storage.nbytes() + 4096)  # other memory, no version


def _unchanged(x: Tensor, y: Tensor) -> None:
    """As FSDP's parameters: no bytes for a while, then the same again, and no version."""
    storage = x.untyped_storage()
    if y.untyped_storage()._cdata == storage._cdata:
        return
    bytes_before = storage.clone()
    storage.resize_(0)
    try:
        y.sin().cos()
    finally:
        storage.resize_(bytes_before.nbytes())
        storage.copy_(bytes_before)


CHANGES: dict[str, Operation] = {
    "mul_": lambda x, y: x.mul_(0.5),
    "add_": lambda x, y: x.add_(y if y.shape == x.shape else 1.0),
    "sigmoid_": lambda x, y: x.sigmoid_(),
    "zero a row": lambda x, y: x[0].zero_(),
    "set a column": lambda x, y: x.__setitem__((..., 0), 0.25),
    "put": lambda x, y: x.index_put_((torch.tensor([0], device=x.device),), torch.ones(()).to(x)),
    "change detached": lambda x, y: x.detach().add_(0.125),
    "change quietly": _no_grad(lambda x, y: x.mul_(0.75)),
    "copy quietly": _no_grad(lambda x, y: x.copy_(x.flip(0))),
    "change the base": _no_grad(lambda x, y: (x if x._base is None else x._base).add_(0.25)),
    "as bytes, quietly": lambda x, y: x.detach().view(torch.uint8).bitwise_and_(0xFE),
    "several at once": lambda x, y: torch._foreach_mul_([x.detach(), y.detach()], 0.5),
    "out": _out,
    "scale": lambda x, y: Scales.apply(x),
    "grow": _grow,
    "away and back": _unchanged,
    "resize_": lambda x, y: x.detach().resize_(x.numel() + 8),
    # unseen: no version shows these
    "write data": lambda x, y: x.data.mul_(0.5),
    "write a column of data": lambda x, y: x.data.__setitem__((..., -1), 0.75),
    "write by numpy": lambda x, y: x.detach().numpy().__setitem__(0, 0.5),
}
# What uses state of the whole process: one generator, one level of forward mode.
ALONE = {"rrelu", "dropout", "checkpoint, random", "jvp", "jvp of a Function", "vmap"}
MUTATES_LATER = {"own", "checkpoint, random", "returns saved"}

UNSEEN = frozenset({"away and back", "grow"})  # writes that no dispatch shows
COPIED = frozenset(
    {"away and back"}
)  # memory that is freed and taken again while it is being copied
