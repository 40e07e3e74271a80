"""The captured calls of one module: how they are collected, and how they are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .._torch.engine import in_backward
from ._alias import InputUses, own_output
from ._calls import OpenCalls
from ._edits import first_of
from ._errors import NotCapturedError
from ._gradients import Gradients, Keep, ValueSnapshot
from ._registration import Registration

__all__ = ["Captured", "CapturedCall", "Cell", "RecordedCall"]


@dataclass(slots=True)
class RecordedCall:
    """What a capture has of one call; ``None`` for what it does not keep."""

    inputs: ValueSnapshot | None = None
    output: ValueSnapshot | None = None
    output_grads: Gradients | None = None
    input_grads: Gradients | None = None
    input_uses: InputUses | None = None


class CapturedCall:
    """One call of a module: ``input``, ``args``, ``kwargs``, ``output``, ``grad``, ``input_grad``.

    A property raises :class:`NotCapturedError` if the capture does not hold its value, and
    :class:`backstash.errors.InplaceError` if a tensor in it was changed in place after its capture.
    """

    __slots__ = ("_call", "path")

    def __init__(self, path: str, call: RecordedCall) -> None:
        self.path = path
        """The module's path."""
        self._call = call

    @property
    def output(self) -> Any:
        """What the module returned, in the same structure."""
        return self._value(self._call.output, "output", "outputs=True")

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional inputs."""
        args, _ = self._value(self._call.inputs, "input", "inputs=True")
        return tuple(args)

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword inputs."""
        _, kwargs = self._value(self._call.inputs, "input", "inputs=True")
        return dict(kwargs)

    @property
    def input(self) -> Any:
        """The first input: the first positional one or, without any, the first keyword one."""
        return first_of(*self._value(self._call.inputs, "input", "inputs=True"))

    @property
    def grad(self) -> Any:
        """The gradient of the output, in the output's structure; ``None`` for a tensor that got none."""
        return self._gradient(self._call.output_grads, "grad", "grads=True")

    @property
    def input_grad(self) -> Any:
        """The part of the first input's gradient that comes through this module."""
        remedy = "inputs=True, grads=True"
        return first_of(*self._gradient(self._call.input_grads, "input_grad", remedy))

    def _value(self, kept: ValueSnapshot | None, what: str, remedy: str) -> Any:
        if kept is None:
            raise NotCapturedError(f"no {what} of {self.path!r} was captured; ask with {remedy}")
        return kept.get(f"the {what} of {self.path!r}")

    def _gradient(self, grads: Gradients | None, what: str, remedy: str) -> Any:
        if grads is None:
            raise NotCapturedError(f"no {what} of {self.path!r} was captured; ask with {remedy}")
        if not grads.arrived:
            raise NotCapturedError(
                f"no {what} of {self.path!r} arrived: run backward inside the with block, and see that "
                "the loss depends on it and that it requires a gradient"
            )
        return grads.get(f"the {what} of {self.path!r}")


class Captured(CapturedCall):
    """The captured values of one module: those of its last kept call, and every kept call in ``calls``."""

    __slots__ = ("calls",)

    def __init__(self, path: str, calls: list[RecordedCall]) -> None:
        super().__init__(path, calls[-1])
        self.calls = tuple(CapturedCall(path, call) for call in calls)
        """The calls that were kept, oldest first: one, or all with ``calls="all"``."""

    def __repr__(self) -> str:
        return f"Captured({self.path!r}, {len(self.calls)} call{'s' * (len(self.calls) != 1)})"


class Cell:
    """Collects the calls of one captured module: the first, the last or all of them."""

    __slots__ = (
        "_calls",
        "_grad_record",
        "_keep",
        "_open",
        "_registration",
        "_seen",
        "path",
    )

    def __init__(self, path: str, keep: Keep, registration: Registration) -> None:
        self.path = path
        self._keep = keep
        self._registration = registration
        self._grad_record = registration.record("grad", path) if keep.grads else None
        self._calls: list[RecordedCall] = []
        self._seen = 0
        self._open = OpenCalls[RecordedCall]()

    @property
    def captured(self) -> Captured | None:
        """The calls kept so far; ``None`` before the first."""
        return Captured(self.path, self._calls) if self._calls else None

    def clear(self) -> None:
        """Forget every call."""
        self._calls.clear()
        self._open = OpenCalls()
        self._seen = 0

    def enter(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Record the inputs of a call that begins. Return the inputs to call the module with."""
        call = RecordedCall()
        if not in_backward():
            call.inputs = self._keep.snapshot((args, kwargs))
        if self._grad_record is not None:
            call.input_grads = Gradients((args, kwargs), self._keep, self._grad_record)
            call.input_uses = InputUses(self._registration)
            args, kwargs = call.input_uses.begin((args, kwargs), call.input_grads.hook_of)
        self._open.begin(call)
        return args, kwargs

    def end(self) -> RecordedCall | None:
        """Return the call that ends; ``None`` if it raised an error, or its begin was not recorded."""
        if not self._keep.inputs:
            return RecordedCall()
        call, failed = self._open.end()
        if call is not None and call.input_uses is not None:
            call.input_uses.end()
        return None if failed else call

    def leave(self, call: RecordedCall, output: Any, inputs: Any) -> Any:
        """Record the output of a call that has ended, which had these inputs. Return the output to pass on."""
        if self._grad_record is not None:
            output = own_output(output, inputs)
        if in_backward():
            self._recomputed(call, output)
            return output
        self._seen += 1
        if self._keep.outputs:
            call.output = self._keep.snapshot(output)
        if self._grad_record is not None:
            call.output_grads = Gradients(output, self._keep, self._grad_record)
            call.output_grads.hook_tensors(output, self._registration)
        self._add(call)
        return output

    def _add(self, call: RecordedCall) -> None:
        calls = self._keep.calls
        if calls == "all" or not self._calls:
            self._calls.append(call)
        elif calls == "last":
            self._calls[:] = [call]

    def _recomputed(self, again: RecordedCall, output: Any) -> None:
        """Take the gradients of a call that an activation checkpoint recomputes; it is not a new call.

        Only a reentrant checkpoint's recomputation has gradients that the first run lacks. If the module was
        called several times, it is not known which call is recomputed: then none gets gradients, and
        reading one raises that none arrived.
        """
        if self._seen != 1 or not self._calls or self._grad_record is None:
            return
        call = self._calls[0]
        if call.output_grads is None or call.output_grads.expected:
            return
        call.output_grads.hook_tensors(output, self._registration)
        call.input_grads = again.input_grads
