"""A module's buffers, such as batch normalization's running statistics: a replay leaves them as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..._torch.module_parts import own_buffers, set_buffer

__all__ = ["Buffers", "buffers_put_back"]


class Buffers:
    """The buffers of the modules that are called while it is entered, as they were before."""

    __slots__ = ("_handle", "_seen")

    def __init__(self) -> None:
        self._seen: dict[tuple[int, str], tuple[nn.Module, str, Tensor, int, Tensor]] = {}

    def __enter__(self) -> None:
        self._handle = register_module_forward_pre_hook(self._look)

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _look(self, module: nn.Module, _: Any) -> None:
        for name, buffer in own_buffers(module):
            if buffer.is_inference() or (id(module), name) in self._seen:
                continue
            before = buffer.detach().clone()
            self._seen[id(module), name] = (module, name, buffer, buffer._version, before)

    def put_back(self) -> None:
        """Give each buffer the value that it had, and each module its own buffers again."""
        with torch.no_grad():
            for module, name, buffer, version, before in self._seen.values():
                set_buffer(module, name, buffer)
                if not torch.equal(buffer, before):
                    # Batch normalization saves its statistics and changes them without telling a version;
                    # they are put back alike. What told its version tells this one, too.
                    (buffer.data if buffer._version == version else buffer).copy_(before)
        self._seen.clear()


@contextmanager
def buffers_put_back() -> Iterator[None]:
    """What modules that are called inside do to their buffers is undone at the end."""
    buffers = Buffers()
    try:
        with buffers:
            yield
    finally:
        buffers.put_back()
