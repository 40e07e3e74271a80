"""Watch the gradients of a model while it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from .._text import clean, html_text
from ..errors import UsageError
from ._clock import BackwardClock
from ._compiled import warn_if_compiled
from ._distributed import Reduction, is_ddp, reduction_of
from ._handle import Handle
from ._names import Names, Target, select, select_tensors
from ._on_gradient import on_outputs
from ._paths import Site
from ._registration import Registration
from ._sinks import Sink, open_sink
from ._stats import Stats, StatsRow, fetch, row_of

__all__ = ["GradientReport", "GradientWatch", "watch_gradients"]


_REDUCED = {
    "none": "",
    "before": ", this process's before the reduction",
    "after": ", after the reduction",
    "unknown": ", before or after the reduction: unknown; give the DDP or FSDP module to find out",
}


@dataclass(frozen=True, slots=True)
class GradientReport:
    """Statistics of the gradients of one backward."""

    step: int
    """Which backward since the watch began; the first is 0."""
    per: str
    """The kind of a row: ``"parameter"``, ``"module"`` (gradient of its output) or ``"tensor"``."""
    reduction: Reduction
    """Measured ``"before"`` or ``"after"`` gradients were averaged over the processes; ``"none"`` for one
    process, ``"unknown"`` where several processes run and the model is not a DDP or FSDP module."""
    rows: dict[str, Stats]
    """Statistics by path, in the model's order; a parameter or module that got no gradient has no row."""
    total: Stats
    """Statistics of all rows together; its norm is the global gradient norm."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as data for JSON."""
        return {
            "step": self.step,
            "per": self.per,
            "reduction": self.reduction,
            "total": self.total.as_dict(),
            "rows": {name: stats.as_dict() for name, stats in self.rows.items()},
        }

    def scalars(self) -> Iterator[tuple[str, float]]:
        """Yield the report as curves: ``grad/<name>/<number>``, and ``grad/total/<number>``."""
        for name, stats in [("total", self.total), *self.rows.items()]:
            for number in ("norm", "min", "max", "zeros", "nan", "inf"):
                yield f"grad/{name or '(model)'}/{number}", float(getattr(stats, number))

    def _repr_html_(self) -> str:
        return html_text(str(self))

    def __str__(self) -> str:
        names = [clean(name) or "(model)" for name in self.rows]
        width = max(map(len, [*names, "total"]))
        lines = [f"gradients of backward {self.step}, per {self.per}{_REDUCED[self.reduction]}"]
        for name, stats in [*zip(names, self.rows.values(), strict=True), ("total", self.total)]:
            lines.append(f"  {name:{width}}  {stats}")
        return "\n".join(lines)


