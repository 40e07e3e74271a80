"""Where reports go: a callable, a file of JSON lines, or a TensorBoard writer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ..errors import UsageError
from ._registration import Registration

__all__ = ["Report", "Sink", "open_sink"]


class Report(Protocol):
    """The methods that a sink needs of a report."""

    @property
    def step(self) -> int:
        """The position of the report on the time axis."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as data for JSON."""

    def scalars(self) -> Iterator[tuple[str, float]]:
        """Yield the report as curves: tags and values."""


Sink = Callable[[Any], object]
"""Takes one report."""


def open_sink(to: Any, registration: Registration) -> Sink:
    """Return the sink that ``to=`` selects. A file that it opens is closed with the registration.

    Args:
        to: a callable (``print``); an object with ``add_scalar(tag, value, step)`` (TensorBoard's writer); an
            open text file; a path, to which lines are appended; ``None`` for nowhere.
        registration: the hooks that report.

    Raises:
        UsageError: for anything else.
        OSError: the file cannot be opened.
    """
    if to is None:
        return lambda report: None
    if hasattr(to, "add_scalar"):
        return _curves(to)
    if isinstance(to, (str, os.PathLike)):
        to = open(to, "a", encoding="utf-8")
        registration.on_remove(to.close)
    if hasattr(to, "write"):
        return _lines(to)
    if callable(to):
        return to  # type: ignore[no-any-return]
    raise UsageError(
        f"to={to!r} cannot take reports; allowed: a callable such as print, a path or an open text file "
        "(JSON lines), an object with add_scalar (TensorBoard), None"
    )


def _curves(writer: Any) -> Sink:
    def emit(report: Report) -> None:
        for tag, value in report.scalars():
            writer.add_scalar(tag, value, report.step)

    return emit


def _lines(file: Any) -> Sink:
    """Return a sink that writes one line for each report and flushes it: a killed job leaves whole lines."""

    def emit(report: Report) -> None:
        file.write(json.dumps(report.as_dict(), allow_nan=False) + "\n")
        if hasattr(file, "flush"):
            file.flush()

    return emit
