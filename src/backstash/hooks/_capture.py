"""Capture what modules take, return and get as gradients, or change it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from ._cell import Captured, Cell
from ._compiled import warn_if_compiled
from ._edits import Change, Edit, changes, first_of, with_first
from ._errors import NoMatchError, NotCapturedError
from ._gradients import Calls, Keep
from ._handle import Handle
from ._names import Names, near, select
from ._paths import walk
from ._registration import Registration

__all__ = ["Capture", "capture"]


class Capture(Handle, Mapping[str, Captured]):
    """The handle that :func:`capture` returns: a mapping from the paths of called modules to what was kept."""

    __slots__ = ("_aliases", "_cells", "_model", "_pending", "_stop", "_stops_on")

    def __init__(
        self, registration: Registration, model: nn.Module, cells: dict[int, Cell], *, stop: bool
    ) -> None:
        super().__init__(registration)
        self._model = model
        self._cells = {cell.path: cell for cell in cells.values()}
        self._aliases = _aliases(model, cells)
        self._stop = stop and bool(cells)
        self._pending: set[str] = set()  # the modules to be called before the forward ends
        self._stops_on: int | None = None  # the thread that can catch what ends the forward

    def __enter__(self) -> Capture:
        super().__enter__()
        self._arm(threading.get_ident())
        return self

    def run(self, *args: Any, **kwargs: Any) -> Capture:
        """Drop what was captured and call the model; with ``stop=True`` up to the last captured module.

        Returns this capture. A stopped forward ends here and not the ``with`` block, so one handle serves
        a whole loop.
        """
        self.clear()
        outside = self._stops_on
        self._arm(threading.get_ident())
        try:
            self._model(*args, **kwargs)
        except StopForward as error:
            if error.capture is not self:
                raise
        finally:
            self._arm(outside)
        return self

    def clear(self) -> None:
        """Drop what was captured, which frees its memory; the hooks stay."""
        for cell in self._cells.values():
            cell.clear()

    def __getitem__(self, path: str) -> Captured:
        cell = self._aliases.get(path)
        if cell is None:
            raise NotCapturedError(f"{path!r} is not captured; {near(path, self._cells)}")
        captured = cell.captured
        if captured is None:
            raise NotCapturedError(f"{path!r} was not called; run the model inside the with block")
        return captured

    def __iter__(self) -> Iterator[str]:
        return (path for path, cell in self._cells.items() if cell.captured is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _arm(self, thread: int | None) -> None:
        """End the next forward on ``thread`` when every captured module was called; ``None``: on no thread."""
        self._pending = set(self._cells)
        self._stops_on = thread if self._stop else None

    def _called(self, path: str) -> None:
        """Record a call of the module at ``path``. Raise if it was the last one missing."""
        # An exception on another thread would not reach the with block: replicas run to their end.
        if self._stops_on != threading.get_ident():
            return
        self._pending.discard(path)
        if not self._pending:
            raise StopForward(self)

    def _finish(self, error: BaseException | None) -> bool:
        self._arm(None)
        return isinstance(error, StopForward) and error.capture is self


def _aliases(model: nn.Module, cells: dict[int, Cell]) -> dict[str, Cell]:
    """Return the cells by every path of their modules, with and without the names that wrappers add."""
    found: dict[str, Cell] = {}
    for raw, site in walk(model):
        cell = cells.get(id(site.module))
        if cell is not None:
            found[raw] = found[site.path] = cell
    return found


def capture(
    model: nn.Module,
    names: Names,
    *,
    inputs: bool = False,
    outputs: bool = True,
    grads: bool = False,
    detach: bool = True,
    clone: bool = False,
    device: torch.device | str | None = None,
    calls: Calls = "last",
    stop: bool = False,
    edit: Edit | None = None,
    edit_inputs: Edit | None = None,
) -> Capture:
    """Keep what modules take, return and get as gradients, while the hooks are registered.

    ``got[path]`` has ``.output``, ``.input`` (the first input; ``.args`` and ``.kwargs`` are all),
    ``.grad`` (of the output), ``.input_grad`` and ``.calls``. Values have the structure that the module
    gave them: tuples, dicts, dataclasses. Reading a tensor that was changed in place after its capture
    (by an in-place ReLU, say) raises ``InplaceError``; ``clone=True`` keeps a copy instead. A call that
    activation checkpointing repeats in backward does not count as a second call.

    Args:
        model: the model; wrappers (compiled, DDP, FSDP) are looked through.
        names: what to capture: a path (``"layer4"``), a glob (``"layer3.*"``; ``*`` also crosses dots), a
            module class, a module, ``callable(path, module)``, or a list of these. May be ``[]`` with ``edit``.
        inputs: keep the inputs, as they were before the call.
        outputs: keep the outputs.
        grads: keep the gradients of the outputs, and with ``inputs`` those of the inputs through this module
            alone. Backward must run before the hooks are removed.
        detach: keep tensors without their graph.
        clone: keep copies.
        device: keep tensors on this device (``"cpu"``). Default: where they are.
        calls: which calls to keep of a module that is called several times: ``"last"``, ``"first"``, ``"all"``.
        stop: end the forward once every captured module was called. This skips the rest of the ``with``
            block too; in a loop call ``got.run(x)``, which returns.
        edit: replaces outputs: ``callable(output)`` or ``callable(output, input)`` for the captured modules,
            or a dict from names to such callables for any modules. An edit that returns ``None`` leaves the
            output as it is. The capture keeps the edited output.
        edit_inputs: replaces the first input of modules in the same way: ``callable(input)``.

    Returns:
        A :class:`Capture`, a handle and a mapping by module path.

    Raises:
        NoMatchError: a name matches nothing; nothing is registered then.
        UsageError: arguments that contradict each other.

    An exception in the model propagates, and the ``with`` block that it leaves removes the hooks; what was
    captured stays readable. At exit a :class:`HookWarning` names the modules that were never called.

    Capturing features by hooks is known from torchvision's ``IntermediateLayerGetter`` and the PyTorch
    forum; stopping by an exception is from baukit's ``Trace``.

    >>> import torch
    >>> from torch import nn
    >>> from backstash.hooks import capture
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    >>> with capture(model, [nn.ReLU, "2"], grads=True) as got:
    ...     model(torch.ones(5, 3)).sum().backward()
    >>> got["1"].output.shape, got["2"].grad.shape
    (torch.Size([5, 4]), torch.Size([5, 2]))
    """
    where = None if device is None else torch.device(device)
    keep = Keep(inputs, outputs, grads, calls, detach, clone, where)
    _check(keep, stop=stop, edits=edit is not None or edit_inputs is not None)
    sites = select(model, names)
    outward = changes(model, sites, edit, "edit")
    inward = changes(model, sites, edit_inputs, "edit_inputs")
    registration = Registration("capture")
    cells = {id(site.module): Cell(site.path, keep, registration) for site in sites}
    targets = {id(s.module): s for s in (*sites, *(s for s, _ in (*outward, *inward)))}
    if not targets:
        raise NoMatchError("names=[] selects nothing; name a module, or pass edit=")
    with registration.all_or_none():
        handle = Capture(registration, model, cells, stop=stop)
        for key, site in targets.items():
            outs, ins = (
                [c for s, c in found if id(s.module) == key] for found in (outward, inward)
            )
            cell = cells.get(key)
            enters = cell is not None and inputs
            if enters or ins:
                registration.forward_pre(site, _begin(cell if enters else None, ins))
            if cell is not None or outs:
                registration.forward(site, _end(cell, outs, handle._called), always_call=enters)
        warn_if_compiled(model, targets.values(), owner="capture")
    return handle


def _check(keep: Keep, *, stop: bool, edits: bool) -> None:
    """Raise if the arguments of ``capture`` contradict each other."""
    if not (keep.inputs or keep.outputs or keep.grads or edits):
        raise UsageError(
            "inputs, outputs and grads are all False; ask for one of them, or for edit="
        )
    if keep.calls not in ("last", "first", "all"):
        raise UsageError(f'calls={keep.calls!r} is not known; allowed: "last", "first", "all"')
    if stop and keep.calls == "all":
        raise UsageError(
            'stop=True ends the forward at the first calls; use calls="last" or stop=False'
        )
    if stop and keep.grads:
        raise UsageError(
            "stop=True leaves no output to run backward from; use grads=False or stop=False"
        )


def _begin(cell: Cell | None, edits: Sequence[Change]) -> Callable[..., tuple[Any, Any]]:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        for edit in edits:
            value = first_of(args, kwargs)
            new = edit(value, value)
            if new is not None:
                args, kwargs = with_first(new, args, kwargs)
        return (args, kwargs) if cell is None else cell.enter(args, kwargs)

    return hook


def _end(
    cell: Cell | None, edits: Sequence[Change], called: Callable[[str], None]
) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        call = cell.end() if cell is not None else None
        if cell is not None and call is None:
            return None
        given = output
        for edit in edits:
            new = edit(output, first_of(args, kwargs))
            output = output if new is None else new
        if cell is not None and call is not None:
            output = cell.leave(call, output, (args, kwargs))
            called(cell.path)
        return None if output is given else output

    return hook


class StopForward(BaseException):
    """Ends a forward after the last captured module; the capture that raises it also catches it.

    It is no ``Exception``, because models catch those.
    """

    def __init__(self, capture: Capture) -> None:
        super().__init__("capture(stop=True) ended this forward; it should have been caught")
        self.capture = capture
