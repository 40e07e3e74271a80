"""The backward engine: the running node, the running backward, and callbacks at its end.

Names without an argument of their own are PyTorch's C functions themselves. All of them exist in torch 2.11 to
2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd import graph as stock
from torch.autograd.function import BackwardCFunction

from .lookup import optional, required

__all__ = [
    "current_node",
    "in_backward",
    "keeps_graph",
    "may_execute",
    "may_return_saved",
    "number_of",
    "output_metadata",
    "queue_callback",
    "running_task",
    "sequence_number",
    "task_or_none",
]

current_node: Callable[[], stock.Node | None] = optional(
    "torch._C._current_autograd_node", lambda: None
)
"""Returns the node that the engine runs on this thread, or ``None``. If torch lacks the call: ``None``, and
errors, events and logs do not name the node."""

sequence_number: Callable[[], int] = required(
    "torch.autograd._get_sequence_nr", "detects whether an operation has ended"
)
"""Returns the number that this thread's next node will get. If torch lacks the call, it raises ``UsageError``,
since a tensor that an operation has yet to fill could otherwise be written too early."""

queue_callback: Callable[[Callable[[], None]], None] = required(
    "torch.autograd.Variable._execution_engine.queue_callback", "detects that a backward has ended"
)
"""Makes the engine call ``callback()`` when the running backward ends, as DDP and FSDP do. The engine holds
the only reference to it, and drops it if backward raises. If torch lacks the call, it raises
``UsageError``."""

keeps_graph: Callable[[], bool] = optional(
    "torch._C._autograd._get_current_graph_task_keep_graph", lambda: False
)
"""Whether the backward on this thread retains its graph (``retain_graph``, ``create_graph``); ``True`` if none
runs. If torch lacks the call: ``False``, and another backward reads its blocks again."""

task_or_none: Callable[[], int] = optional("torch._C._current_graph_task_id", lambda: -1)
"""Returns the number of the backward on this thread; -1 if none runs or torch lacks the call."""

_required_task_id: Callable[[], int] = required(
    "torch._C._current_graph_task_id", "distinguishes one backward from another"
)
_will_execute: Callable[[Any], bool] = optional(
    "torch._C._will_engine_execute_node", lambda node: True
)


def in_backward() -> bool:
    """Return whether this thread is inside a backward, so that a forward called now recomputes a checkpoint.

    If torch lacks the call: ``False``, and a recomputing call looks like any other call.
    """
    return task_or_none() != -1


def running_task() -> int:
    """Return the number of the backward on this thread.

    Raises:
        AssertionError: no backward runs.
        UsageError: this torch lacks the call.
    """
    task = int(_required_task_id())
    if task == -1:
        raise AssertionError("expected this hook to be called inside a backward call")
    return task


def may_execute(node: stock.Node) -> bool:
    """Return whether the running backward will or may run ``node``. If torch lacks the call: ``True``."""
    try:
        return bool(_will_execute(node))
    except RuntimeError:  # a leaf under autograd.grad: the engine cannot say
        return True


def may_return_saved(node: stock.Node) -> bool:
    """Return whether ``node`` may return a tensor that it saved: it is a custom function, in Python or C++.

    PyTorch's own operations compute new results.
    """
    return isinstance(node, BackwardCFunction) or type(node).__name__ == "CppFunction"


def number_of(node: Any) -> int:
    """Return the sequence number that ``node`` got at its creation; 0 if unknown."""
    number = getattr(node, "_sequence_nr", None)
    return int(number()) if number is not None else 0


def output_metadata(node: Any) -> tuple[Any, ...]:
    """Return shape and dtype of each output of the operation that created ``node``, as torch records them.

    Empty if torch lacks them, and in torch 2.11 for a custom function's node that outlives its graph.
    """
    try:
        return tuple(getattr(node, "_input_metadata", ()))  # the inputs of a node are gradients
    except RuntimeError:
        return ()
