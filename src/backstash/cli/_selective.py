"""Handle a script's own selective checkpoints: what they keep stays in place, as it does without ``backstash
run``."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch.utils import checkpoint as _stock

__all__ = ["SelectiveCheckpoints"]

_RESPECT = "respect_saved_tensors_hooks"  # from torch 2.14 on


class SelectiveCheckpoints:
    """Answer, for the script, a question that PyTorch 2.14 warns about and later versions require, until
    :meth:`remove`.

    If hooks are active around a call of ``torch.utils.checkpoint.checkpoint`` with a ``context_fn``, PyTorch
    wants to know whether the hooks get the tensors that the checkpoint keeps. The script does not know of the
    hooks and so does not say. This class answers no, which gives the behaviour without hooks. Before 2.14 that
    is the default, and nothing is replaced.
    """

    def __init__(self) -> None:
        self.calls = 0
        """Number of calls that were answered."""
        self._own: Any = _stock.checkpoint
        self._stand_in: Any = None
        if _RESPECT in inspect.signature(self._own).parameters:
            self._stand_in = functools.wraps(self._own)(lambda *a, **k: self._called(*a, **k))
            _stock.checkpoint = self._stand_in

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        is_asked = kwargs.get("use_reentrant") is False and kwargs.get("context_fn") is not None
        if is_asked and kwargs.get(_RESPECT) is None and not torch.compiler.is_compiling():
            self.calls += 1
            kwargs[_RESPECT] = False
        return self._own(*args, **kwargs)

    @property
    def note(self) -> str:
        """What was answered, for the summary; ``""`` for nothing."""
        if not self.calls:
            return ""
        return (
            f"what selective checkpointing keeps stayed in place, as without backstash ({self.calls:,} calls): "
            "backstash.graph.checkpoint(..., context_fn=...) gives it to the stash"
        )

    def remove(self) -> None:
        """Restore torch's own function. A second call does nothing."""
        if self._stand_in is not None and _stock.checkpoint is self._stand_in:
            _stock.checkpoint = self._own
