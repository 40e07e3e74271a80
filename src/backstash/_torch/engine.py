"""The backward engine: which node runs, in which backward, and what to call at its end.

Names without an argument of their own are PyTorch's functions themselves: a call of one is a call of C.
All of them are in torch 2.11 to 2.15.
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
]

current_node: Callable[[], stock.Node | None] = optional(
    "torch._C._current_autograd_node", lambda: None
)
"""The node that the engine runs on this thread, or ``None``. Where torch lacks the call: ``None``, and
errors, events and logs do not name the node."""

sequence_number: Callable[[], int] = required(
    "torch.autograd._get_sequence_nr", "tells whether an operation has ended"
)
"""The number that this thread's next node will get. Where torch lacks the call, it raises ``UsageError``:
what an operation has yet to fill could be written before it is filled."""

queue_callback: Callable[[Callable[[], None]], None] = required(
    "torch.autograd.Variable._execution_engine.queue_callback", "learns that a backward has ended"
)
"""Has the engine call ``callback()`` when the running backward ends, as DDP and FSDP do. The engine holds
the only reference that it is given, and drops it if backward raises. Where torch lacks the call, it raises
``UsageError``."""

keeps_graph: Callable[[], bool] = optional(
    "torch._C._autograd._get_current_graph_task_keep_graph", lambda: False
)
"""Whether the backward that runs on this thread retains its graph (``retain_graph``, ``create_graph``); True
where none runs. Where torch lacks the call, False: what another backward wants again is then read again."""

_task_id: Callable[[], int] = optional("torch._C._current_graph_task_id", lambda: -1)
_required_task_id: Callable[[], int] = required(
    "torch._C._current_graph_task_id", "tells one backward from another"
)
_will_execute: Callable[[Any], bool] = optional(
    "torch._C._will_engine_execute_node", lambda node: True
)


def in_backward() -> bool:
    """Whether this thread runs inside a backward: a forward called now recomputes a checkpoint.

    Where torch lacks the call, False: a recomputed call then looks like any other call.
    """
    return _task_id() != -1


def task_or_none() -> int:
    """The number of the backward that runs on this thread; -1: none does, or torch lacks the call."""
    return _task_id()


def running_task() -> int:
    """The number of the backward that runs on this thread.

    Raises:
        AssertionError: none runs.
        UsageError: this torch does not tell.
    """
    task = int(_required_task_id())
    if task == -1:
        raise AssertionError("expected this hook to be called inside a backward call")
    return task


def may_execute(node: stock.Node) -> bool:
    """Whether the running backward will run ``node``, or may; where torch lacks the call, it may."""
    try:
        return bool(_will_execute(node))
    except RuntimeError:  # a leaf under autograd.grad: the engine does not tell
        return True


def may_return_saved(node: stock.Node) -> bool:
    """Whether what ``node`` returns may be a tensor that it saved: it is a custom function, in Python or C++.

    PyTorch's own operations compute what they return.
    """
    return isinstance(node, BackwardCFunction) or type(node).__name__ == "CppFunction"


def number_of(node: Any) -> int:
    """The sequence number that ``node`` got when it was made; 0 where it does not tell."""
    number = getattr(node, "_sequence_nr", None)
    return int(number()) if number is not None else 0


def output_metadata(node: Any) -> tuple[Any, ...]:
    """Shape and dtype of each output of the operation that made ``node``, as torch notes them.

    Empty where torch lacks it, and for a custom function's node that outlives its graph in torch 2.11.
    """
    try:
        return tuple(getattr(node, "_input_metadata", ()))  # of the gradients that come in
    except RuntimeError:
        return ()
