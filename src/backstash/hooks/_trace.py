"""Print each call of a model as it happens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from .._text import clean
from .._torch.engine import in_backward
from ..errors import UsageError
from ._calls import OpenCalls
from ._compiled import warn_if_compiled
from ._handle import Handle
from ._names import Names, select
from ._paths import Site, depth_of
from ._registration import Registration
from ._sinks import Sink, open_sink
from ._tree import device_of, dtype_of, inputs_of, shapes_of

__all__ = ["CallTrace", "ModuleCall", "trace"]


def trace(
    model: nn.Module,
    *,
    to: Any = print,
    names: Names | None = None,
    depth: int | None = None,
    sync: bool = False,
) -> CallTrace:
    """Report every call of every module when it returns: path, class, shapes, dtype, device, time, depth.

    The modules that a module calls are reported before it. A module that raises is reported too, with
    ``raised`` as its output: the first such line is the module in which the exception began.

    Args:
        model: the model.
        to: a callable given a :class:`ModuleCall` (a line as ``str``), a path or an open file (JSON lines),
            an object with ``add_scalar`` (the seconds as curves), ``None``.
        names: which modules, as in :func:`backstash.hooks.capture`. Default: all.
        depth: only modules at most this deep; 1 is the model and its children.
        sync: wait for the accelerator before and after each call, so that ``seconds`` includes its work.

    Returns:
        A :class:`CallTrace` handle.

    Raises:
        NoMatchError: a name matches nothing; nothing is registered then.
        UsageError: ``to`` is none of the above, or ``depth`` is no int of at least 0.

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
    sites = [site for site in select(model, names) if depth is None or depth_of(site.path) <= depth]
    registration = Registration("trace")
    with registration.all_or_none():
        handle = CallTrace(registration, open_sink(to, registration), sync=sync)
        for site in sites:
            handle._attach(site)
        warn_if_compiled(model, sites, owner="trace")
    return handle


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of one module that has returned or raised."""

    step: int
    """Which call since the trace began; the first that returns is 0."""
    path: str
    """The module's path; the model itself is ``""``."""
    kind: str
    """The module's class."""
    depth: int
    """How many modules the path goes through; 0 for the model."""
    inputs: str
    """The shapes of the inputs."""
    output: str
    """The shapes of the output; ``raised`` if the module raised an exception, ``ended early`` if
    an activation checkpoint stopped recomputing inside it, as it had what it needed."""
    dtype: str
    """The dtype of the output's first tensor."""
    device: str
    """The device of the output's first tensor."""
    seconds: float
    """Seconds from call to return on the host's clock; ``sync=True`` includes the accelerator's work."""
    recomputed: bool
    """Whether an activation checkpoint called it again inside backward."""

    def as_dict(self) -> dict[str, Any]:
        """Return the call as data for JSON."""
        return asdict(self)

    def scalars(self) -> Iterator[tuple[str, float]]:
        """Yield the call as a curve: ``trace/<path>/seconds``."""
        yield f"trace/{self.path or '(model)'}/seconds", self.seconds

    def __str__(self) -> str:
        again = "  (recomputed)" if self.recomputed else ""
        return clean(
            f"{'  ' * self.depth}{self.path or '(model)'} {self.kind}: {self.inputs} -> {self.output}  "
            f"{self.dtype} {self.device}  {self.seconds * 1e3:.2f} ms{again}"
        )


class CallTrace(Handle):
    """The handle that :func:`trace` returns."""

    __slots__ = ("_count", "_emit", "_sync")

    def __init__(self, registration: Registration, sink: Sink, *, sync: bool) -> None:
        super().__init__(registration, each=False)
        self._emit = sink
        self._sync = sync and torch.accelerator.is_available()
        self._count = 0

    def _attach(self, site: Site) -> None:
        """Hook the begin and the end of a module's calls, an end by an exception too."""
        calls = OpenCalls[tuple[str, float]]()

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            # Described now: the module may change its inputs.
            inputs = inputs_of(args, kwargs)
            calls.begin((inputs, self._now()))

        def end(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            now = self._now()
            begun, failed = calls.end()
            if begun is not None:
                inputs, began = begun
                raised = failed and output is None
                self._report(site, inputs, output, seconds=now - began, raised=raised)

        self._registration.forward_pre(site, begin)
        self._registration.forward(site, end, always_call=True)

    def _now(self) -> float:
        if self._sync:
            torch.accelerator.synchronize()
        return time.perf_counter()

    def _report(
        self, site: Site, inputs: str, output: Any, *, seconds: float, raised: bool
    ) -> None:
        again = in_backward()
        # torch ends a recomputation by an exception as soon as it has what it needs.
        unfinished = "ended early" if again else "raised"
        report = ModuleCall(
            step=self._count,
            path=site.path,
            kind=type(site.module).__name__,
            depth=depth_of(site.path),
            inputs=inputs,
            output=unfinished if raised else shapes_of(output),
            dtype=dtype_of(output),
            device=device_of(output),
            seconds=seconds,
            recomputed=again,
        )
        self._count += 1
        self._emit(report)
