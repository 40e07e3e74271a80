"""``save_on_cpu`` and ``save_on_disk``: a ``Stash`` that is configured for one purpose."""

from __future__ import annotations

import functools
import math
import os
import tempfile
from typing import Any

import torch

from ..policy import Action, Policy, SavedTensor
from ..stash import Stash
from ..stores import Disk
from ._hooks import saved_tensors_hooks

__all__ = ["on_host", "save_on_cpu", "save_on_disk"]


class save_on_cpu(saved_tensors_hooks):
    """A context in which saved tensors go to host memory and come back when backward needs them.

    It does what ``torch.autograd.graph.save_on_cpu`` does, by a :class:`~backstash.Stash`. It copies each
    storage once, however many views of it are saved, while the device computes. A change in place before
    backward raises an error and does not give a wrong gradient. A CPU tensor is in host memory already and
    stays in place.

    Args:
        pin_memory: torch's argument, without effect: an accelerator's tensors always go to pinned memory,
            where the system grants it. The memory stays pinned for the next context, as torch's does, until
            the process ends. Default ``False``.
        device_type: torch's argument, without effect: tensors of every accelerator go to host memory.
        parameters: whether views of parameters go too. Default ``True``. Parameters themselves always stay
            in place: the model holds them, so a copy would free nothing.

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
        # Without an accelerator all tensors stay in place, so that no policy is needed.
        has_device = torch.accelerator.is_available()
        self._stash = on_host(parameters) if has_device else Stash(host=None, min_bytes=0)
        super().__init__(self._stash.pack, self._stash.unpack)


@functools.cache
def on_host(parameters: bool) -> Stash:
    """Return the one stash of the process for such contexts, so that they share pinned memory."""

    def choose(saved: SavedTensor) -> Action | None:
        return Action("host" if parameters or not saved.is_parameter else "keep")

    return Stash(host=None, min_bytes=0, policy=choose)


def save_on_disk(
    directory: str | os.PathLike[str] | Disk | None = None,
    *,
    min_bytes: int | str = 0,
    min_elements: int = 0,
    **options: Any,
) -> Stash:
    """Return a stash that moves all saved tensors that can be moved to disk: a context for a forward pass.

    Args:
        directory: the directory of its unnamed file; ``None`` (default) is the system's temporary directory.
            A :class:`~backstash.Disk` sets limits, checksums and threads too.
        min_bytes: tensors with a smaller storage stay in place; an int of bytes or ``"64KiB"``. Default 0.
        min_elements: tensors of fewer elements stay in place. Default 0.
        options: any other argument of :class:`~backstash.Stash`.

    Raises:
        SizeError: a size is not an int of bytes or a string with a unit.
        StashIOError: no file can be made in the directory; nothing is left there.

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
