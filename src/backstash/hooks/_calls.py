"""What was captured of one module: its calls, and of each the inputs, output and gradients."""

from __future__ import annotations

from typing import Any

from ._alias import InputUses
from ._edits import first_of
from ._errors import NotCapturedError
from ._gradients import Gradients
from ._snapshot import Snapshot

__all__ = ["Captured", "CapturedCall"]


class CapturedCall:
    """One call of a module: ``input``, ``args``, ``kwargs``, ``output``, ``grad``, ``input_grad``."""

    __slots__ = ("_input_grads", "_input_uses", "_inputs", "_output", "_output_grads", "_path")

    def __init__(self, path: str) -> None:
        self._path = path
        self._inputs: Snapshot | None = None
        self._output: Snapshot | None = None
        self._output_grads: Gradients | None = None
        self._input_grads: Gradients | None = None
        self._input_uses: InputUses | None = None

    @property
    def output(self) -> Any:
        """What the module returned: the same structure, its tensors kept as the capture was told."""
        return self._value(self._output, "output", "outputs=True")

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional inputs."""
        args, _ = self._value(self._inputs, "input", "inputs=True")
        return tuple(args)

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword inputs."""
        _, kwargs = self._value(self._inputs, "input", "inputs=True")
        return dict(kwargs)

    @property
    def input(self) -> Any:
        """The first input: the first positional one or, without any, the first keyword one."""
        return first_of(*self._value(self._inputs, "input", "inputs=True"))

    @property
    def grad(self) -> Any:
        """The gradient of the output, in the output's structure (``None`` where there is none)."""
        return self._gradient(self._output_grads, "grad", "grads=True")

    @property
    def input_grad(self) -> Any:
        """The gradient of the first input, through this module alone."""
        remedy = "inputs=True, grads=True"
        return first_of(*self._gradient(self._input_grads, "input_grad", remedy))

    def _value(self, kept: Snapshot | None, what: str, remedy: str) -> Any:
        if kept is None:
            raise NotCapturedError(f"no {what} of {self._path!r} was captured; ask with {remedy}")
        return kept.get(f"the {what} of {self._path!r}")

    def _gradient(self, grads: Gradients | None, what: str, remedy: str) -> Any:
        if grads is None:
            raise NotCapturedError(f"no {what} of {self._path!r} was captured; ask with {remedy}")
        if not grads.arrived:
            raise NotCapturedError(
                f"no {what} of {self._path!r} arrived: run backward inside the with block, and see that "
                "the loss depends on it and that it requires a gradient"
            )
        return grads.get(f"the {what} of {self._path!r}")


class Captured:
    """What was captured of one module; the values of its last kept call, and ``calls`` for each."""

    __slots__ = ("calls", "path")

    def __init__(self, path: str, calls: tuple[CapturedCall, ...]) -> None:
        self.path = path
        """The module's path."""
        self.calls = calls
        """The calls that were kept, oldest first: one, or all with ``calls="all"``."""

    @property
    def output(self) -> Any:
        """See :attr:`CapturedCall.output`."""
        return self.calls[-1].output

    @property
    def input(self) -> Any:
        """See :attr:`CapturedCall.input`."""
        return self.calls[-1].input

    @property
    def args(self) -> tuple[Any, ...]:
        """See :attr:`CapturedCall.args`."""
        return self.calls[-1].args

    @property
    def kwargs(self) -> dict[str, Any]:
        """See :attr:`CapturedCall.kwargs`."""
        return self.calls[-1].kwargs

    @property
    def grad(self) -> Any:
        """See :attr:`CapturedCall.grad`."""
        return self.calls[-1].grad

    @property
    def input_grad(self) -> Any:
        """See :attr:`CapturedCall.input_grad`."""
        return self.calls[-1].input_grad

    def __repr__(self) -> str:
        return f"Captured({self.path!r}, {len(self.calls)} call{'s' * (len(self.calls) != 1)})"
