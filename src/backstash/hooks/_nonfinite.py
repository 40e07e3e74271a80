"""Find the module that made the first NaN or infinity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .._torch.engine import in_backward
from .._torch.module_parts import own_parameters
from ._clock import BackwardClock
from ._compiled import warn_if_compiled
from ._errors import NonFiniteError
from ._finding import Finding, Kind, ValuesSeen
from ._handle import Handle
from ._names import Names, select
from ._on_gradient import on_inputs, on_outputs
from ._paths import Site, join, unwrap
from ._registration import Registration
from ._sinks import Sink, open_sink

__all__ = ["NonFiniteSearch", "find_nonfinite"]


def find_nonfinite(
    model: nn.Module, *, names: Names | None = None, inf: bool = True, to: Any = None
) -> NonFiniteSearch:
    """Find the first module, in forward or backward, that made a NaN or an infinity.

    The inputs and outputs of every module, their gradients and the parameters' gradients are measured on the
    device, and fetched together when the model's forward returns and when backward ends. The finding has the
    statistics of the first value that is not finite and of the value before it, and says what made it: a
    module, its backward, operations between modules, the input, or the loss.

    It is meant for debugging: it reads every activation several times.

    Args:
        model: the model.
        names: which modules, as in :func:`backstash.hooks.capture`. Default: all.
        inf: whether infinities count as well as NaN. Use ``False`` where modules take masks of ``-inf``.
        to: ``None`` raises :class:`NonFiniteError` where forward or backward ends. Otherwise findings are
            reported and the program continues: a callable, a path or an open file (JSON lines), a
            TensorBoard writer. Use this with a ``GradScaler``, under which infinite gradients are normal.

    Returns:
        A :class:`NonFiniteSearch` handle; ``.found`` is the first :class:`Finding`.

    Raises:
        NoMatchError: a name matches nothing; nothing is registered then.
        NonFiniteError: out of the model's call, ``backward()`` or the end of the ``with`` block. When
            ``backward()`` raises it, the gradients are complete.

    Under FSDP2 each process checks its own shard of a parameter's gradient.

    >>> import torch
    >>> from torch import nn
    >>> from backstash.hooks import find_nonfinite
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> _ = nn.init.constant_(model[2].weight, float("inf"))
    >>> with find_nonfinite(model, to=lambda finding: print(finding.path, finding.made_by)):
    ...     _ = model(torch.ones(1, 2))
    2 this module
    """
    sites = select(model, names)
    registration = Registration("find_nonfinite")
    with registration.all_or_none():
        sink = None if to is None else open_sink(to, registration)
        search = NonFiniteSearch(registration, model, sink, count_inf=inf)
        for site in sites:
            search._attach(site)
        warn_if_compiled(model, sites, owner="find_nonfinite")
    return search


class NonFiniteSearch(Handle):
    """The handle that :func:`find_nonfinite` returns."""

    __slots__ = ("_backward", "_clock", "_emit", "_forward", "_root", "found")

    def __init__(
        self, registration: Registration, model: nn.Module, sink: Sink | None, *, count_inf: bool
    ) -> None:
        super().__init__(registration, each=False)
        self._root = unwrap(model)
        self._emit = sink
        self._forward = ValuesSeen("forward", count_inf=count_inf)
        self._backward = ValuesSeen("backward", count_inf=count_inf)
        self._clock = BackwardClock(
            on_begin=self._backward.clear, on_end=lambda: self._judge(self._backward)
        )
        self.found: Finding | None = None
        """The first finding; ``None`` while everything was finite."""

    def _attach(self, site: Site) -> None:
        """Hook one module, for forward and backward."""
        registration = self._registration
        on_inputs(registration, site, self._gradient("input gradient", site))
        registration.forward_pre(site, self._begin(site))
        on_outputs(registration, site, self._gradient("output gradient", site))
        registration.forward(site, self._end(site))
        for name, parameter in own_parameters(site.module):
            if parameter.requires_grad:
                path = join(site.path, name)
                registration.accumulated(path, parameter, self._accumulated(site))

    def _finish(self, error: BaseException | None) -> bool:
        # The values of a forward that raised, or of modules called without the whole model.
        self._judge(self._forward, raising=error is None)
        return False

    def _judge(self, timeline: ValuesSeen, *, raising: bool = True) -> None:
        finding = timeline.judge()
        if finding is None:
            return
        self.found = self.found or finding
        if self._emit is not None:
            self._emit(finding)
        elif raising:
            raise NonFiniteError(str(finding))

    def _begin(self, site: Site) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if in_backward():
                return
            if site.module is self._root:
                self._forward.clear()
            self._forward.see("input", site, (args, kwargs))

        return hook

    def _end(self, site: Site) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if in_backward():
                return
            self._forward.see("output", site, output)
            if site.module is self._root:
                self._judge(self._forward)

        return hook

    def _gradient(self, kind: Kind, site: Site) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            self._clock.begin()
            self._backward.see(kind, site, gradient)

        return hook

    def _accumulated(self, site: Site) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            self._clock.begin()
            if parameter.grad is not None:
                self._backward.see("parameter gradient", site, parameter.grad)

        return hook
