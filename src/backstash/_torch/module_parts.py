"""What a module has of its own, and what wraps it, as ``nn.Module`` and its wrappers keep it.

The public methods (``named_parameters`` and the like) are not the same: wrappers such as FSDP override them,
and they leave out a module or tensor that has a second name. The dictionaries and names below are in torch
2.11 to 2.15; the dictionaries are what ``nn.Module``'s own ``__setattr__`` writes to, and where one is
missing, ``nn.Module`` raises ``AttributeError`` with its name.
"""

from __future__ import annotations

from torch import Tensor, nn

__all__ = [
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
    """The parameters of ``module`` itself, by name; without those registered as ``None``."""
    return [(name, each) for name, each in module._parameters.items() if each is not None]


def own_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers of ``module`` itself, by name; without those registered as ``None``."""
    return [(name, each) for name, each in module._buffers.items() if each is not None]


def own_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules right inside ``module``, by name, a shared one under each of its names."""
    return [(name, each) for name, each in module._modules.items() if each is not None]


def set_buffer(module: nn.Module, name: str, buffer: Tensor) -> None:
    """Register ``buffer`` under a name that is there, without the hooks on registration being called."""
    module._buffers[name] = buffer


def inside(module: nn.Module) -> tuple[str, nn.Module] | None:
    """The name and the module inside a wrapper: ``torch.compile``'s, DDP's, FSDP1's, checkpoint's.

    ``None`` for what is no wrapper; a wrapper that torch comes to name differently counts as a module.
    """
    names: tuple[str, ...] = _WRAPPED_AS
    if any(base.__name__ in _MODULE_WRAPPERS for base in type(module).__mro__):
        names = (*names, "module")
    for name in names:
        child = module._modules.get(name)
        if child is not None:
            return name, child
    return None


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile`` returned, or was compiled in place.

    By the names that torch gives to what it compiled; where those are missing, no.
    """
    return (
        "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
    )
