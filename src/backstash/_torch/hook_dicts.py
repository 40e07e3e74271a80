"""The hooks that are registered on modules, on tensors, and for all modules, as torch keeps them.

Torch has no call that lists them. The dictionaries below are in torch 2.11 to 2.15; the hooks of a
dictionary that is missing are not listed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.modules.module as torch_module
from torch import Tensor, nn

__all__ = [
    "call_before_hooks",
    "count_gradient_hooks",
    "dicts_on",
    "hooks_of",
    "hooks_of_all_modules",
    "plain_function",
    "without_gradient_hooks",
]

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
_ON_TENSORS = (
    ("gradient", "_backward_hooks"),
    ("accumulated gradient", "_post_accumulate_grad_hooks"),
)
_ON_ALL_MODULES = (
    ("global forward pre", "_global_forward_pre_hooks"),
    ("global forward", "_global_forward_hooks"),
    ("global backward pre", "_global_backward_pre_hooks"),
    ("global backward", "_global_backward_hooks"),
    ("global module registration", "_global_module_registration_hooks"),
    ("global parameter registration", "_global_parameter_registration_hooks"),
    ("global buffer registration", "_global_buffer_registration_hooks"),
)


def count_gradient_hooks(tensor: Tensor) -> int:
    """How many hooks see the tensor's gradient on its way."""
    return len(getattr(tensor, "_backward_hooks", None) or ())


def hooks_of(holder: nn.Module | Tensor) -> Iterator[tuple[str, Any]]:
    """The hooks on one module or tensor: the kind and the function of each."""
    return _in(holder, _ON_MODULES if isinstance(holder, nn.Module) else _ON_TENSORS)


def call_before_hooks(node: Any, callback: Callable[[], None]) -> None:
    """Call ``callback()`` when ``node``, which computes now, has computed, before its hooks are called.

    It is not called where the node has no hooks, or torch does not show them.
    """

    def call(*_: object) -> None:
        handle.remove()
        callback()

    handle = node.register_hook(call)
    hooks = handle.hooks_dict_ref()
    if hooks is None or len(hooks) < 2:
        handle.remove()
        return
    others = {key: hook for key, hook in hooks.items() if key != handle.id}
    hooks.clear()  # torch calls them in the order in which they were put there, whatever move_to_end does
    hooks.update({handle.id: call, **others})


def dicts_on(tensor: Tensor) -> list[dict[int, Any]]:
    """The dictionaries of hooks that a tensor has by now."""
    found = (getattr(tensor, name, None) for _, name in _ON_TENSORS)
    return [each for each in found if each is not None]


def hooks_of_all_modules() -> Iterator[tuple[str, Any]]:
    """The hooks that are registered for all modules: the kind and the function of each."""
    return _in(torch_module, _ON_ALL_MODULES)


@contextmanager
def without_gradient_hooks(leaves: Iterable[Tensor]) -> Iterator[None]:
    """While it is entered, the hooks on the gradients of ``leaves`` are not called.

    The engine calls them wherever a gradient of theirs is asked for, also for a part of the whole.
    """
    taken = []
    try:
        for leaf in {id(leaf): leaf for leaf in leaves}.values():
            hooks = getattr(leaf, "_backward_hooks", None)
            if hooks:
                taken.append((hooks, list(hooks.items())))
                hooks.clear()
        yield
    finally:
        for hooks, items in taken:
            hooks.update(items)


def _in(holder: object, attributes: tuple[tuple[str, str], ...]) -> Iterator[tuple[str, Any]]:
    for kind, attribute in attributes:
        hooks = getattr(holder, attribute, None)
        for function in list(hooks.values()) if hooks else ():
            yield kind, function


def plain_function(hook: Any) -> Any:
    """The function inside partials, bound methods, and torch's own wrapper of hooks (``_WrappedHook``)."""
    while True:
        inner = hook.func if isinstance(hook, functools.partial) else None
        inner = inner or getattr(hook, "__func__", None)
        if inner is None and type(hook).__name__ == "_WrappedHook":
            inner = getattr(hook, "hook", None)
        if inner is None:
            return hook
        hook = inner
