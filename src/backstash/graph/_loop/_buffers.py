"""A module's buffers, such as batch normalization's running statistics: a replay leaves them as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

__all__ = ["buffers_put_back"]


@contextmanager
def buffers_put_back() -> Iterator[None]:
    """What modules that are called inside do to their buffers is undone at the end."""
    seen: dict[int, tuple[Tensor, int, Tensor]] = {}

    def look(module: nn.Module, _: Any) -> None:
        for buffer in module.buffers(recurse=False):
            if id(buffer) not in seen and not buffer.is_inference():
                seen[id(buffer)] = (buffer, buffer._version, buffer.detach().clone())

    handle = register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()
        with torch.no_grad():
            for buffer, version, before in seen.values():
                if not torch.equal(buffer, before):
                    # Batch normalization saves its statistics and changes them without telling a version;
                    # they are put back alike. What told its version tells this one, too.
                    (buffer.data if buffer._version == version else buffer).copy_(before)
