"""Print each call of a model as it happens."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import UsageError
from ._compiled import warn_if_compiled
from ._handle import Handle
from ._names import Names, select
from ._paths import depth_of
from ._registration import Registration
from ._sinks import Sink, open_sink
from ._stopwatch import ModuleCall, Stopwatch

__all__ = ["CallTrace", "ModuleCall", "trace"]


class CallTrace(Handle):
    """What :func:`trace` returns."""

    __slots__ = ("_sink",)

    def __init__(self, registration: Registration, sink: Sink) -> None:
        super().__init__(registration, each=False)
        self._sink = sink

    def _finish(self, error: BaseException | None) -> bool:
        self._sink.close()
        return False


def trace(
    model: nn.Module,
    *,
    to: Any = print,
    names: Names | None = None,
    depth: int | None = None,
    sync: bool = False,
) -> CallTrace:
    """Reports every call of every module when it returns: path, class, shapes, dtype, device, time, depth.

    What a module calls is reported before the module itself. A module that raises is reported too, with
    ``raised`` as its output: the first such line is where it happened.

    Args:
        model: the model.
        to: a callable given a :class:`ModuleCall` (a line as ``str``), a path or an open file (JSON lines),
            an object with ``add_scalar`` (the seconds as curves), ``None``.
        names: which modules, as in :func:`backstash.hooks.capture`. Default: all.
        depth: only modules at most this deep; 1 is the model and its children.
        sync: wait for the accelerator before and after each call, so that ``seconds`` holds its work.

    Returns:
        A handle.

    Raises:
        NoMatchError: a name matches nothing; nothing is registered then.
        UsageError: ``to`` or ``depth`` is not one of the above.

    >>> import torch
    >>> from backstash.hooks import trace
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
    >>> with trace(model, to=lambda call: print(call.path, call.kind, call.inputs, call.output)):
    ...     _ = model(torch.ones(5, 3))
    0 Linear (5, 3) (5, 2)
    1 ReLU (5, 2) (5, 2)
     Sequential (5, 3) (5, 2)
    """
    if depth is not None and (not isinstance(depth, int) or depth < 0):
        raise UsageError(f"depth={depth!r} is not a depth; allowed: an int, at least 0, or None")
    sites = [
        site
        for site in select(model, _any if names is None else names)
        if depth is None or depth_of(site.path) <= depth
    ]
    registration = Registration("trace")
    sink = open_sink(to)
    try:
        with registration.all_or_none():
            watch = Stopwatch(sink, sync=sync)
            for site in sites:
                watch.attach(registration, site)
            warn_if_compiled(model, sites, owner="trace")
    except BaseException:
        sink.close()
        raise
    return CallTrace(registration, sink)


def _any(path: str, module: nn.Module) -> bool:
    return True
