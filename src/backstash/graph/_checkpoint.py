"""``torch.utils.checkpoint`` with a selective form that keeps outputs in the stash."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import Tensor
from torch.utils import checkpoint as _stock

from .._torch.checkpoints import CHECKPOINT_MODULE
from .._torch.hook_stack import Pair, current_pair
from .._torch.selective import KeptOutput, with_kept_outputs
from .._torch.versions import HeldVersion, Routed
from ..errors import UsageError
from ._faces import on_host

__all__ = ["checkpoint"]

_R = TypeVar("_R")
_RESPECT = "respect_saved_tensors_hooks"  # from torch 2.14 on


def checkpoint(
    fn: Callable[..., _R],
    *args: Any,
    context_fn: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
    | None = None,
    **options: Any,
) -> _R:
    """Call ``fn(*args)``, free what it saves, and run it again when backward needs it.

    It is ``torch.utils.checkpoint.checkpoint(use_reentrant=False)``. In torch, the outputs that the selective
    form keeps stay in memory, and hooks do not see them. Here they go to the stash around the call, like other
    saved tensors. The policies that offload do so, too; in torch's eager mode
    ``CheckpointPolicy.MUST_CPU_OFFLOAD`` recomputes.

    Args:
        fn: what to run. It must do the same each time. Its random numbers are restored for it.
        args: its arguments.
        context_fn: as in torch; ``functools.partial(create_selective_checkpoint_contexts, policy)`` keeps
            the outputs that ``policy`` chooses. ``MUST_SAVE`` and ``PREFER_SAVE``: in the stash, or in place
            without one. ``MUST_CPU_OFFLOAD`` and ``PREFER_CPU_OFFLOAD``: an accelerator's tensors in pinned
            host memory, in addition to the stash's budget; a CPU tensor as with ``MUST_SAVE``. Views and
            in-place writes are always run again. Contexts of your own, and those with
            ``allow_cache_entry_mutation=True``, are used as they are. Default ``None``: nothing is kept.
        options: torch's other options (``preserve_rng_state``, ``determinism_check``, ``early_stop``, ...)
            and keyword arguments of ``fn``.

    Raises:
        UsageError: ``use_reentrant=True``; or, from backward, ``fn`` did something else when it ran again.
        InplaceError: from backward, when an output that was kept in place was changed in place.

    A graph may be used several times (``retain_graph=True``). What is kept lives as long as the graph. In a
    function that ``torch.compile`` compiles, call torch's own ``checkpoint``: the compiler plans what is kept
    there.

    >>> import tempfile, torch
    >>> from torch.utils.checkpoint import create_selective_checkpoint_contexts as selective
    >>> from backstash import Stash
    >>> keep_products = functools.partial(selective, [torch.ops.aten.mm.default])
    >>> x = torch.ones(64, 64, requires_grad=True)
    >>> with tempfile.TemporaryDirectory() as directory, Stash(disk=directory, min_bytes=0) as stash:
    ...     y = checkpoint(lambda x: (x @ x).exp().sum(), x, context_fn=keep_products)
    ...     y.backward()
    >>> stash.stats().eligible_bytes  # the product; x is a leaf that requires a gradient, and stays
    16384
    """
    if options.pop("use_reentrant", False):
        raise UsageError("checkpoint(use_reentrant=True): allowed is False, the default here")
    if _RESPECT in _parameters(_stock.checkpoint):
        options.setdefault(_RESPECT, True)
    if context_fn is not None:
        keep = functools.partial(_keep, _pair_around())
        options["context_fn"] = lambda: with_kept_outputs(context_fn(), keep)
    result: _R = _stock.checkpoint(fn, *args, use_reentrant=False, **options)
    return result


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _pair_around() -> Pair | None:
    pair = current_pair()
    # Not the pair of another checkpoint around this one, which would free what this one has to keep.
    is_checkpoint = pair is not None and pair.pack.__module__ == CHECKPOINT_MODULE
    return None if is_checkpoint else pair


def _keep(pair: Pair | None, tensor: Tensor, is_offloaded: bool) -> KeptOutput:
    if is_offloaded and tensor.device.type != "cpu":
        host = on_host(parameters=True)
        return Routed(host.unpack, host.pack(tensor))
    return HeldVersion(tensor) if pair is None else Routed(pair.unpack, pair.pack(tensor))
