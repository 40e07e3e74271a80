"""The dictionaries in which torch stores hooks on modules, on tensors, and on all modules.

Torch has no call that lists hooks. The dictionaries below exist in torch 2.11 to 2.15. The hooks of a missing
dictionary are not listed.
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
    """Return the number of hooks on the tensor's gradient."""
    return len(getattr(tensor, "_backward_hooks", None) or ())


def hooks_of(holder: nn.Module | Tensor) -> Iterator[tuple[str, Any]]:
    """Yield the kind and the function of each hook on one module or tensor."""
    return _in(holder, _ON_MODULES if isinstance(holder, nn.Module) else _ON_TENSORS)


def call_before_hooks(node: Any, callback: Callable[[], None]) -> None:
    """Call ``callback()`` when ``node``, which is computing now, has finished, before its hooks are called.

    If the node has no hooks, or torch does not expose them, ``callback`` is not called.
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
    hooks.clear()  # torch calls them in order of insertion, which move_to_end does not change
    hooks.update({handle.id: call, **others})


def dicts_on(tensor: Tensor) -> list[dict[int, Any]]:
    """Return the dictionaries of hooks that a tensor has so far."""
    found = (getattr(tensor, name, None) for _, name in _ON_TENSORS)
    return [each for each in found if each is not None]


def hooks_of_all_modules() -> Iterator[tuple[str, Any]]:
    """Yield the kind and the function of each hook that is registered for all modules."""
    return _in(torch_module, _ON_ALL_MODULES)


@contextmanager
def without_gradient_hooks(leaves: Iterable[Tensor]) -> Iterator[None]:
    """A context in which the hooks on the gradients of ``leaves`` are not called.

    The engine calls them for any gradient of these leaves, even for a partial one.
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
    """Return the function inside partials, bound methods, and torch's ``_WrappedHook``."""
    while True:
        inner = hook.func if isinstance(hook, functools.partial) else None
        inner = inner or getattr(hook, "__func__", None)
        if inner is None and type(hook).__name__ == "_WrappedHook":
            inner = getattr(hook, "hook", None)
        if inner is None:
            return hook
        hook = inner
