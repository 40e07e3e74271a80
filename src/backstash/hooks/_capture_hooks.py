"""The hooks that a capture puts on one module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ._cell import Cell, Wanted
from ._paths import Site
from ._registration import HookRecord, Make, Registration
from ._stop import Stopper

__all__ = ["attach"]

OutputEdit = Callable[[Any], Any]


def attach(
    registration: Registration,
    site: Site,
    cell: Cell | None,
    wanted: Wanted,
    stopper: Stopper | None,
    edits: Sequence[OutputEdit],
) -> None:
    """Registers what capturing and editing one module needs, and no more."""
    only_last_output = not (wanted.inputs or wanted.grads) and wanted.outputs
    plain = only_last_output and wanted.calls == "last" and wanted.keep.plain
    if cell is not None and plain and stopper is None and not edits:
        registration.forward(site, _last_output(cell))
        return
    if cell is not None and wanted.inputs:
        registration.forward_pre(site, _inputs(cell))
    registration.forward(site, _output(cell, edits, stopper))


def _last_output(cell: Cell) -> Make:
    """The commonest capture, kept as cheap as the hook that one would write by hand."""

    def make(record: HookRecord) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            record.fired += 1
            if type(output) is not Tensor:
                cell.leave(output)
                return
            try:
                cell.quick = (output.detach(), output._version)
            except RuntimeError:  # an inference tensor has no version
                cell.quick = (output.detach(), None)

        return hook

    return make


def _inputs(cell: Cell) -> Make:
    def make(record: HookRecord) -> Callable[..., tuple[Any, Any]]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            record.fired += 1
            return cell.enter(args, kwargs)

        return hook

    return make


def _output(cell: Cell | None, edits: Sequence[OutputEdit], stopper: Stopper | None) -> Make:
    def make(record: HookRecord) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            record.fired += 1
            given = output
            for edit in edits:
                replaced = edit(output)
                output = output if replaced is None else replaced
            if cell is not None:
                output = cell.leave(output)
                if stopper is not None:
                    stopper.called(cell.path)
            return None if output is given else output

        return hook

    return make
