"""A module's own parameters, buffers and children, and the wrappers around modules.

The public methods (``named_parameters`` and the like) differ: wrappers such as FSDP override them, and they
omit the second name of a module or tensor. The dictionaries and names below exist in torch 2.11 to 2.15. The
dictionaries are those that ``nn.Module.__setattr__`` writes to; if one is missing, ``nn.Module`` raises
``AttributeError`` with its name.
"""

from __future__ import annotations

import inspect

from torch import Tensor, nn

__all__ = [
    "child_of",
    "has_forward",
    "inside",
    "is_compiled",
    "own_buffers",
    "own_children",
    "own_parameters",
    "set_buffer",
]

_WRAPPED_AS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_MODULE_WRAPPERS = ("DataParallel", "DistributedDataParallel", "AveragedModel")


def own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of ``module`` itself, by name, without those registered as ``None``."""
    return [(name, each) for name, each in module._parameters.items() if each is not None]


def own_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the buffers of ``module`` itself, by name, without those registered as ``None``."""
    return [(name, each) for name, each in module._buffers.items() if each is not None]


def own_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the direct children of ``module``, by name; a shared one under each of its names."""
    return [(name, each) for name, each in module._modules.items() if each is not None]


def set_buffer(module: nn.Module, name: str, buffer: Tensor) -> None:
    """Replace the buffer of an existing name, without calling the hooks on registration."""
    module._buffers[name] = buffer


def inside(module: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the name and the module inside a wrapper of ``torch.compile``, DDP, FSDP1 or checkpoint.

    Returns ``None`` if ``module`` is not a wrapper. A wrapper that torch renames in the future counts as a
    module.
    """
    names: tuple[str, ...] = _WRAPPED_AS
    if any(base.__name__ in _MODULE_WRAPPERS for base in type(module).__mro__):
        names = (*names, "module")
    for name in names:
        child = child_of(module, name)
        if child is not None:
            return name, child
    return None


def child_of(module: nn.Module, name: str) -> nn.Module | None:
    """Return the child of this name; ``None``: there is none. A scripted module keeps them in no ``dict``."""
    children = module._modules
    return children[name] if name in children else None


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called; containers such as ``ModuleList`` cannot."""
    # A scripted module's class raises an error where this is read as an attribute.
    own = inspect.getattr_static(type(module), "forward", None)
    return "forward" in vars(module) or own is not nn.Module.forward


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module`` is a result of ``torch.compile``, or was compiled in place.

    This depends on attribute names of torch; without them the answer is ``False``.
    """
    return (
        "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
    )
