"""Where reports go: a callable, a file of JSON lines, or a TensorBoard writer."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ..errors import UsageError

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


class Sink(ABC):
    """Takes reports until it is closed."""

    @abstractmethod
    def emit(self, report: Report) -> None:
        """Take one report."""

    @abstractmethod
    def close(self) -> None:
        """Close the file that the sink itself opened, if any; calling it again does nothing."""


class _CallableSink(Sink):
    def __init__(self, call: Callable[[Any], Any]) -> None:
        self._call = call

    def emit(self, report: Report) -> None:
        self._call(report)

    def close(self) -> None:
        pass


class _Curves(Sink):
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def emit(self, report: Report) -> None:
        for tag, value in report.scalars():
            self._writer.add_scalar(tag, value, report.step)

    def close(self) -> None:
        pass


class _Lines(Sink):
    """Writes one line for each report and flushes it, so that a killed job leaves whole lines."""

    def __init__(self, file: Any, *, owned: bool) -> None:
        self._file = file
        self._owned = owned

    def emit(self, report: Report) -> None:
        self._file.write(json.dumps(report.as_dict(), allow_nan=False) + "\n")
        if hasattr(self._file, "flush"):
            self._file.flush()

    def close(self) -> None:
        if self._owned:
            self._file.close()


def open_sink(to: Any) -> Sink:
    """Open the sink that ``to=`` selects.

    Args:
        to: a callable (``print``); an object with ``add_scalar(tag, value, step)`` (TensorBoard's writer); an
            open text file; a path, to which lines are appended; ``None`` for nowhere.

    Raises:
        UsageError: for anything else.
        OSError: the file cannot be opened.
    """
    if to is None:
        return _CallableSink(lambda report: None)
    if hasattr(to, "add_scalar"):
        return _Curves(to)
    if hasattr(to, "write"):
        return _Lines(to, owned=False)
    if isinstance(to, (str, os.PathLike)):
        return _Lines(open(to, "a", encoding="utf-8"), owned=True)
    if callable(to):
        return _CallableSink(to)
    raise UsageError(
        f"to={to!r} cannot take reports; allowed: a callable such as print, a path or an open text file "
        "(JSON lines), an object with add_scalar (TensorBoard), None"
    )
