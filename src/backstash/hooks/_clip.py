"""Clip each parameter's gradient inside backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..errors import UsageError
from ._distributed import fsdp2_parameters, reduction_of
from ._handle import GradientHooks
from ._names import Target, select_tensors
from ._on_gradient import on_tensor
from ._registration import Registration
from ._stats import norm_of

__all__ = ["clip_gradients"]

Clip = Callable[[torch.Tensor], torch.Tensor]


def clip_gradients(
    model: Target,
    *,
    value: float | tuple[float, float] | None = None,
    norm: float | None = None,
    names: str | Iterable[str] | None = None,
) -> GradientHooks:
    """Clip the gradient of every parameter separately, as backward computes it.

    This is not global-norm clipping. ``torch.nn.utils.clip_grad_norm_`` scales all gradients by one factor,
    after backward, and keeps their direction; ``norm`` here scales each tensor by its own factor, and
    ``value`` clamps each element: both change the direction. ``repr()`` of the handle says so.

    The gradient is replaced, not changed in place: autograd may share its memory. Under DDP each process's
    gradient is clipped before the reduction (``.reduction`` says so); under FSDP2 ``.grad`` is clipped after
    the reduction and accumulation, by the norm of the whole parameter's gradient. With a ``GradScaler`` the
    scaled gradient is clipped.

    Args:
        model: a module, or a dict of tensors by name: ``{"y": y}`` clips what flows back through ``y``.
        value: clamp the elements to [-value, value], or to a pair (least, greatest).
        norm: scale a gradient whose Euclidean norm is greater down to this norm.
        names: which parameters, by path or glob. Default: all that require a gradient.

    Returns:
        A :class:`GradientHooks` handle.

    Raises:
        UsageError: not exactly one of ``value`` and ``norm`` is given, or the bound is not a valid one.
        NoMatchError: a name matches nothing; nothing is registered then.

    At exit a :class:`HookWarning` names the tensors that never got a gradient.

    >>> import torch
    >>> from backstash.hooks import clip_gradients
    >>> model = torch.nn.Linear(2, 1)
    >>> with clip_gradients(model, value=1.0):
    ...     model(torch.tensor([[3.0, -4.0]])).sum().backward()
    >>> model.weight.grad
    tensor([[ 1., -1.]])
    """
    if (value is None) == (norm is None):
        raise UsageError(f"value={value!r}, norm={norm!r}: give exactly one of them")
    clip, note = _by_norm(norm) if norm is not None else _by_value(value)
    tensors = select_tensors(model, names)
    sharded = fsdp2_parameters(model)

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        return _on_sparse(gradient, clip) if gradient.is_sparse else clip(gradient)

    registration = Registration("clip_gradients")
    with registration.all_or_none():
        for name, tensor in tensors.items():
            on_tensor(registration, name, tensor, hook, sharded=id(tensor) in sharded)
    reduction = reduction_of(model, at_end=False)
    return GradientHooks(registration, reduction=reduction, note=note)


def _on_sparse(gradient: torch.Tensor, clip: Clip) -> torch.Tensor:
    gradient = gradient.coalesce()
    return torch.sparse_coo_tensor(
        gradient.indices(),
        clip(gradient.values()),
        gradient.shape,
        check_invariants=True,
        is_coalesced=True,
    )


def _by_value(value: float | tuple[float, float] | None) -> tuple[Clip, str]:
    pair: Any = value if isinstance(value, tuple) else (0, value)
    numbers = len(pair) == 2 and all(isinstance(bound, (int, float)) for bound in pair)
    if not numbers or not pair[0] < pair[1]:
        raise UsageError(
            f"value={value!r} is not a bound; allowed: a positive number, or (least, greatest)"
        )
    low, high = pair if isinstance(value, tuple) else (-pair[1], pair[1])

    def clip(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clamp(low, high)

    return clip, f"each element clamped to [{low}, {high}]; not global-norm clipping"


def _by_norm(norm: float) -> tuple[Clip, str]:
    if not (isinstance(norm, (int, float)) and 0 < norm < math.inf):
        raise UsageError(f"norm={norm!r} is not a norm; allowed: a positive finite number")

    def clip(gradient: torch.Tensor) -> torch.Tensor:
        # The factor stays on the device: a float would wait for it. NaN stays NaN, to be seen.
        factor = (norm / norm_of(gradient)).clamp(max=1.0)
        if gradient.dtype in (torch.float16, torch.bfloat16):
            # These may not be able to hold the norm or the factor.
            return (gradient.float() * factor.float()).to(gradient.dtype)
        return gradient * factor.to(gradient.dtype)

    return clip, f"each tensor scaled to its own norm of at most {norm}; not global-norm clipping"
