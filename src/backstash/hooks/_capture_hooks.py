"""The hooks that a capture puts on one module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ._cell import Cell, Wanted
from ._edits import Change, first_of, with_first
from ._paths import Site
from ._registration import HookRecord, Make, Registration
from ._stop import Stopper

__all__ = ["Plan", "attach"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done at one module."""

    cell: Cell | None
    """Where its calls gather, if it is captured."""
    outputs: Sequence[Change]
    """What is done to its outputs, in order."""
    inputs: Sequence[Change]
    """What is done to its first input, in order."""
    stopper: Stopper | None
    """What ends the forward, if something does."""


def attach(registration: Registration, site: Site, plan: Plan, wanted: Wanted) -> None:
    """Registers what capturing and editing one module needs, and no more."""
    cell = plan.cell
    only_last_output = wanted.outputs and not (wanted.inputs or wanted.grads)
    plain = only_last_output and wanted.calls == "last" and wanted.keep.plain
    if cell is not None and plain and not (plan.stopper or plan.outputs or plan.inputs):
        registration.forward(site, _last_output(cell))
        return
    if plan.inputs or (cell is not None and wanted.inputs):
        registration.forward_pre(site, _inputs(cell if wanted.inputs else None, plan.inputs))
    if cell is not None or plan.outputs:
        registration.forward(site, _outputs(plan), with_kwargs=True)


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


def _inputs(cell: Cell | None, edits: Sequence[Change]) -> Make:
    def make(record: HookRecord) -> Callable[..., tuple[Any, Any]]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            record.fired += 1
            for edit in edits:
                value = first_of(args, kwargs)
                new = edit(value, value)
                if new is not None:
                    args, kwargs = with_first(new, args, kwargs)
            return (args, kwargs) if cell is None else cell.enter(args, kwargs)

        return hook

    return make


def _outputs(plan: Plan) -> Make:
    cell, edits, stopper = plan.cell, plan.outputs, plan.stopper

    def make(record: HookRecord) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            record.fired += 1
            given = output
            for edit in edits:
                new = edit(output, first_of(args, kwargs))
                output = output if new is None else new
            if cell is not None:
                output = cell.leave(output)
                if stopper is not None:
                    stopper.called(cell.path)
            return None if output is given else output

        return hook

    return make
