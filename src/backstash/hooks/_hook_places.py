"""Where torch keeps hooks. All of these attributes are private to torch; a missing one is passed over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.modules.module as torch_module
from torch import nn

from ._paths import join, walk

__all__ = ["places"]

_ON_MODULES = (
    ("forward pre", "_forward_pre_hooks"),
    ("forward", "_forward_hooks"),
    ("backward pre", "_backward_pre_hooks"),
    ("backward", "_backward_hooks"),
    ("state_dict pre", "_state_dict_pre_hooks"),
    ("state_dict", "_state_dict_hooks"),
    ("load_state_dict pre", "_load_state_dict_pre_hooks"),
    ("load_state_dict post", "_load_state_dict_post_hooks"),
)
_ON_PARAMETERS = (
    ("gradient", "_backward_hooks"),
    ("accumulated gradient", "_post_accumulate_grad_hooks"),
)
_GLOBAL = (
    ("global forward pre", "_global_forward_pre_hooks"),
    ("global forward", "_global_forward_hooks"),
    ("global backward pre", "_global_backward_pre_hooks"),
    ("global backward", "_global_backward_hooks"),
    ("global module registration", "_global_module_registration_hooks"),
    ("global parameter registration", "_global_parameter_registration_hooks"),
    ("global buffer registration", "_global_buffer_registration_hooks"),
)

Place = tuple[str, str, Any]


def _in(holder: object, attributes: tuple[tuple[str, str], ...], path: str) -> Iterator[Place]:
    for kind, attribute in attributes:
        hooks = getattr(holder, attribute, None)
        for function in list(hooks.values()) if hooks else ():
            yield kind, path, function


def places(model: nn.Module) -> Iterator[Place]:
    """Every hook: its kind, the path of what it is on (``"*"`` for global ones), its function."""
    paths: dict[int, str] = {}
    for _, site in walk(model):
        paths.setdefault(id(site.module), site.path)
    seen: set[int] = set()
    for raw, module in model.named_modules():
        path = paths.get(id(module), raw)
        yield from _in(module, _ON_MODULES, path)
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield from _in(parameter, _ON_PARAMETERS, join(path, name))
    yield from _in(torch_module, _GLOBAL, "*")
    yield from _saved_tensor_hooks()


def _saved_tensor_hooks() -> Iterator[Place]:
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    pair = top(False) if top is not None else None
    for kind, function in zip(
        ("saved tensor pack", "saved tensor unpack"), pair or (), strict=False
    ):
        yield kind, "*", function
