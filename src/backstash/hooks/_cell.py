"""Where the calls of one captured module gather."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ._alias import InputUses, own_output
from ._autograd import in_backward
from ._calls import Captured, CapturedCall
from ._gradients import Gradients
from ._registration import Registration
from ._snapshot import Keep, Snapshot

__all__ = ["Calls", "Cell", "Wanted"]

Calls = Literal["last", "first", "all"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a capture was asked for."""

    inputs: bool
    outputs: bool
    grads: bool
    calls: Calls
    keep: Keep


class Cell:
    """The calls of one module, as many as are wanted."""

    __slots__ = (
        "_calls",
        "_grad_record",
        "_open",
        "_registration",
        "_seen",
        "_wanted",
        "path",
        "quick",
    )

    def __init__(self, path: str, wanted: Wanted, registration: Registration) -> None:
        self.path = path
        self.quick: tuple[torch.Tensor, int | None] | None = None
        """The last output and its version, where nothing but the last output is wanted."""
        self._wanted = wanted
        self._registration = registration
        self._grad_record = registration.record("grad", path) if wanted.grads else None
        self._calls: list[CapturedCall] = []
        self._seen = 0
        self._open: dict[int, list[CapturedCall]] = {}

    @property
    def captured(self) -> Captured | None:
        """What there is; ``None`` before the first call."""
        if self.quick is not None:
            kept, version = self.quick
            call = CapturedCall(self.path)
            call._output = Snapshot(kept, ((kept, version),))
            return Captured(self.path, (call,))
        return Captured(self.path, tuple(self._calls)) if self._calls else None

    def clear(self) -> None:
        """Forgets every call."""
        self.quick = None
        self._calls.clear()
        self._open.clear()
        self._seen = 0

    def enter(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Takes the inputs of a call that begins; returns the inputs that it shall have."""
        call = CapturedCall(self.path)
        wanted = self._wanted
        if not in_backward():
            call._inputs = wanted.keep.snapshot((args, kwargs))
        if self._grad_record is not None:
            call._input_grads = Gradients((args, kwargs), wanted.keep, self._grad_record)
            call._input_uses = InputUses(self._registration)
            args, kwargs = call._input_uses.begin((args, kwargs), call._input_grads.hook_of)
        self._open.setdefault(threading.get_ident(), []).append(call)
        return args, kwargs

    def leave(self, output: Any) -> Any:
        """Takes the output of a call that ends; returns the output that it shall have."""
        opened = self._open.get(threading.get_ident())
        call = opened.pop() if opened else CapturedCall(self.path)
        if call._input_uses is not None:
            call._input_uses.end()
        if self._grad_record is not None:
            output = own_output(output)
        if in_backward():
            self._recomputed(call, output)
            return output
        self._seen += 1
        if self._wanted.outputs:
            call._output = self._wanted.keep.snapshot(output)
        if self._grad_record is not None:
            call._output_grads = Gradients(output, self._wanted.keep, self._grad_record)
            call._output_grads.hook_tensors(output, self._registration)
        self._add(call)
        return output

    def _add(self, call: CapturedCall) -> None:
        calls = self._wanted.calls
        if calls == "all" or not self._calls:
            self._calls.append(call)
        elif calls == "last":
            self._calls[:] = [call]

    def _recomputed(self, again: CapturedCall, output: Any) -> None:
        """A checkpoint's recomputation is no new call. A reentrant one brings the gradients, though.

        With several calls of the module it is not known which one is recomputed: then none is filled,
        and asking for the gradient says that none arrived.
        """
        if self._seen != 1 or not self._calls or self._grad_record is None:
            return
        call = self._calls[0]
        if call._output_grads is None or call._output_grads.expected:
            return
        call._output_grads.hook_tensors(output, self._registration)
        call._input_grads = again._input_grads
