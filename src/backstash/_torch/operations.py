"""The operations that a saved tensor may be computed again by, and how each is called.

By the names of their nodes, in torch 2.11 to 2.15; a name that is missing is no rule. All compute few
floating-point operations for each byte. Which bits they give is asked of PyTorch itself, by a comparison:
nothing here is taken on faith.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["RESULT", "RULES", "Rule"]

Values = Sequence[Any]
_aten = torch.ops.aten

RESULT = "result"
"""What a node calls its own result, where it saved that."""


class Rule(NamedTuple):
    """How an operation is called again."""

    call: Callable[[Values, Mapping[str, Any], Tensor | None], Tensor]
    """With the operands, the scalars, and the memory for the result; ``None``: it takes its own."""
    operands: tuple[str, ...] | None = ("self",)
    """What the node calls its inputs, in their order; ``None``: any number of inputs, none of them saved."""
    scalars: tuple[str, ...] = ()
    """That the node keeps, by the names of the arguments."""
    others: tuple[str, ...] = ()
    """Tensors that it saved beside its inputs, as further operands."""
    buffers: tuple[str, ...] = ()
    """Likewise, but not in training: what later calls write without raising a version. Of what is in place, a
    copy is the operand."""
    optional: frozenset[str] = frozenset()
    """Operands that may be ``None``."""
    eps: bool = False
    """Whether it takes a scalar ``eps`` that the node does not keep, and the module that ran may tell."""
    is_computed: bool = True
    """Whether it is more than a view or a copy."""
    takes_result: bool = False
    """Whether the ``dtype`` and ``shape`` of its result are scalars, too."""


def _element_by_element(operation: Any, *operands: str, scalars: tuple[str, ...] = ()) -> Rule:
    def call(values: Values, scalars: Mapping[str, Any], out: Tensor | None) -> Tensor:
        # An overload with "out" is known to no autocast, and takes no memory of its own.
        where = {} if out is None else {"out": out}
        result: Tensor = operation(*values, **scalars, **where)
        return result

    return Rule(call, operands or ("self",), scalars)


def _view(operation: Any, *scalars: str) -> Rule:
    def call(values: Values, scalars: Mapping[str, Any], out: Tensor | None) -> Tensor:
        return _into(out, operation(*values, **scalars))

    return Rule(call, scalars=scalars, is_computed=False)


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    return result if out is None else out.copy_(result)


def _copy(values: Values, scalars: Mapping[str, Any], out: Tensor | None) -> Tensor:
    return values[0] if out is None else out.copy_(values[0])


def _cast(values: Values, scalars: Mapping[str, Any], out: Tensor | None) -> Tensor:
    return values[0].to(scalars["dtype"]) if out is None else out.copy_(values[0])


def _reshape(values: Values, scalars: Mapping[str, Any], out: Tensor | None) -> Tensor:
    return _into(out, values[0].reshape(scalars["shape"]))


def _expand(values: Values, scalars: Mapping[str, Any], out: Tensor | None) -> Tensor:
    return _into(out, values[0].expand(scalars["shape"]))


def _softmax(values: Values, scalars: Mapping[str, Any], out: Tensor | None) -> Tensor:
    (x,) = values
    if out is None:
        return torch.softmax(x, scalars["dim"])
    result: Tensor = _aten._softmax.out(x, scalars["dim"], False, out=out)
    return result


def _cat(values: Values, scalars: Mapping[str, Any], out: Tensor | None) -> Tensor:
    return (
        torch.cat(list(values), **scalars)
        if out is None
        else torch.cat(list(values), **scalars, out=out)
    )


def _layer_norm(values: Values, scalars: Mapping[str, Any], out: Tensor | None) -> Tensor:
    x, weight, bias, mean, rstd = values
    shape, eps = list(scalars["normalized_shape"]), scalars["eps"]
    if out is None:
        return _first(_aten.native_layer_norm.default(x, shape, weight, bias, eps))
    _aten.native_layer_norm.out(
        x, shape, weight, bias, eps, out0=out, out1=_none(mean), out2=_none(rstd)
    )
    return out


def _batch_norm(values: Values, scalars: Mapping[str, Any], out: Tensor | None) -> Tensor:
    x, weight, bias, *statistics = values
    # Given in training, they would be updated.
    mean, var = statistics or (None, None)
    arguments = (x, weight, bias, mean, var, scalars["training"], 0.0, scalars["eps"])
    if out is None:
        return _first(_aten.native_batch_norm.default(*arguments))
    empty = x.new_empty(0)
    _aten.native_batch_norm.out(*arguments, out=out, save_mean=empty, save_invstd=empty.clone())
    return out


def _group_norm(values: Values, scalars: Mapping[str, Any], out: Tensor | None) -> Tensor:
    arguments = (*values, *(scalars[each] for each in ("N", "C", "HxW", "group", "eps")))
    if out is None:
        return _first(_aten.native_group_norm.default(*arguments))
    empty = values[0].new_empty(0)
    _aten.native_group_norm.out(*arguments, out0=out, out1=empty, out2=empty.clone())
    return out


def _first(results: Any) -> Tensor:
    result: Tensor = results[0]
    return result


def _none(like: Tensor) -> Tensor:
    return like.new_empty(0)


RULES = {
    "GeluBackward0": _element_by_element(_aten.gelu, scalars=("approximate",)),
    "SiluBackward0": _element_by_element(_aten.silu),
    "MishBackward0": _element_by_element(_aten.mish),
    "HardswishBackward0": _element_by_element(_aten.hardswish),
    "HardsigmoidBackward0": _element_by_element(_aten.hardsigmoid),
    "LeakyReluBackward0": _element_by_element(_aten.leaky_relu, scalars=("negative_slope",)),
    "HardtanhBackward0": _element_by_element(_aten.hardtanh, scalars=("min_val", "max_val")),
    "CeluBackward0": _element_by_element(_aten.celu, scalars=("alpha",)),
    "EluBackward0": _element_by_element(_aten.elu, scalars=("alpha", "scale", "input_scale")),
    "SoftplusBackward0": _element_by_element(_aten.softplus, scalars=("beta", "threshold")),
    "ReluBackward0": _element_by_element(_aten.relu),
    "SigmoidBackward0": _element_by_element(_aten.sigmoid),
    "TanhBackward0": _element_by_element(_aten.tanh),
    "ExpBackward0": _element_by_element(_aten.exp),
    "LogBackward0": _element_by_element(_aten.log),
    "SinBackward0": _element_by_element(_aten.sin),
    "CosBackward0": _element_by_element(_aten.cos),
    "SqrtBackward0": _element_by_element(_aten.sqrt),
    "RsqrtBackward0": _element_by_element(_aten.rsqrt),
    "ReciprocalBackward0": _element_by_element(_aten.reciprocal),
    "AbsBackward0": _element_by_element(_aten.abs),
    "NegBackward0": _element_by_element(_aten.neg),
    "PowBackward0": _element_by_element(_aten.pow, scalars=("exponent",)),
    "MulBackward0": _element_by_element(_aten.mul, "self", "other"),
    "DivBackward0": _element_by_element(_aten.div, "self", "other"),
    "AddBackward0": _element_by_element(_aten.add, "self", "other", scalars=("alpha",)),
    "SubBackward0": _element_by_element(_aten.sub, "self", "other", scalars=("alpha",)),
    "SoftmaxBackward0": Rule(_softmax, scalars=("dim",)),
    "GluBackward0": _element_by_element(_aten.glu, scalars=("dim",)),
    "CatBackward0": Rule(_cat, None, ("dim",)),
    "CloneBackward0": Rule(_copy, is_computed=False),
    "AliasBackward0": Rule(_copy, is_computed=False),
    "ToCopyBackward0": Rule(_cast, takes_result=True),
    "ViewBackward0": Rule(_reshape, is_computed=False, takes_result=True),
    "UnsafeViewBackward0": Rule(_reshape, is_computed=False, takes_result=True),
    "ReshapeAliasBackward0": Rule(_reshape, is_computed=False, takes_result=True),
    "ExpandBackward0": Rule(_expand, is_computed=False, takes_result=True),
    "TBackward0": _view(_aten.t.default),
    "TransposeBackward0": _view(_aten.transpose.int, "dim0", "dim1"),
    "PermuteBackward0": _view(_aten.permute.default, "dims"),
    "UnsqueezeBackward0": _view(_aten.unsqueeze.default, "dim"),
    "NativeLayerNormBackward0": Rule(
        _layer_norm,
        ("input", "weight", "bias"),
        ("normalized_shape",),
        ("result1", "result2"),
        optional=frozenset({"weight", "bias"}),
        eps=True,
    ),
    "NativeBatchNormBackward0": Rule(
        _batch_norm,
        ("input", "weight", "bias"),
        ("training", "eps"),
        buffers=("running_mean", "running_var"),
        optional=frozenset({"weight", "bias", "running_mean", "running_var"}),
    ),
    "NativeGroupNormBackward0": Rule(
        _group_norm,
        ("input", "weight", "bias"),
        ("N", "C", "HxW", "group", "eps"),
        optional=frozenset({"weight", "bias"}),
    ),
}