def watch_gradients(
    model: Target,
    *,
    every: int = 100,
    per: Literal["parameter", "module"] = "parameter",
    names: Names | None = None,
    to: Any = print,
) -> GradientWatch:
    """Report norms, extremes, the share of zeros, NaN and Inf of gradients while a model trains.

    The numbers are computed on the gradients' device and fetched together: a reported backward waits for the
    device once, and a backward that is not reported computes nothing and waits for nothing. The norm of the
    report's total is the global gradient norm.

    Of a parameter, ``.grad`` is measured after accumulation: over several backwards without ``zero_grad()``
    it is the sum so far. Under DDP (pass the DDP module) it is measured when backward has ended, which is
    after the reduction, or before it inside ``no_sync()``. Under FSDP2 it is measured after the reduction,
    and the numbers are those of the whole parameter: every process must then watch the same names. The
    report's ``reduction`` says which case holds. With a ``GradScaler`` the scaled gradients are measured.

    Args:
        model: a module, or a dict of tensors by name: ``{"y": y}``.
        every: report the first backward, and then every ``every``-th.
        per: ``"parameter"``, or ``"module"`` for the gradients of modules' outputs.
        names: which parameters or modules, by path or glob; modules also by class or callable. Default: all.
        to: where reports go: a callable, a path or an open file (JSON lines, appended), an object with
            ``add_scalar`` (a TensorBoard writer), ``None``. A :class:`GradientReport` is a table as ``str``.

    Returns:
        A :class:`GradientWatch` handle; ``.last`` is the newest report.

    Raises:
        NoMatchError: a name matches nothing; nothing is registered then.
        UsageError: ``every`` is not a positive int, or ``per`` or ``to`` is unknown.

    If ``to`` raises, the exception leaves ``backward()``, whose gradients are complete by then. At exit a
    :class:`HookWarning` names the parameters or modules that never got a gradient.

    >>> import torch
    >>> from backstash.hooks import watch_gradients
    >>> model = torch.nn.Linear(2, 1)
    >>> with watch_gradients(model, every=10, to=None) as watch:
    ...     model(torch.tensor([[3.0, 4.0]])).sum().backward()
    >>> watch.last.rows["weight"].norm, watch.last.total.count
    (5.0, 3)
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise UsageError(
            f"every={every!r} is not a number of backwards; allowed: an int, at least 1"
        )
    if per not in ("parameter", "module"):
        raise UsageError(f'per={per!r} is not known; allowed: "parameter", "module"')
    if per == "module" and not isinstance(model, nn.Module):
        raise UsageError('per="module" needs a module; tensors are watched with per="parameter"')
    registration = Registration("watch_gradients")
    with registration.all_or_none():
        watch = GradientWatch(registration, model, per, every, open_sink(to, registration))
        if per == "module" and isinstance(model, nn.Module):
            sites = select(model, names)
            for site in sites:
                watch._watch_output(site)
            warn_if_compiled(model, sites, owner="watch_gradients")
        else:
            for name, tensor in select_tensors(model, _tensor_names(names)).items():
                watch._watch_tensor(name, tensor)
    return watch


def _tensor_names(names: Names | None) -> list[str] | None:
    if names is None:
        return None
    given = [names] if isinstance(names, str) or not isinstance(names, Iterable) else list(names)
    found = [name for name in given if isinstance(name, str)]
    if len(found) < len(given):
        raise UsageError(
            'classes and callables select modules; name parameters, or use per="module"'
        )
    return found


class GradientWatch(Handle):
    """The handle that :func:`watch_gradients` returns."""

    __slots__ = (
        "_at_end",
        "_clock",
        "_emit",
        "_every",
        "_late",
        "_measuring",
        "_model",
        "_order",
        "_per",
        "_rows",
        "last",
    )

    def __init__(
        self, registration: Registration, model: object, per: str, every: int, sink: Sink
    ) -> None:
        super().__init__(registration)
        self._model = model
        self._per = per if isinstance(model, nn.Module) else "tensor"
        self._every = every
        self._emit = sink
        # DDP averages when all gradients are computed, so averaged ones can be read only at the end.
        self._at_end = self._per == "parameter" and is_ddp(model)
        self._order: list[str] = []
        self._rows: dict[str, list[StatsRow]] = {}
        self._late: dict[str, torch.Tensor] = {}
        self._measuring = False
        self._clock = BackwardClock(on_begin=self._begin, on_end=self._report)
        self.last: GradientReport | None = None
        """The newest report; ``None`` before the first."""

    @property
    def backwards(self) -> int:
        """How many backwards have begun."""
        return self._clock.backwards

    def _watch_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Hook a tensor: a leaf after accumulation, another as its gradient is computed."""
        self._order.append(name)
        if tensor.is_leaf:
            self._registration.accumulated(name, tensor, self._accumulated(name))
        else:
            self._registration.gradient(name, tensor, self._gradient(name))

    def _watch_output(self, site: Site) -> None:
        """Hook the gradients of what a module returns."""
        self._order.append(site.path)
        on_outputs(self._registration, site, self._gradient(site.path))

    def _gradient(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            self._clock.begin()
            if self._measuring:
                self._rows.setdefault(name, []).append(row_of(gradient))

        return hook

    def _accumulated(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(tensor: torch.Tensor) -> None:
            self._clock.begin()
            if self._measuring and self._at_end:
                self._late[name] = tensor
            elif self._measuring and tensor.grad is not None:
                # A second accumulation in one backward holds the first: the newest row is the whole.
                self._rows[name] = [row_of(tensor.grad)]

        return hook

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
        self._emit(self.last)
