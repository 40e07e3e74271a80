"""Change gradients inside backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from ..errors import UsageError
from ._compiled import warn_if_compiled
from ._distributed import fsdp2_parameters, reduction_of
from ._edit_targets import Part, parts_of
from ._handle import GradientHooks
from ._names import Selector, Target
from ._on_gradient import on_inputs, on_outputs, on_tensor
from ._registration import HookRecord, Make, Registration

__all__ = ["edit_gradients"]

GradientEdit = Callable[[torch.Tensor], Any]


def edit_gradients(
    edits: Mapping[Selector, GradientEdit],
    model: Target,
    *,
    at: Literal["parameters", "outputs", "inputs"] | None = None,
) -> GradientHooks:
    """Replaces gradients of parameters, of what modules return, or of what they take.

    What an edit returns flows on through backward in the gradient's place; ``None`` leaves it, so ``print``
    is an edit that looks. Edits of one tensor are applied in the order of the dict. Give back a new tensor:
    the gradient's memory may be shared with autograd's own.

    The gradient of an input is the one through this module alone, other uses of the tensor apart. Where the
    module changes its input in place (``nn.ReLU(inplace=True)``), the uses cannot be told apart, and it
    is that of the tensor as it was before the call.

    Under DDP a parameter's gradient is edited before the reduction (``.reduction`` says so); under FSDP2 it is
    ``.grad`` after the reduction and accumulation that is edited.

    Args:
        edits: from names to ``callable(gradient) -> tensor or None``. A name is a parameter's path or glob
            (``"fc.bias"``), or selects modules, as in :func:`backstash.hooks.capture`.
        model: a module, or a dict of tensors by name: ``{"y": y}``.
        at: ``"parameters"``, modules' ``"outputs"`` or ``"inputs"``. Default: parameters if the name matches
            parameters, outputs if it matches modules; an error if it matches both.

    Returns:
        A handle.

    Raises:
        NoMatchError: a name matches nothing; nothing is registered then.
        UsageError: a name matches both parameters and modules; an edit is not callable.

    An edit that returns something of another shape, dtype or device raises ``UsageError`` out of
    ``backward()``. At exit a :class:`HookWarning` names what never got a gradient.

    >>> import torch
    >>> from torch import nn
    >>> from backstash.hooks import edit_gradients
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> with edit_gradients({"0.bias": torch.zeros_like, "1": lambda g: g.clamp(min=0)}, model):
    ...     (-model(torch.ones(1, 2))).sum().backward()
    >>> model[0].bias.grad, model[0].weight.grad.abs().sum()
    (tensor([0., 0.]), tensor(0.))
    """
    parts = [part for name, edit in edits.items() for part in parts_of(model, name, edit, at)]
    if not parts:
        raise UsageError(
            'edits={} edits nothing; give a dict such as {"fc.bias": torch.zeros_like}'
        )
    registration = Registration("edit_gradients")
    with registration.all_or_none():
        _register(registration, parts, model)
    return GradientHooks(
        registration, reduction=reduction_of(model, at_end=False), note=f"{len(parts)} edits"
    )


def _register(registration: Registration, parts: list[Part], model: Target) -> None:
    sharded = fsdp2_parameters(model)
    for part in parts:
        make = _make(part.edit, part.path)
        if part.tensor is not None:
            late = id(part.tensor) in sharded
            on_tensor(registration, part.path, part.tensor, make, sharded=late)
        elif part.site is not None:
            put = on_inputs if part.inputs else on_outputs
            put(registration, part.site, make)
    if isinstance(model, nn.Module):
        sites = [part.site for part in parts if part.site is not None]
        warn_if_compiled(model, sites, owner="edit_gradients")


def _make(edit: GradientEdit, path: str) -> Make:
    def make(record: HookRecord) -> Callable[[torch.Tensor], torch.Tensor | None]:
        def hook(gradient: torch.Tensor) -> torch.Tensor | None:
            record.fired += 1
            return _checked(edit(gradient), gradient, path)

        return hook

    return make


def _checked(new: Any, old: torch.Tensor, path: str) -> torch.Tensor | None:
    if new is None:
        return None
    if not isinstance(new, torch.Tensor):
        raise UsageError(
            f"the edit of {path!r} returned a {type(new).__name__}; allowed: a tensor, or None to leave "
            "the gradient as it is"
        )
    if (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
        raise UsageError(
            f"the edit of {path!r} returned {new.dtype} {tuple(new.shape)} on {new.device}; the gradient is "
            f"{old.dtype} {tuple(old.shape)} on {old.device}: build it with torch.zeros_like(gradient) or such"
        )
    return new
