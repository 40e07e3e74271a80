"""``save_on_cpu`` and ``save_on_disk``: a stash under the name of what it is for."""

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

__all__ = ["save_on_cpu", "save_on_disk"]


class save_on_cpu(saved_tensors_hooks):
    """Within it, saved tensors are kept in host memory and come back when backward needs them.

    As ``torch.autograd.graph.save_on_cpu``, and a thin face of :class:`~backstash.Stash`: each storage is
    copied once however many views of it are saved, the copies run beside compute, and a change in place
    before backward is an error, not a wrong gradient. A CPU tensor is in host memory already and stays in
    place.

    Args:
        pin_memory: as in torch's. An accelerator's tensors go to pinned memory either way, where the
            system grants it. It stays pinned for the next one, as in torch's, until the process ends.
        device_type: as in torch's; which accelerator there is, is found by itself.
        parameters: ``False`` leaves views of parameters where they are. Default ``True``. Parameters
            themselves always stay: the model holds them, so a copy would free nothing.

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
        self._stash = _shared(parameters) if torch.accelerator.is_available() else _made(parameters)
        super().__init__(self._stash.pack, self._stash.unpack)


def _made(parameters: bool) -> Stash:
    return Stash(host=None, min_bytes=0, policy=_to_host(parameters))


@functools.cache
def _shared(parameters: bool) -> Stash:
    """One for the process: programs make a context for each step, and what is pinned serves the next."""
    return _made(parameters)


def _to_host(parameters: bool) -> Policy | None:
    if not torch.accelerator.is_available():
        return None  # CPU tensors stay in place whatever is asked

    def choose(saved: SavedTensor) -> Action | None:
        return Action("host" if parameters or not saved.is_parameter else "keep")

    return choose


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
