"""See gradients vanish or explode while a model trains."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import nn

from ..errors import UsageError
from ._collector import Collector
from ._compiled import warn_if_compiled
from ._handle import Handle
from ._names import Names, Target, select, select_tensors
from ._registration import Registration
from ._report import GradientReport
from ._sinks import open_sink

__all__ = ["GradientWatch", "watch_gradients"]


class GradientWatch(Handle):
    """What :func:`watch_gradients` returns."""

    __slots__ = ("_collector",)

    def __init__(self, registration: Registration, collector: Collector) -> None:
        super().__init__(registration)
        self._collector = collector

    @property
    def last(self) -> GradientReport | None:
        """The newest report; ``None`` before the first."""
        return self._collector.last

    @property
    def backwards(self) -> int:
        """How many backwards have begun."""
        return self._collector.backwards

    def _finish(self, error: BaseException | None) -> bool:
        self._collector.close()
        return False


def watch_gradients(
    model: Target,
    *,
    every: int = 100,
    per: Literal["parameter", "module"] = "parameter",
    names: Names | None = None,
    to: Any = print,
) -> GradientWatch:
    """Reports norms, extremes, the share of zeros, NaN and Inf of gradients as training runs.

    The numbers are computed on the gradients' device and fetched together: a report waits for the device
    once, and a backward that is not reported waits for nothing and computes nothing. The total's norm is
    the global gradient norm.

    Parameters are measured as their ``.grad`` stands after accumulation: over several backwards without
    ``zero_grad()`` it is the sum so far. Under DDP (give the DDP module) they are measured when backward
    has ended, after the reduction, or before it inside ``no_sync()``; under FSDP2 after it, and the numbers
    are those of the whole parameter: every process must then watch the same names. The report says which.
    With a ``GradScaler`` the numbers are of the scaled gradients.

    Args:
        model: a module, or a dict of tensors by name: ``{"y": y}``.
        every: report the first backward and then each ``every``-th.
        per: ``"parameter"``, or ``"module"`` for the gradients of modules' outputs.
        names: which, by path or glob; for ``per="module"`` also by class or callable. Default: all.
        to: where reports go: a callable, a path or an open file (JSON lines, appended), an object with
            ``add_scalar`` (a TensorBoard writer), ``None``. A :class:`GradientReport` is a table as ``str``.

    Returns:
        A handle; ``.last`` is the newest report.

    Raises:
        NoMatchError: a name matches nothing; nothing is registered then.
        UsageError: ``every`` is not a positive int, or ``per`` or ``to`` is unknown.

    If ``to`` raises, the exception leaves through ``backward()``, whose gradients are complete by then. At
    exit a :class:`HookWarning` names the parameters that never got a gradient.

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
    sink = open_sink(to)
    collector = Collector(model, per, every, sink)
    try:
        with registration.all_or_none():
            _register(registration, collector, model, per, names)
    except BaseException:
        sink.close()
        raise
    return GradientWatch(registration, collector)


def _register(
    registration: Registration, collector: Collector, model: Target, per: str, names: Names | None
) -> None:
    if per == "module" and isinstance(model, nn.Module):
        sites = select(model, _called if names is None else names)
        for site in sites:
            collector.watch_output(registration, site)
        warn_if_compiled(model, sites, owner="watch_gradients")
        return
    if not (names is None or isinstance(names, str) or _all_strings(names)):
        raise UsageError(
            'classes and callables select modules; name parameters, or use per="module"'
        )
    for name, tensor in select_tensors(model, names).items():  # type: ignore[arg-type]
        collector.watch(registration, name, tensor)


def _called(path: str, module: nn.Module) -> bool:
    return True


def _all_strings(names: Any) -> bool:
    return isinstance(names, Iterable) and all(isinstance(name, str) for name in names)
