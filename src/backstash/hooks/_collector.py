"""Gathers rows of statistics in one backward, and makes the report at its end."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ._clock import BackwardClock
from ._distributed import is_ddp, reduction_of
from ._on_gradient import on_outputs
from ._paths import Site
from ._registration import HookRecord, Make, Registration
from ._report import GradientReport
from ._sinks import Sink
from ._stats import Row, fetch, row_of

__all__ = ["Collector"]


class Collector:
    """The rows of the running backward, if it is one that is reported."""

    __slots__ = (
        "_at_end",
        "_clock",
        "_every",
        "_late",
        "_measuring",
        "_model",
        "_order",
        "_per",
        "_rows",
        "_sink",
        "last",
    )

    def __init__(self, model: object, per: str, every: int, sink: Sink) -> None:
        self._model = model
        self._per = per if isinstance(model, nn.Module) else "tensor"
        self._every = every
        self._sink = sink
        # DDP averages when all gradients are there, so what it averaged can be read only at the end.
        self._at_end = self._per == "parameter" and is_ddp(model)
        self._order: list[str] = []
        self._rows: dict[str, list[Row]] = {}
        self._late: dict[str, torch.Tensor] = {}
        self._measuring = False
        self._clock = BackwardClock(on_begin=self._begin, on_end=self._report)
        self.last: GradientReport | None = None
        """The newest report."""

    @property
    def backwards(self) -> int:
        """How many backwards have begun."""
        return self._clock.backwards

    def close(self) -> None:
        """Closes the sink."""
        self._sink.close()

    def watch(self, registration: Registration, name: str, tensor: torch.Tensor) -> None:
        """Hooks a tensor: after accumulation if it is a leaf, else as its gradient comes."""
        self._order.append(name)
        if tensor.is_leaf:
            registration.accumulated(name, tensor, self._accumulated(name))
        else:
            registration.gradient(name, tensor, self._gradient(name))

    def watch_output(self, registration: Registration, site: Site) -> None:
        """Hooks the gradients of what a module returns."""
        self._order.append(site.path)
        on_outputs(registration, site, self._gradient(site.path))

    def _gradient(self, name: str) -> Make:
        clock = self._clock

        def make(record: HookRecord) -> Callable[[torch.Tensor], None]:
            def hook(gradient: torch.Tensor) -> None:
                record.fired += 1
                if not clock.running:
                    clock.begin()
                if self._measuring:
                    self._rows.setdefault(name, []).append(row_of(gradient))

            return hook

        return make

    def _accumulated(self, name: str) -> Make:
        clock = self._clock

        def make(record: HookRecord) -> Callable[[torch.Tensor], None]:
            def hook(tensor: torch.Tensor) -> None:
                record.fired += 1
                if not clock.running:
                    clock.begin()
                if self._measuring:
                    self._take(name, tensor)

            return hook

        return make

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        if self._at_end:
            self._late[name] = tensor
        elif tensor.grad is not None:
            # A second accumulation in one backward holds the first: the newest row is the whole.
            self._rows[name] = [row_of(tensor.grad)]

    def _begin(self) -> None:
        self._rows = {}
        self._late = {}
        self._measuring = self._clock.backwards % self._every == 0

    def _report(self) -> None:
        if not self._measuring:
            return
        self._measuring = False
        for name, tensor in self._late.items():
            if tensor.grad is not None:
                self._rows[name] = [row_of(tensor.grad)]
        found, total = fetch(self._rows)
        self._rows, self._late = {}, {}
        self.last = GradientReport(
            step=self._clock.backwards - 1,
            per=self._per,
            reduction=reduction_of(self._model, at_end=self._at_end),
            rows={name: found[name] for name in self._order if name in found},
            total=total,
        )
        self._sink.emit(self.last)
