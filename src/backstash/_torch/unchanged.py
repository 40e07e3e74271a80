"""Restore a model's buffers and the random number generators after a run that is only for looking."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from .module_parts import own_buffers, set_buffer
from .versions import version_of

__all__ = ["unchanged"]


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers and the states of PyTorch's generators at the end, also after an error."""
    buffers = [
        (module, name, buffer, buffer.detach().clone(), version_of(buffer))
        for module in model.modules()
        for name, buffer in own_buffers(module)
    ]
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for kind, indices in _devices_of(model).items():
            stack.enter_context(torch.random.fork_rng(sorted(indices), device_type=kind))
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, value, version in buffers:
                    if not _is_expanded(buffer):
                        # The version is raised only if the run raised it (batch normalization does not): a
                        # graph that has saved the buffer must still run backward.
                        target = buffer.data if version_of(buffer) == version else buffer
                        target.copy_(value)
                    set_buffer(module, name, buffer)


def _devices_of(model: nn.Module) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for each in (*model.parameters(), *model.buffers()):
        if each.device.type not in ("cpu", "meta"):
            found.setdefault(each.device.type, set()).add(each.device.index or 0)
    return found


def _is_expanded(tensor: Tensor) -> bool:
    """Whether several elements share memory, so that PyTorch writes to none of them."""
    if tensor.layout is not torch.strided:
        return False
    return any(
        size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
