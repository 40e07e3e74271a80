"""Which parameters FSDP2 gathers for a forward, and from which ones.

``fully_shard`` replaces the parameters of a module by DTensors, and while the module runs, by gathered ones,
which no optimizer has.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from .modules import running_modules

__all__ = ["UNKNOWN", "is_sharding", "source_of"]

UNKNOWN = object()
"""In place of a source: this torch does not show what is gathered from what."""
# By the identity of a parameter: it, and FSDP2's object for it, which has the sharded parameter of now.
_sources: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Any] | None]] = {}


def is_sharding() -> bool:
    """Whether ``fully_shard`` was called: it makes a class for each class of modules that it is given."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and bool(fsdp.FSDPModule.__subclasses__())


def source_of(parameter: Tensor) -> Any:
    """Return the DTensor that ``parameter``, which a running module reads, is gathered from; ``None`` if it is
    not gathered, or :data:`UNKNOWN`."""
    known = _sources.get(id(parameter))
    if known is None or known[0]() is not parameter:
        running = running_modules()
        if not running:
            return UNKNOWN
        try:
            for gathered, of in _pairs(running[0]):
                _sources[id(gathered)] = weakref.ref(gathered), weakref.ref(of)
        except (AttributeError, TypeError):
            return UNKNOWN
        known = _sources.get(id(parameter))
        if known is None or known[0]() is not parameter:
            known = _sources[id(parameter)] = weakref.ref(parameter), None
    if known[1] is None:
        return None
    # The program may have replaced the sharded parameter, as loading a state does.
    return getattr(known[1](), "sharded_param", UNKNOWN)


def _pairs(root: nn.Module) -> Iterator[tuple[Tensor, Any]]:
    """Yield what was gathered for modules within ``root``, with FSDP2's object for it."""
    kind = sys.modules["torch.distributed.fsdp"].FSDPModule
    for module in root.modules():
        if isinstance(module, kind):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # in older versions there is one
                groups = [each for each in [state._fsdp_param_group] if each is not None]
            for group in groups:
                for each in group.fsdp_params:
                    if (gathered := getattr(each, "_unsharded_param", None)) is not None:
                        yield gathered, each
