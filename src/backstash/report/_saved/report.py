"""``saved_report``, and the :class:`SavedReport` that it returns."""

from __future__ import annotations

import json
import os
from collections import Counter
from types import TracebackType
from typing import Any

from torch import nn

from ..._text import html_text, show_text
from ...advice import Advice
from ...errors import UsageError
from ...units import format_bytes
from .._page import render_page
from .budgets import PLACE, Budget, advice_of, budgets, peak_bytes
from .page import as_page, as_values
from .recorder import SaveRecorder
from .rows import Row, SavedTensorRow, add_up, describe, pattern
from .save import Found, Save
from .storages import find_ops
from .summary import Details, SavedSummary
from .text import as_rich, as_text
from .waste import Waste, wasted

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


class SavedReport:
    """The report that :func:`saved_report` returns; it can be read inside its context and at any time after.

    A tensor's place is where it is stored when the report is read. After backward has freed the tensor, it is
    the last known place. ``print`` the report for the table.
    """

    def __init__(self, recorder: SaveRecorder | None, found: Found) -> None:
        self._recorder = recorder
        self._found = found

    def __enter__(self) -> SavedReport:
        if self._recorder is None or self._recorder.is_on:
            raise UsageError(
                "a saved report can be entered only once: create another with saved_report(...)"
            )
        self._recorder.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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

    def _saves(self) -> list[Save]:
        saves = list(self._found.saves)
        for save in saves:
            save.update()
        return saves

    # Figures.

    @property
    def total_bytes(self) -> int:
        """Bytes of the elements of all saved tensors, including parameters, each counted as often as it was
        saved."""
        return sum(save.nbytes for save in self._found.saves if save.is_saved)

    @property
    def unique_bytes(self) -> int:
        """Bytes of the storages of all saved tensors, each storage counted once.

        Storages of parameters and buffers are not counted: the model holds them even without backward.
        """
        return sum(save.unique_bytes for save in self._found.saves)

    @property
    def peak_bytes(self) -> int:
        """The most of ``unique_bytes`` held at the same time; less than all of them if backward ran in
        between."""
        return peak_bytes(self._found.lives)

    @property
    def activation_bytes(self) -> int:
        """The part of ``unique_bytes`` that forward allocated; inputs existed before and are not counted."""
        return sum(row.unique_bytes for row in self.by_kind() if row.name in ("activation", "view"))

    @property
    def recomputed_bytes(self) -> int:
        """Bytes that ``torch.utils.checkpoint`` discarded and backward will recompute; in no other figure.

        What reentrant checkpointing discards is unknown, since it saves nothing while it runs.
        """
        return sum(save.recomputed_bytes for save in self._found.saves)

    # Rows.

    @property
    def rows(self) -> tuple[Row, ...]:
        """A row for each module whose own operations saved something, most unique bytes first."""
        return self.by_module()

    @property
    def tensors(self) -> tuple[SavedTensorRow, ...]:
        """A row for each saved tensor, in order of the saves."""
        saves = self._saves()
        find_ops(saves)
        return tuple(describe(save) for save in saves)

    def by_module(self, depth: int | None = None) -> tuple[Row, ...]:
        """Return a row for each module; with ``depth``, for each path of that many names, submodules included.

        Raises:
            UsageError: ``depth`` is below 1.
        """
        if depth is not None and depth < 1:
            raise UsageError(f"by_module(depth={depth!r}): allowed are 1 and more, or None for all")
        return add_up(
            self._saves(),
            lambda save: ".".join(save.module.split(".")[:depth]),
            self._found.calls if self._found.has_calls else None,
        )

    def folded_rows(self) -> tuple[Row, ...]:
        """Return ``rows``, with modules whose paths differ only in the first number as one:
        ``"blocks.*.norm"``."""
        counts: Counter[str] = Counter()
        for path, count in self._found.calls.items():
            counts[pattern(path)] += count
        known = counts if self._found.has_calls else None
        return add_up(self._saves(), lambda save: pattern(save.module), known)

    def by_op(self) -> tuple[Row, ...]:
        """Return a row for each kind of operation that saved tensors, under the name of its autograd node.

        The name is read from the graph while the graph is alive, or when backward runs the node. If neither
        gave the name, the row's name is ``""``.
        """
        saves = self._saves()
        find_ops(saves)
        return add_up(saves, lambda save: save.op, None)

    def by_dtype(self) -> tuple[Row, ...]:
        """Return a row for each element type, such as ``"float32"``."""
        return add_up(self._saves(), lambda save: str(save.dtype).removeprefix("torch."), None)

    def by_kind(self) -> tuple[Row, ...]:
        """Return a row for each of ``"parameter"``, ``"buffer"``, ``"input"``, ``"activation"`` and ``"view"``.

        A ``"view"`` is a tensor in an activation's storage that was saved before; it holds no additional
        memory.
        """
        return add_up(self._saves(), lambda save: save.kind, None)

    # Conclusions.

    @property
    def waste(self) -> tuple[Waste, ...]:
        """Masks, indices, zeros and parts of storages that fewer bytes would hold exactly, most gain first."""
        return wasted(self._saves())

    @property
    def advice(self) -> tuple[Advice, ...]:
        """Which stash to use and how much memory it would save, computed from the recorded sizes."""
        self._saves()
        return advice_of(self._found)

    def budgets(self, disk: str = PLACE) -> tuple[Budget, ...]:
        """Return what a stash would move if it kept everything, half, a tenth or nothing of what can move.

        The figures are computed from the recorded sizes, not measured.

        Args:
            disk: the directory in the lines to paste.
        """
        self._saves()
        return budgets(self._found, disk)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what the figures leave out and on what is unknown."""
        found = self._found
        size = format_bytes
        notes = [
            f"{size(nbytes)} went to the pack hook {name}: how many bytes it holds for them is not known"
            for name, nbytes in found.foreign.items()
        ]
        if self.recomputed_bytes:
            notes.append(
                f"checkpointing discarded {size(self.recomputed_bytes)}, to recompute them in backward"
            )
        again = [save for save in found.saves if save.boundary == "reentrant checkpoint"]
        if again:
            notes.append(
                f"reentrant checkpointing saved {len(again)} tensor(s) to recompute from; it saves "
                "nothing else while it runs, so how much it discarded is not known"
            )
        if found.transforms:
            notes.append(
                f"torch.func (grad, vjp, jacrev, hessian) ran {found.transforms} times: hooks are not allowed "
                "inside, so what it saved is not known"
            )
        if found.is_selective:
            notes.append(
                "selective checkpointing keeps outputs that no hook sees: they are not counted"
            )
        if found.not_looked:
            notes.append(f"large tensors whose values could not be read: {found.not_looked}")
        if not found.has_calls:
            notes.append("a debugger or tracer is active: calls were not counted")
        return tuple(notes)

    # Output.

    def _summary(self, *, advice: bool = True) -> SavedSummary:
        return SavedSummary(
            total_bytes=self.total_bytes,
            unique_bytes=self.unique_bytes,
            peak_bytes=self.peak_bytes,
            activation_bytes=self.activation_bytes,
            recomputed_bytes=self.recomputed_bytes,
            rows=self.rows,
            folded_rows=self.folded_rows(),
            by_kind=self.by_kind(),
            waste=self.waste,
            advice=self.advice if advice else (),
            notes=self.notes,
        )

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
        return as_text(self._summary(advice=advice))

    def rich(self, *, advice: bool = True) -> Any:
        """Return the same table as an object for ``rich.print``.

        Raises:
            ImportError: rich is not installed; the message has the line that installs it.
        """
        try:
            return as_rich(self._summary(advice=advice))
        except ImportError as error:
            raise ImportError("a rich table needs rich: pip install rich") from error

    def as_dict(self) -> dict[str, Any]:
        """Return the whole report as dicts, lists, numbers and strings."""
        details = Details(self.by_op(), self.by_dtype(), self.budgets(), self.tensors)
        return as_values(self._summary(), details)

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write ``as_dict()`` to ``path`` as JSON; an existing file is replaced."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.as_dict(), file, indent=1, allow_nan=False)
            file.write("\n")

    def to_html(self, path: str | os.PathLike[str], *, title: str = "Saved for backward") -> None:
        """Write the report to ``path`` as one HTML file for a browser; an existing file is replaced."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(render_page(as_page(self._summary(), title)))

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
