"""Change gradients inside backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from typing import Any, Literal

import torch
from torch import nn

from .._text import clean
from ..errors import UsageError
from ._compiled import warn_if_compiled
from ._distributed import fsdp2_parameters, reduction_of
from ._errors import NoMatchError
from ._handle import GradientHooks
from ._names import Selector, Target, named_tensors, near, select, select_tensors
from ._on_gradient import on_inputs, on_outputs, on_tensor
from ._paths import Site
from ._registration import Registration

__all__ = ["edit_gradients"]


GradientEdit = Callable[[torch.Tensor], Any]


def edit_gradients(
    edits: Mapping[Selector, GradientEdit],
    model: Target,
    *,
    at: Literal["parameters", "outputs", "inputs"] | None = None,
) -> GradientHooks:
    """Replace gradients of parameters, of modules' outputs or of modules' inputs.

    The tensor that an edit returns takes the gradient's place in the rest of backward; an edit that returns
    ``None`` leaves the gradient, so ``print`` is an edit that only looks. Edits of one parameter, or
    of one module, are applied in the order of the dict. If nested modules return one tensor, the inner module's
    edit of the output is applied first. Return a new tensor and do not change the gradient in place: autograd
    may share its memory.

    The gradient of an input is the part that comes through this module; what comes through other uses of the
    tensor is not in it. Where the module changes its input in place (``nn.ReLU(inplace=True)``), the uses
    cannot be distinguished, and the edit gets the gradient of the tensor as it was before the call.

    Under DDP an edit gets a parameter's gradient before the reduction (``.reduction`` says so); under FSDP2 it
    gets ``.grad`` after the reduction and accumulation.

    Args:
        edits: a dict from names to ``callable(gradient) -> tensor or None``. A name is a parameter's path or
            glob (``"fc.bias"``), or selects modules, as in :func:`backstash.hooks.capture`.
        model: a module, or a dict of tensors by name: ``{"y": y}``.
        at: what is edited: ``"parameters"``, modules' ``"outputs"`` or modules' ``"inputs"``. Default:
            parameters if the name matches parameters, outputs if it matches modules, an error if both.

    Returns:
        A :class:`GradientHooks` handle.

    Raises:
        NoMatchError: a name matches nothing; nothing is registered then.
        UsageError: a name matches both parameters and modules; an edit is not callable; ``edits`` is no dict.

    An edit that returns something of another shape, dtype or device raises ``UsageError`` out of
    ``backward()``. At exit a :class:`HookWarning` names the edits that never got a gradient.

    >>> import torch
    >>> from torch import nn
    >>> from backstash.hooks import edit_gradients
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> with edit_gradients({"0.bias": torch.zeros_like, "1": lambda g: g.clamp(min=0)}, model):
    ...     (-model(torch.ones(1, 2))).sum().backward()
    >>> model[0].bias.grad, model[0].weight.grad.abs().sum()
    (tensor([0., 0.]), tensor(0.))
    """
    if not isinstance(edits, Mapping):
        raise UsageError(
            f"edits is a {type(edits).__name__}; allowed: a dict such as "
            '{"fc.bias": torch.zeros_like}, as the first argument, before the model'
        )
    if at not in (None, "parameters", "outputs", "inputs"):
        raise UsageError(f'at={at!r} is not known; allowed: "parameters", "outputs", "inputs"')
    if not edits:
        raise UsageError(
            'edits={} edits nothing; give a dict such as {"fc.bias": torch.zeros_like}'
        )
    registration = Registration("edit_gradients")
    with registration.all_or_none():
        count = _register(registration, edits, model, at)
    return GradientHooks(
        registration, reduction=reduction_of(model, at_end=False), note=f"{count} edits"
    )


_At = Literal["parameters", "outputs", "inputs"]


def _register(
    registration: Registration,
    edits: Mapping[Selector, GradientEdit],
    model: Target,
    at: _At | None,
) -> int:
    """Hook every gradient that is edited. Return how many there are."""
    sharded = fsdp2_parameters(model)
    on_module = on_inputs if at == "inputs" else on_outputs
    count, edited = 0, list[Site]()
    for name, edit in edits.items():
        if not callable(edit):
            raise UsageError(f"edits[{name!r}]={edit!r} is not callable; give callable(gradient)")
        tensors, sites = _selected(model, name, at)
        for path, tensor in tensors.items():
            late = id(tensor) in sharded
            on_tensor(registration, path, tensor, _hook(edit, path), sharded=late)
        for site in sites:
            on_module(registration, site, _hook(edit, site.path))
        count += len(tensors) + len(sites)
        edited += sites
    if isinstance(model, nn.Module):
        warn_if_compiled(model, edited, owner="edit_gradients")
    return count


def _hook(edit: GradientEdit, path: str) -> GradientEdit:
    def hook(gradient: torch.Tensor) -> torch.Tensor | None:
        return _checked(edit(gradient), gradient, path)

    return hook


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


def _selected(
    model: Target, name: Selector, at: _At | None
) -> tuple[dict[str, torch.Tensor], list[Site]]:
    """Return the tensors or the modules that one name of ``edits`` selects."""
    if at in ("outputs", "inputs") or (at is None and not isinstance(name, str)):
        if not isinstance(model, nn.Module):
            raise NoMatchError(
                f"edits: {name!r} selects modules, and the model is a dict of tensors"
            )
        return {}, select(model, name, argument="edits")
    if at == "parameters" or not isinstance(model, nn.Module):
        return select_tensors(model, str(name), argument="edits"), []
    return _either(model, str(name))


def _either(model: nn.Module, name: str) -> tuple[dict[str, torch.Tensor], list[Site]]:
    """Return the parameters or the modules that a name selects.

    Raises:
        UsageError: it selects both.
        NoMatchError: it selects neither, or it is the path of a frozen parameter.
    """
    parameters = named_tensors(model)
    tensors: dict[str, torch.Tensor] = {}
    sites: list[Site] = []
    with suppress(NoMatchError):
        sites = select(model, name, argument="edits")
    with suppress(NoMatchError) if name not in parameters else nullcontext():
        tensors = select_tensors(model, name, argument="edits")
    if tensors and sites:
        raise UsageError(
            f"edits: {name!r} matches parameters ({_few(list(tensors))}) and modules "
            f'({_few([site.label for site in sites])}); pass at="parameters" or at="outputs"'
        )
    if not tensors and not sites:
        known = [*parameters, *(path for path, _ in model.named_modules())]
        raise NoMatchError(
            f"edits: {name!r} matches no parameter and no module; {near(name, known)}"
        )
    return tensors, sites


def _few(names: list[str]) -> str:
    return ", ".join(map(clean, names[:3])) + (", …" if len(names) > 3 else "")
