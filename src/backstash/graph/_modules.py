"""Modules that run another module and save its tensors to host memory or to disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from ._faces import save_on_cpu, save_on_disk

__all__ = ["SaveOnCpu", "SaveOnDisk"]

_INNER = "module."


class _Saving(nn.Module):
    """Runs ``module`` under a context. State-dict keys are those of ``module``, and so are the names that it
    returns from ``named_parameters`` and ``named_buffers``."""

    def __init__(self, module: nn.Module, context: AbstractContextManager[Any]) -> None:
        super().__init__()
        self.module = module
        self.context = context
        register: Any = self.register_state_dict_post_hook
        register(_without_inner)
        register = self.register_load_state_dict_pre_hook
        register(_with_inner)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``module``; what its forward saves goes through the context."""
        with self.context:
            return self.module(*args, **kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the names and parameters of ``module``."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Return the names and buffers of ``module``."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def __getitem__(self, index: Any) -> Any:
        return self.module[index]  # type: ignore[index]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class SaveOnCpu(_Saving):
    """A module that runs ``module`` under :class:`save_on_cpu`.

    Args:
        module: any module; its state-dict keys do not change. Where a module around it lists parameters, their
            names have ``module.`` in them.
        options: the arguments of :class:`save_on_cpu`.

    >>> model = nn.Sequential(nn.Linear(2, 2), SaveOnCpu(nn.Linear(2, 2), pin_memory=True))
    >>> list(model.state_dict())
    ['0.weight', '0.bias', '1.weight', '1.bias']
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, save_on_cpu(**options))


class SaveOnDisk(_Saving):
    """A module that runs ``module`` under :func:`save_on_disk`. Copies and replicas share its stash.

    Args:
        module: any module; its state-dict keys do not change. Where a module around it lists parameters, their
            names have ``module.`` in them.
        directory: the directory of the stash's file. Default ``None``: the system's temporary directory.
        options: the other arguments of :func:`save_on_disk`: ``min_bytes``, ``min_elements``, ….

    Raises:
        SizeError, StashIOError: as :func:`save_on_disk`.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 2), SaveOnDisk(nn.Tanh(), min_elements=1000))
    >>> model(torch.ones(500, 2)).sum().backward()
    >>> model[1].context.stats().written_bytes
    4000
    """

    def __init__(
        self,
        module: nn.Module,
        directory: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(module, save_on_disk(directory, **options))


def _without_inner(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for key in [key for key in state if key.startswith(prefix + _INNER)]:
        state[prefix + key[len(prefix + _INNER) :]] = state.pop(key)


def _with_inner(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *rest: Any
) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        state[prefix + _INNER + key[len(prefix) :]] = state.pop(key)
