"""The hooks of the search for a NaN, and when it is judged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ._autograd import in_backward
from ._clock import BackwardClock
from ._errors import NonFiniteError
from ._finding import Finding, Kind
from ._on_gradient import on_inputs, on_outputs
from ._paths import Site, unwrap
from ._registration import HookRecord, Make, Registration
from ._sinks import Sink
from ._timeline import Timeline

__all__ = ["Search"]


class Search:
    """Watches modules, and judges when the model's forward returns and when backward ends."""

    __slots__ = ("_backward", "_clock", "_forward", "_root", "_sink", "found")

    def __init__(self, model: nn.Module, sink: Sink | None, *, count_inf: bool) -> None:
        self._root = unwrap(model)
        self._sink = sink
        self._forward = Timeline("forward", count_inf=count_inf)
        self._backward = Timeline("backward", count_inf=count_inf)
        self._clock = BackwardClock(
            on_begin=self._backward.clear, on_end=lambda: self._judge(self._backward)
        )
        self.found: Finding | None = None
        """The first finding."""

    def attach(self, registration: Registration, site: Site) -> None:
        """Watches one module, forward and backward."""
        on_inputs(registration, site, self._gradient("input gradient", site))
        registration.forward_pre(site, self._begin(site))
        on_outputs(registration, site, self._gradient("output gradient", site))
        registration.forward(site, self._end(site))
        for name, parameter in site.module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                path = f"{site.path}.{name}" if site.path else name
                registration.accumulated(path, parameter, self._accumulated(site))

    def end(self, *, raising: bool) -> None:
        """Judges what is left, of a forward that did not return or of modules called by themselves."""
        try:
            self._judge(self._forward, raising=raising)
        finally:
            if self._sink is not None:
                self._sink.close()

    def _judge(self, timeline: Timeline, *, raising: bool = True) -> None:
        finding = timeline.judge()
        if finding is None:
            return
        self.found = self.found or finding
        if self._sink is not None:
            self._sink.emit(finding)
        elif raising:
            raise NonFiniteError(str(finding))

    def _begin(self, site: Site) -> Make:
        def make(record: HookRecord) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
                record.fired += 1
                if in_backward():
                    return
                if site.module is self._root:
                    self._forward.clear()
                self._forward.see("input", site, (args, kwargs))

            return hook

        return make

    def _end(self, site: Site) -> Make:
        def make(record: HookRecord) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                record.fired += 1
                if in_backward():
                    return
                self._forward.see("output", site, output)
                if site.module is self._root:
                    self._judge(self._forward)

            return hook

        return make

    def _gradient(self, kind: Kind, site: Site) -> Make:
        def make(record: HookRecord) -> Callable[[torch.Tensor], None]:
            def hook(gradient: torch.Tensor) -> None:
                record.fired += 1
                if not self._clock.running:
                    self._clock.begin()
                self._backward.see(kind, site, gradient)

            return hook

        return make

    def _accumulated(self, site: Site) -> Make:
        def make(record: HookRecord) -> Callable[[torch.Tensor], None]:
            def hook(parameter: torch.Tensor) -> None:
                record.fired += 1
                if not self._clock.running:
                    self._clock.begin()
                if parameter.grad is not None:
                    self._backward.see("parameter gradient", site, parameter.grad)

            return hook

        return make
