"""What a forward changes besides its output: buffers and random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["unchanged"]


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Puts the model's buffers and the random number generators back at the end, also after an error."""
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    types = {t.device.type for t in (*model.parameters(), *model.buffers())} - {"cpu", "meta"}
    devices = {t.device for t in (*model.parameters(), *model.buffers()) if t.device.type in types}
    kind = next(iter(types), "cuda")
    indices = [device.index or 0 for device in devices if device.type == kind]
    with torch.random.fork_rng(indices, device_type=kind):
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, value in buffers:
                    buffer.copy_(value)
                    module._buffers[name] = buffer
