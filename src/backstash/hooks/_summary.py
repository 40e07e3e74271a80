"""A model as a table: what each module takes, returns, holds, and saves for backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .._text import clean
from .._torch.module_parts import is_compiled, own_parameters
from .._torch.storages import storage_identity, storage_of
from .._torch.unchanged import unchanged
from ..errors import UsageError
from ..units import format_bytes
from ._paths import Site, depth_of, walk
from ._registration import Registration
from ._tree import inputs_of, shapes_of

__all__ = ["Summary", "SummaryRow", "summary"]


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """One module."""

    path: str
    """The module's path; the model itself is ``""``."""
    kind: str
    """The module's class."""
    depth: int
    """How many modules the path goes through; 0 for the model."""
    calls: int
    """How often one forward calls it."""
    inputs: str
    """The shapes of its inputs, in the last call."""
    output: str
    """The shapes of its output, in the last call."""
    parameters: int
    """Elements of its own parameters, without its children's."""
    trainable: int
    """Elements of its own parameters that require a gradient."""
    saved_bytes: int
    """Bytes that its own operations save for backward, without its children's; each storage is counted
    once, where it is first saved; parameters and buffers are not counted."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A model's modules in the order of ``named_modules()``; ``str()`` is the table."""

    rows: tuple[SummaryRow, ...]
    """Every module, once."""

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(row.parameters for row in self.rows)

    @property
    def trainable(self) -> int:
        """Elements of all parameters that require a gradient."""
        return sum(row.trainable for row in self.rows)

    @property
    def saved_bytes(self) -> int:
        """Bytes saved for backward by one forward."""
        return sum(row.saved_bytes for row in self.rows)

    def __str__(self) -> str:
        head = ("module", "class", "input", "output", "parameters", "saved")
        body = [_cells(row) for row in self.rows]
        total = ("total", "", "", "", f"{self.parameters:,}", format_bytes(self.saved_bytes))
        widths = [max(map(len, column)) for column in zip(head, *body, total, strict=True)]
        rule = "  ".join("-" * width for width in widths)
        lines = [_line(head, widths), rule, *(_line(cells, widths) for cells in body), rule]
        return "\n".join([*lines, _line(total, widths)])


def _cells(row: SummaryRow) -> tuple[str, ...]:
    name = "  " * row.depth + (clean(row.path.rpartition(".")[2]) or "(model)")
    times = f" x{row.calls}" if row.calls != 1 else ""
    saved = format_bytes(row.saved_bytes) if row.saved_bytes else ""
    count = f"{row.parameters:,}" if row.parameters else ""
    return (name, row.kind + times, row.inputs, row.output, count, saved)


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    pairs = list(zip(cells, widths, strict=True))
    left = [cell.ljust(width) for cell, width in pairs[:4]]
    return "  ".join([*left, *(cell.rjust(width) for cell, width in pairs[4:])]).rstrip()


def summary(model: nn.Module, /, *args: Any, **kwargs: Any) -> Summary:
    """Run one forward and return each module's shapes, parameters and bytes saved for backward.

    The model runs in the mode it is in (``train()`` or ``eval()``), with gradients enabled, so that it saves
    what a training step saves. Buffers and random number generators are restored afterwards.

    Args:
        model: the model.
        *args: its inputs.
        **kwargs: its keyword inputs.

    Returns:
        A :class:`Summary`: ``.rows``, ``.parameters``, ``.saved_bytes``; ``print`` it for the table. Saved
        bytes are counted once per storage, for the innermost module that first saves it. Parameters, buffers
        and what is saved inside an activation checkpoint are not counted.

    Raises:
        UsageError: the model is compiled, and hooks cannot see its modules.

    An error in the model propagates and leaves no hook.

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
    forward = _MeasuredForward(model)
    registration = Registration("summary")
    try:
        forward.attach(registration)
        hooks = torch.autograd.graph.saved_tensors_hooks(forward.pack, lambda tensor: tensor)
        with torch.enable_grad(), unchanged(model), hooks:
            model(*args, **kwargs)
    finally:
        registration.remove()
    return forward.summary()


@dataclass(slots=True)
class _Measured:
    """The part of a row that a forward shows."""

    calls: int = 0
    inputs: str = "-"
    output: str = "-"
    saved_bytes: int = 0


class _MeasuredForward:
    """Collects what each module takes, returns and saves in one forward.

    Saved storages are counted once each, for the module that was running when the first was saved. The
    storages of parameters and buffers are not counted: they exist without backward too. Nothing is counted
    inside a region with saved-tensor hooks of its own (activation checkpointing).
    """

    def __init__(self, model: nn.Module) -> None:
        if any(is_compiled(module) for module in model.modules()):
            raise UsageError(
                "summary: the model is compiled, and a compiled graph hides its modules; give the model that "
                "was given to torch.compile"
            )
        self._sites = list({id(s.module): s for _, s in reversed(list(walk(model)))}.values())[::-1]
        self._measured: dict[str, _Measured] = defaultdict(_Measured)
        self._running: list[str] = []  # the paths of the modules that run now, innermost last
        # Storages are held until the count ends: the identity of a freed one could be used again.
        self._seen: dict[int, torch.UntypedStorage] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            self._count(tensor)

    def attach(self, registration: Registration) -> None:
        """Hook every module that can be called."""
        for site in self._sites:
            if site.callable:
                registration.forward_pre(site, self._begin(site.path))
                registration.forward(site, self._end(site.path), always_call=True)

    def _begin(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._measured[path].calls += 1
            self._measured[path].inputs = inputs_of(args, kwargs)
            self._running.append(path)

        return hook

    def _end(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._running[-1:] == [path]:  # else another pre-hook raised before ours
                self._measured[path].output = shapes_of(output)
                self._running.pop()

        return hook

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that is saved."""
        path = self._running[-1] if self._running else ""
        self._measured[path].saved_bytes += self._count(tensor)
        # Not the tensor itself: one that is its own node's output would keep itself alive.
        return tensor.detach()

    def _count(self, tensor: torch.Tensor) -> int:
        """Return the bytes of a tensor's storage; 0 if it was counted before."""
        storage = storage_of(tensor)
        if storage is None or storage_identity(storage) in self._seen:
            return 0
        self._seen[storage_identity(storage)] = storage
        return storage.nbytes()

    def summary(self) -> Summary:
        """Return the summary of the forward that ran."""
        seen: set[int] = set()
        return Summary(tuple(self._row(site, seen) for site in self._sites))

    def _row(self, site: Site, seen: set[int]) -> SummaryRow:
        own = {id(p): p for _, p in own_parameters(site.module) if id(p) not in seen}
        seen.update(own)
        measured = self._measured[site.path]
        return SummaryRow(
            path=site.path,
            kind=type(site.module).__name__,
            depth=depth_of(site.path),
            calls=measured.calls,
            inputs=measured.inputs,
            output=measured.output,
            parameters=sum(p.numel() for p in own.values()),
            trainable=sum(p.numel() for p in own.values() if p.requires_grad),
            saved_bytes=measured.saved_bytes,
        )
