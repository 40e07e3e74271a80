"""A model as a table: what each module takes, gives, holds, and saves for backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from ._paths import Site, depth_of, walk
from ._registration import HookRecord, Make, Registration
from ._saved import SavedBytes
from ._state import unchanged
from ._table import Summary, SummaryRow
from ._tree import inputs_of, shapes_of

__all__ = ["summary"]


def summary(model: nn.Module, /, *args: Any, **kwargs: Any) -> Summary:
    """Runs one forward and tells, module by module, shapes, parameters and the bytes saved for backward.

    The model runs in the mode it is in (``train()`` or ``eval()``), with gradients enabled, so that what is
    saved is what a training step saves. Buffers and the random number generators are put back after it.

    Args:
        model: the model.
        *args: its inputs.
        **kwargs: its keyword inputs.

    Returns:
        A :class:`Summary`: ``.rows``, ``.parameters``, ``.saved_bytes``; ``print`` it for the table. Saved
        bytes are counted once per storage, for the innermost module that first saves it; parameters, buffers
        and what activation checkpointing hides are not in them.

    Raises:
        UsageError: the model is compiled: its modules cannot be seen.

    An error in the model passes through, and leaves no hook.

    >>> import torch
    >>> from backstash.hooks import summary
    >>> model = torch.nn.Sequential(torch.nn.Linear(256, 64), torch.nn.ReLU())
    >>> print(summary(model, torch.ones(16, 256)))
    module   class       input      output    parameters     saved
    -------  ----------  ---------  --------  ----------  --------
    (model)  Sequential  (16, 256)  (16, 64)
      0      Linear      (16, 256)  (16, 64)      16,448    16 KiB
      1      ReLU        (16, 64)   (16, 64)              4.00 KiB
    -------  ----------  ---------  --------  ----------  --------
    total                                         16,448    20 KiB
    """
    rows = _Rows(model)
    registration = Registration("summary")
    try:
        rows.attach(registration)
        with torch.enable_grad(), unchanged(model), rows.saved.counting():
            model(*args, **kwargs)
    finally:
        registration.remove()
    return rows.made()


class _Rows:
    """What the modules took and gave."""

    def __init__(self, model: nn.Module) -> None:
        if any("_orig_mod" in m._modules or m._compiled_call_impl for m in model.modules()):
            raise UsageError(
                "summary: the model is compiled, and a compiled graph hides its modules; give the model that "
                "was given to torch.compile"
            )
        self._sites = list({id(s.module): s for _, s in reversed(list(walk(model)))}.values())[::-1]
        self._calls: dict[str, int] = {}
        self._inputs: dict[str, str] = {}
        self._outputs: dict[str, str] = {}
        self.saved = SavedBytes((*model.parameters(), *model.buffers()))

    def attach(self, registration: Registration) -> None:
        """Hooks every module that can be called."""
        for site in self._sites:
            if site.callable:
                registration.forward_pre(site, self._begin(site.path))
                registration.forward(site, self._end(site.path), always_call=True)

    def _begin(self, path: str) -> Make:
        def make(record: HookRecord) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
                record.fired += 1
                self._calls[path] = self._calls.get(path, 0) + 1
                self._inputs[path] = inputs_of(args, kwargs)
                self.saved.running.append(path)

            return hook

        return make

    def _end(self, path: str) -> Make:
        def make(record: HookRecord) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                record.fired += 1
                self._outputs[path] = shapes_of(output)
                self.saved.running.pop()

            return hook

        return make

    def made(self) -> Summary:
        """The facts."""
        seen: set[int] = set()
        return Summary(tuple(self._row(site, seen) for site in self._sites))

    def _row(self, site: Site, seen: set[int]) -> SummaryRow:
        own = [p for p in site.module._parameters.values() if p is not None and id(p) not in seen]
        own = list({id(p): p for p in own}.values())
        seen.update(map(id, own))
        return SummaryRow(
            path=site.path,
            kind=type(site.module).__name__,
            depth=depth_of(site.path),
            calls=self._calls.get(site.path, 0),
            inputs=self._inputs.get(site.path, "-"),
            output=self._outputs.get(site.path, "-"),
            parameters=sum(p.numel() for p in own),
            trainable=sum(p.numel() for p in own if p.requires_grad),
            saved_bytes=self.saved.by_path.get(site.path, 0),
        )
