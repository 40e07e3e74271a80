"""One run of a program.

A program is a list of steps ``(operation, i, j)``; ``i`` and ``j`` pick operands among the values so far,
the newest first. Each step has one result, whatever else it does: gradients, the name of an error, or
``None``; and then each value that is left is differentiated once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .acts import ACTS, LATER_ACTS
from .functions import Broken
from .knowable import Knowable
from .operations import CHANGES, MUTATES_LATER, PURE, VIEWS
from .streams import Streams

SIDE = 16
MOST_ELEMENTS = 4096
Step = tuple[str, int, int]
Result = list[Tensor | None] | str | None
USES = (
    "backward",
    "backward, kept",
    "backward in a thread",
    "into grad",
    "of two",
    "differentiate",
    "look",
)
LIFE = ("drop", "land", "hold", "free", "leave and enter")
COMPUTING = {**PURE, **VIEWS, **CHANGES}
ENDS = "the end: "  # marks an error after which nothing can be compared
EXPECTED = (RuntimeError, IndexError, ValueError, TypeError, Broken)
CHANGED = ("modified by an inplace operation", "has been modified inplace")


class Calls(nn.Module):
    """Calls what it is given, so that a stash can be attached to it."""

    def forward(self, function: Callable[..., Any], *operands: Tensor) -> Any:
        return function(*operands)


class Run:
    """One run of a program.

    Args:
        scope: makes the hook context that forward runs in.
        gate: called with "hold", "free", "land" and "elsewhere".
        other_scope: makes another stash's context.
        knowable: watches what is written, in the run that is the reference; else ``None``.
        after: called after each step.
        device: of the leaves.
        streams: chooses a stream for each step, on an accelerator.
    """

    def __init__(
        self,
        scope: Callable[[], AbstractContextManager[Any]],
        gate: Callable[[str], None] = lambda word: None,
        other_scope: Callable[[], AbstractContextManager[Any]] | None = None,
        knowable: Knowable | None = None,
        after: Callable[[], None] = lambda: None,
        device: torch.device | None = None,
        streams: Streams | None = None,
    ) -> None:
        self.scope, self.gate = scope, gate
        self.other_scope = other_scope or scope
        self.knowable, self.after, self.streams = knowable, after, streams
        self.module = Calls()
        generator = torch.Generator().manual_seed(0)
        self.leaves = [
            torch.randn(SIDE, SIDE, dtype=torch.float64, generator=generator)
            .to(device)
            .requires_grad_()
            for _ in range(2)
        ]
        self.values: list[Tensor | None] = []
        self.has_jagged = False
        self.results: list[Result] = []
        self.context: AbstractContextManager[Any] | None = None
        self.above: list[AbstractContextManager[Any]] = []  # entered after it
        self.handles: list[Any] = []
        self._other_thread: ThreadPoolExecutor | None = None
        self._is_steady = True

    def run(self, steps: Iterable[Step]) -> list[Result]:
        """The results, up to a backward after which nothing can be compared."""
        steps = list(steps)
        self._is_steady = not any(name in MUTATES_LATER | LATER_ACTS for name, _, _ in steps)
        torch.manual_seed(0)
        self.enter()
        try:
            self.values = [self.leaves[0] * 1, self.leaves[1] * 2]
            for step in steps:
                if self.knowable is not None:
                    self.knowable.step = len(self.results)
                self.results.append(self.step(*step))
                self.after()
                if self._is_over():
                    return self.results
        finally:
            self.leave_all()
            if self.streams is not None:
                self.streams.end()
        for loss in list(self.values):
            if self.knowable is not None:
                self.knowable.step = len(self.results)
            self.results.append(self.differentiate(loss, retain_graph=True))
            if self._is_over():
                break
        return self.results

    def _is_over(self) -> bool:
        """After an error of backward, what was freed, made or changed may not be the same."""
        last = self.results[-1]
        if isinstance(last, str) and last.startswith(ENDS):
            self.results[-1] = last.removeprefix(ENDS)
            return True
        return last == "changed" and not self._is_steady

    def close(self) -> None:
        """Free everything, hooks on tensors first: they may hold their own graph."""
        for handle in self.handles:
            handle.remove()
        if self.streams is not None:
            self.streams.end()
        if self._other_thread is not None:
            self._other_thread.shutdown()
        device = self.leaves[0].device
        self.values.clear()
        self.leaves.clear()
        # After an error the engine holds the nodes it did not run, until its next backward on this thread,
        # and on its own thread of an accelerator.
        torch.ones((), requires_grad=True).backward()
        torch.ones((), device=device, requires_grad=True).backward()

    # Contexts.

    def enter(self) -> None:
        self.context = self.scope()
        self.context.__enter__()

    def leave(self) -> None:
        context, self.context = self.context, None
        if context is not None:
            context.__exit__(None, None, None)

    def enter_above(self, context: AbstractContextManager[Any]) -> None:
        if self.context is not None and len(self.above) < 3:
            context.__enter__()
            self.above.append(context)

    def leave_above(self) -> None:
        if self.above:
            self.above.pop().__exit__(None, None, None)
        if not self.above and self.context is None:
            self.enter()

    def leave_all(self) -> None:
        while self.above:
            self.above.pop().__exit__(None, None, None)
        self.leave()

    # Steps.

    def step(self, name: str, i: int, j: int) -> Result:
        x, y = (self.values[-1 - k % len(self.values)] for k in (i, j))
        if self.streams is not None:
            self.streams.step(x, y, *self.leaves)
        if name == "drop":
            if len(self.values) > 2:
                del self.values[-1 - i % len(self.values)]
        elif name == "leave and enter":
            if not self.above and self.context is not None:
                self.leave()
                self.enter()
        elif name in LIFE:
            self.gate(name)
        elif x is None or y is None:
            if name in PURE or name in VIEWS:
                self.values.append(None)
        elif name in USES:
            return self.use(name, x, y)
        elif name in ACTS:
            return self.guarded(lambda: ACTS[name](self, x, y, j))
        else:
            return self.compute(name, x, y)
        return None

    def compute(self, name: str, x: Tensor, y: Tensor) -> str | None:
        """Do an operation; a pure one or a view makes one value more, ``None`` where it cannot."""
        if name.startswith("checkpoint") and any(map(_admits_no_checkpoint, self.above)):
            self.values.append(None)
            return None
        changes = name in CHANGES
        self.has_jagged = self.has_jagged or name == "jagged"
        with self.watching(x, y) if changes else nullcontext():
            out = self.guarded(lambda: self.module(COMPUTING[name], x, y))
        if not changes:
            fits = isinstance(out, Tensor) and out.numel() <= MOST_ELEMENTS
            self.values.append(out if fits else None)  # type: ignore[arg-type]
        return out if isinstance(out, str) else None

    def watching(self, *tensors: Tensor) -> AbstractContextManager[None]:
        """Within it, ``tensors`` may be written in place."""
        return nullcontext() if self.knowable is None else self.knowable.watch(*tensors)

    def cut(self) -> None:
        """After this step nothing can be compared."""
        if self.knowable is not None:
            self.knowable.cut = min(self.knowable.cut, self.knowable.step + 1)

    def guarded(self, function: Callable[[], Any]) -> Any:
        """What ``function`` returns, or the name of its error: illegal in every run alike."""
        try:
            return function()
        except EXPECTED as error:
            return _kind_of(error)

    def use(self, name: str, x: Tensor, y: Tensor) -> Result:
        if name == "look":
            return self.attempt(lambda: _look(x))
        if name == "of two":
            total = self.compute("add", x, y)
            return total or self.differentiate(self.values[-1], retain_graph=True)
        if name == "differentiate" and self.has_jagged:
            return None  # of a second graph torch itself keeps what plain hooks gave it, for ever
        if name == "differentiate":
            return self.differentiate(x, create_graph=True)
        if name == "into grad":
            return self.attempt(lambda: self.into_grad(x))
        if name == "backward in a thread":
            return self.in_a_thread(lambda: self.differentiate(x, retain_graph=True))
        return self.differentiate(x, retain_graph=name != "backward")

    def differentiate(self, loss: Tensor | None, **options: bool) -> Result:
        """Gradients of ``loss``; with ``create_graph`` they become values."""
        if loss is None or not loss.requires_grad:
            return None
        further: list[Tensor | None] = [None] * len(self.leaves)

        def grads() -> list[Tensor | None]:
            found = torch.autograd.grad(_total(loss), self.leaves, allow_unused=True, **options)
            if options.get("create_graph"):
                further[:] = [g if g is not None and g.requires_grad else None for g in found]
            return [None if g is None else g.detach().clone() for g in found]

        result = self.attempt(grads)
        if options.get("create_graph"):
            self.values.extend(further)
        if not options.get("retain_graph") and isinstance(result, str):
            return f"{ENDS}{result}"
        return result

    def into_grad(self, loss: Tensor) -> list[Tensor | None]:
        """Twice, so that the second adds to what the first left, with a graph that is kept."""
        for leaf in self.leaves:
            leaf.grad = None
        if loss.requires_grad:
            for _ in range(2):
                _total(loss).backward(retain_graph=True)
        found = [None if leaf.grad is None else leaf.grad.clone() for leaf in self.leaves]
        for leaf in self.leaves:
            leaf.grad = None
        return found

    def attempt(self, grads: Callable[[], list[Tensor | None]]) -> Result:
        try:
            return grads()
        except EXPECTED as error:
            return _kind_of(error)

    # Threads.

    def in_a_thread(self, function: Callable[[], Any]) -> Any:
        """Run on a thread that then ends."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(_then_forget, self._on_this_stream(function)).result()

    def on_the_other_thread(self, function: Callable[[], Any]) -> Any:
        """Run on a thread that lives as long as the program."""
        if self._other_thread is None:
            self._other_thread = ThreadPoolExecutor(1)
        return self._other_thread.submit(_then_forget, self._on_this_stream(function)).result()

    def _on_this_stream(self, function: Callable[[], Any]) -> Callable[[], Any]:
        return function if self.streams is None else self.streams.on_it(function)

    def under_scope(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """``function`` under the program's hooks, for a thread that has none."""

        def scoped() -> Any:
            with self.scope():
                return function()

        return scoped


def _then_forget(function: Callable[[], Any]) -> Any:
    result = function()
    torch.ones((), requires_grad=True).backward()  # see Run.close
    return result


def _admits_no_checkpoint(context: object) -> bool:
    return getattr(context, "admits_no_checkpoint", False)


def _total(loss: Tensor) -> Tensor:
    total = loss.sum()
    return total.real + 2 * total.imag if total.is_complex() else total


def _kind_of(error: BaseException) -> str:
    text = str(error)
    if any(each in text for each in CHANGED):
        return "changed"
    if isinstance(error, RuntimeError):
        return text.split(":")[0].split("\n")[0][:60]
    return type(error).__name__


def _look(x: Tensor) -> list[Tensor | None]:
    """What the node that made it saved: each look unpacks."""
    node = x.grad_fn
    names = [name for name in dir(node) if name in ("_saved_result", "_saved_self")]
    found = [getattr(node, name) for name in names]
    return [each.detach().clone() for each in found if isinstance(each, Tensor)]
