"""``save_on_cpu`` and ``save_on_disk``: a stash under the name of what it is for."""

from __future__ import annotations

import math
import os
import tempfile
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu as stock_save_on_cpu

from ..policy import Action, Policy, SavedTensor
from ..stash import Stash
from ..stores import Disk
from ._hooks import saved_tensors_hooks

__all__ = ["InPlace", "save_on_cpu", "save_on_disk"]


class save_on_cpu(saved_tensors_hooks):
    """Within it, saved tensors are kept in host memory and come back when backward needs them.

    As ``torch.autograd.graph.save_on_cpu``, with a check: a CPU tensor is there already and is left in
    place by a stash, so that a change in place before backward is an error, not a wrong gradient. An
    accelerator's tensors are copied by torch's own hooks.

    Args:
        pin_memory: copy an accelerator's tensors to pinned memory, without waiting. Default ``False``.
        device_type: the accelerator whose pinned memory is used. Default ``"cuda"``.
        parameters: ``False`` leaves parameters, and views of them, where they are. Default ``True``.

    Raises:
        InplaceError: from backward, when a tensor that stayed in place was changed in place.
        RuntimeError: from ``__enter__``, where hooks are disabled.

    >>> x = torch.ones(2, requires_grad=True)
    >>> with save_on_cpu():
    ...     y = (x * 2).exp()
    >>> _ = y.detach().zero_()  # exp saved y
    >>> y.sum().backward()
    Traceback (most recent call last):
        ...
    backstash.errors.InplaceError: one of the variables needed for gradient computation has been ...
    """

    def __init__(
        self, pin_memory: bool = False, device_type: str = "cuda", *, parameters: bool = True
    ) -> None:
        self._in_place = Stash(min_bytes=0)
        self._copied = stock_save_on_cpu(pin_memory, device_type)
        self._parameters = parameters
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.is_cpu or (not self._parameters and _is_parameter(tensor)):
            return InPlace(self._in_place.pack(tensor))
        return self._copied.pack_hook(tensor)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, InPlace):
            return self._in_place.unpack(packed.value)
        return self._copied.unpack_hook(packed)


class InPlace:
    """What the stash packed, told apart from what torch's own hooks packed."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    @property
    def packed_inside(self) -> object:
        """What the stash packed, for whoever looks without unpacking."""
        return self.value


def _is_parameter(tensor: Tensor) -> bool:
    return any(isinstance(each, torch.nn.Parameter) for each in (tensor, tensor._base))


def save_on_disk(
    directory: str | os.PathLike[str] | Disk | None = None,
    *,
    min_bytes: int | str = 0,
    min_elements: int = 0,
    **options: Any,
) -> Stash:
    """A stash that holds everything eligible on disk, for use as a context around a forward pass.

    Args:
        directory: where its unnamed file is made; ``None`` (default) is the system's temporary
            directory. A :class:`~backstash.Disk` may be given for more than a place.
        min_bytes: smaller tensors stay where they are; an int or ``"64KiB"``. Default 0.
        min_elements: tensors of fewer elements stay where they are. Default 0.
        options: any other argument of :class:`~backstash.Stash`.

    Raises:
        SizeError: a size that cannot be read.
        StashIOError: the directory cannot hold a file.

    >>> x = torch.ones(1000, requires_grad=True)
    >>> with save_on_disk(min_elements=1000) as stash:
    ...     y = x.exp().sum()
    ...     z = x[:10].exp().sum()
    >>> y.backward()
    >>> stash.stats().written_bytes
    4000
    """
    place = tempfile.gettempdir() if directory is None else directory
    policy: Policy | None = options.pop("policy", None)
    if min_elements:
        policy = _at_least(min_elements, policy)
    return Stash(disk=place, min_bytes=min_bytes, policy=policy, **options)


def _at_least(elements: int, policy: Policy | None) -> Policy:
    def choose(saved: SavedTensor) -> Action | None:
        if math.prod(saved.shape) < elements:
            return Action("keep")
        return policy(saved) if policy is not None else None

    return choose
