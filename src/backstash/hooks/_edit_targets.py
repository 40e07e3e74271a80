"""Which gradients the names of ``edit_gradients`` mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from .._text import clean
from ..errors import UsageError
from ._errors import NoMatchError
from ._names import Selector, Target, named_tensors, near, select, select_tensors
from ._paths import Site

__all__ = ["Part", "parts_of"]

At = Literal["parameters", "outputs", "inputs"]


@dataclass(frozen=True, slots=True)
class Part:
    """One gradient and its edit: of a tensor, or of what a module returns or takes."""

    path: str
    edit: Callable[[torch.Tensor], Any]
    tensor: torch.Tensor | None = None
    site: Site | None = None
    inputs: bool = False


def parts_of(model: Target, name: Selector, edit: Any, at: At | None) -> list[Part]:
    """What one entry of the edits means."""
    if not callable(edit):
        raise UsageError(f"edits[{name!r}]={edit!r} is not callable; give callable(gradient)")
    if at not in (None, "parameters", "outputs", "inputs"):
        raise UsageError(f'at={at!r} is not known; allowed: "parameters", "outputs", "inputs"')
    tensors = _tensors(model, name) if at in (None, "parameters") else {}
    sites = _sites(model, name) if at != "parameters" else []
    if tensors and sites:
        raise UsageError(
            f"edits: {name!r} matches parameters ({_few(list(tensors))}) and modules "
            f'({_few([site.label for site in sites])}); pass at="parameters" or at="outputs"'
        )
    if not tensors and not sites:
        raise NoMatchError(_nothing(model, name, at))
    found = [Part(path, edit, tensor=tensor) for path, tensor in tensors.items()]
    return found + [Part(s.path, edit, site=s, inputs=at == "inputs") for s in sites]


def _tensors(model: Target, name: Selector) -> dict[str, torch.Tensor]:
    if not isinstance(name, str):
        return {}
    try:
        return select_tensors(model, name, argument="edits")
    except NoMatchError:
        # Frozen ones are worth an error of their own, unless the name means modules as well.
        if name in named_tensors(model):
            raise
        return {}


def _sites(model: Target, name: Selector) -> list[Site]:
    if not isinstance(model, nn.Module):
        return []
    try:
        return select(model, name, argument="edits")
    except NoMatchError:
        return []


def _nothing(model: Target, name: Selector, at: At | None) -> str:
    if at in ("outputs", "inputs") or not isinstance(name, str):
        if not isinstance(model, nn.Module):
            return f"edits: {name!r} selects modules, and the model is a dict of tensors"
        try:
            select(model, name, argument="edits")
        except NoMatchError as error:
            return str(error)
    known = list(named_tensors(model))
    if at is None and isinstance(model, nn.Module):
        known += [path for path, _ in model.named_modules()]
    what = "parameter" if at == "parameters" else "parameter and no module"
    return f"edits: {name!r} matches no {what}; {near(str(name), known)}"


def _few(names: list[str]) -> str:
    return ", ".join(map(clean, names[:3])) + (", …" if len(names) > 3 else "")
