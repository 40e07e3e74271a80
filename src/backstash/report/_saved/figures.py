"""The figures of a saved report: sums, rows and conclusions from the recorded saves."""

from __future__ import annotations

from collections import Counter

from ...advice import Advice
from ...errors import UsageError
from ...units import format_bytes
from .budgets import PLACE, Budget, advice_of, budgets, peak_bytes
from .rows import Row, SavedTensorRow, add_up, describe, pattern
from .save import Found, Save
from .storages import find_ops
from .waste import Waste, wasted

__all__ = ["SavedFigures"]


class SavedFigures:
    """Everything that can be read from a :class:`~backstash.report.SavedReport`."""

    def __init__(self, found: Found) -> None:
        self._found = found

    def _saves(self) -> list[Save]:
        saves = list(self._found.saves)
        for save in saves:
            save.update()
        return saves

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
