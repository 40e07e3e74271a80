"""``saved_report``, and the :class:`SavedReport` that it returns."""

from __future__ import annotations

import json
import os
from typing import Any

from torch import nn

from ..._text import html_text, show_text
from ...errors import UsageError
from ...units import format_bytes
from .._page import render_page
from .figures import SavedFigures
from .page import as_page, as_values
from .recorder import SaveRecorder
from .rows import Row, SavedTensorRow
from .save import Found
from .text import as_rich, as_text

__all__ = ["SavedReport", "saved_report"]


def saved_report(model: nn.Module | None = None, *, look: bool = True) -> SavedReport:
    """Return a context that records every tensor saved for backward on this thread, and moves none.

    It works inside and around a stash, other saved-tensors hooks and ``torch.utils.checkpoint``: they handle
    each tensor as they do without a report, and the report says where the tensor is stored. A report can be
    entered only once. After the context, it keeps no tensor and no module alive.

    Args:
        model: the model whose modules are named by their paths, and whose parameters and buffers the report
            recognizes. Without one, paths begin at the module that is called first.
        look: read the values of CPU tensors of at least 64 KiB, each storage once when it is saved, to find
            masks, indices and zeros that take more bytes than they need. Default ``True``.

    The report does not record saves on other threads, or tensors that a custom function keeps without
    ``save_for_backward``. It counts what a graph of ``torch.compile`` saves for the module whose call was
    compiled. It does not see what ``torch.func.grad`` and similar transforms save; a note says how often they
    ran.

    Raises:
        UsageError: from ``__enter__``, if the report was entered before; from ``__exit__``, if contexts are
            left in the wrong order.
        InplaceError: from backward, as in plain PyTorch, if a saved tensor was changed in place.
        RuntimeError: from ``__enter__``, if saved-tensors hooks are disabled.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    >>> with saved_report(model) as saved:
    ...     loss = model(torch.ones(4, 8)).sum()
    >>> [(row.module, row.calls, row.unique_bytes) for row in saved.rows]
    [('0', 1, 128), ('1', 1, 128)]
    """
    if model is not None and not isinstance(model, nn.Module):
        raise UsageError(f"saved_report({model!r}): allowed is an nn.Module, or nothing")
    recorder = SaveRecorder(model, look=look)
    return SavedReport(recorder, recorder.found)


class SavedReport(SavedFigures):
    """The report that :func:`saved_report` returns; it can be read inside its context and at any time after.

    A tensor's place is where it is stored when the report is read. After backward has freed the tensor, it is
    the last known place. ``print`` the report for the table.
    """

    def __init__(self, recorder: SaveRecorder | None, found: Found) -> None:
        super().__init__(found)
        self._recorder = recorder

    def __enter__(self) -> SavedReport:
        if self._recorder is None or self._recorder.is_on:
            raise UsageError(
                "a saved report can be entered only once: create another with saved_report(...)"
            )
        self._recorder.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._recorder is None:
            raise UsageError("a saved report was exited more often than it was entered")
        try:
            self._recorder.stop()
        finally:
            if not self._recorder.is_on:
                self._recorder = None
            self._saves()

    def take(self) -> SavedReport:
        """Return what was recorded so far as a separate report, and continue with an empty one: for one report
        per step.

        A storage that is saved again later counts again.
        """
        found = self._found
        if self._recorder is not None:
            found = self._recorder.take()
            self._found = self._recorder.found
        else:
            self._found = Found()
        return SavedReport(None, found)

    def __repr__(self) -> str:
        size, saves = format_bytes(self.unique_bytes), len(self._found.saves)
        return f"SavedReport({size} held for backward, {saves:,} saves; print it for the table)"

    def __str__(self) -> str:
        return self.text()

    _repr_pretty_ = show_text

    def _repr_html_(self) -> str:
        return html_text(str(self))

    def __rich__(self) -> Any:
        return self.rich()

    def text(self, *, advice: bool = True) -> str:
        """Return the table in plain text, as ``print`` shows it; ``advice=False`` omits the advice."""
        return as_text(self, advice=advice)

    def rich(self, *, advice: bool = True) -> Any:
        """Return the same table as an object for ``rich.print``.

        Raises:
            ImportError: rich is not installed; the message has the line that installs it.
        """
        try:
            return as_rich(self, advice=advice)
        except ImportError as error:
            raise ImportError("a rich table needs rich: pip install rich") from error

    def as_dict(self) -> dict[str, Any]:
        """Return the whole report as dicts, lists, numbers and strings."""
        return as_values(self)

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write ``as_dict()`` to ``path`` as JSON; an existing file is replaced."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.as_dict(), file, indent=1, allow_nan=False)
            file.write("\n")

    def to_html(self, path: str | os.PathLike[str], *, title: str = "Saved for backward") -> None:
        """Write the report to ``path`` as one HTML file for a browser; an existing file is replaced."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(render_page(as_page(self, title)))

    def to_pandas(self, *, tensors: bool = False) -> Any:
        """Return ``rows`` as a ``pandas.DataFrame``; with ``tensors=True``, the rows of ``tensors`` instead.

        Raises:
            ImportError: pandas is not installed; the message has the line that installs it.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_pandas() needs pandas: pip install pandas") from error
        kind, name = (SavedTensorRow, "tensors") if tensors else (Row, "rows")
        return pandas.DataFrame(self.as_dict()[name], columns=kind.__slots__)
