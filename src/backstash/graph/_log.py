"""``log_backward``: record what each node of a graph does in backward, as rows and as log records."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .._text import clean
from .._torch.engine import current_node
from .._torch.graph_labels import module_of
from .._torch.graph_walk import Outputs, iter_graph
from .._torch.handle import Handle
from .._torch.node_saves import SavedValue, saved
from ..stash import Stash

__all__ = ["BackwardLog", "NodeRun", "log_backward"]


@dataclass(frozen=True, slots=True)
class NodeRun:
    """What one node did in one backward."""

    node: str
    """The node's name, ``"MulBackward0"``."""
    module: str
    """The path of the module that created it (see :func:`label_modules`), or of the parameter whose gradient
    it accumulates; ``""`` if neither is known."""
    gradients: tuple[tuple[int, ...] | None, ...]
    """The shapes of the gradients that it got; ``None`` for an undefined one."""
    norms: tuple[float | None, ...]
    """Their Euclidean norms; empty with ``norms=False``."""
    unpacked: tuple[SavedValue, ...]
    """The tensors that it saved, and where their bytes were when it began."""
    seconds: float | None
    """Seconds from its first hook to its last: unpacking and computing. ``None`` if it did not end."""
    waited_seconds: float | None
    """How many of these seconds it waited for the stash; ``None`` without a stash."""


class BackwardLog(Handle):
    """The handle that :func:`log_backward` returns, with the rows so far. ``remove()`` keeps the rows."""

    def __init__(
        self, *, norms: bool, stash: Stash | None, logger: logging.Logger, level: int
    ) -> None:
        super().__init__()
        self._norms = norms
        self._stash = stash
        self._logger = logger
        self._level = level
        self._lock = threading.Lock()
        self._rows: list[NodeRun] = []
        self._running: dict[tuple[int, int], tuple[int, float, float]] = {}

    @property
    def rows(self) -> tuple[NodeRun, ...]:
        """One row for each node that ran, in the order in which they began."""
        with self._lock:
            return tuple(self._rows)

    def watch(self, node: Any, module: str) -> None:
        """Register the hooks of one node."""
        # The hooks must not hold the node, which holds them: they look it up when it runs.
        before = functools.partial(self._before, id(node), node.name(), module)
        self.handles.append(node.register_prehook(before))
        self.handles.append(node.register_hook(functools.partial(self._after, id(node))))

    def _waited(self) -> float:
        return self._stash.stats().unpack_stall_seconds if self._stash is not None else 0.0

    def _before(self, key: int, name: str, module: str, grads: Sequence[Tensor | None]) -> None:
        node = current_node()
        shapes = tuple(None if grad is None else tuple(grad.shape) for grad in grads)
        norms = tuple(_norm(grad) for grad in grads) if self._norms else ()
        unpacked = saved(node) if node is not None else ()
        row = NodeRun(name, module, shapes, norms, unpacked, None, None)
        waited = self._waited()
        with self._lock:
            self._rows.append(row)
            self._running[threading.get_ident(), key] = (
                len(self._rows) - 1,
                time.perf_counter(),
                waited,
            )

    def _after(self, key: int, grad_inputs: Any, grad_outputs: Any) -> None:
        ended = time.perf_counter()
        waited = self._waited()
        with self._lock:
            begun = self._running.pop((threading.get_ident(), key), None)
            if begun is None:
                return
            index, started, waited_before = begun
            row = self._rows[index] = replace(
                self._rows[index],
                seconds=ended - started,
                waited_seconds=waited - waited_before if self._stash is not None else None,
            )
        self._logger.log(self._level, "%s", _line(row))


def log_backward(
    outputs: Outputs,
    *,
    model: nn.Module | None = None,
    stash: Stash | None = None,
    norms: bool = True,
    logger: logging.Logger | None = None,
    level: int = logging.DEBUG,
) -> BackwardLog:
    """Record each node of a graph that backward runs, from now on until ``remove()``.

    ``torch.autograd.graph`` has a private function for this, used when its logger is at DEBUG; this one also
    records times, norms, and the tensors that were unpacked.

    Args:
        outputs: the tensors that backward starts from, as for :func:`iter_graph`.
        model: its parameters' paths name the nodes that accumulate their gradients. Default ``None``.
        stash: the stash whose waits are recorded. Default ``None``.
        norms: whether the norm of every gradient is computed, which waits for an accelerator. Default
            ``True``.
        logger: gets one record for each node that ends. Default: the logger ``"backstash.graph"``.
        level: the level of these records. Default ``logging.DEBUG``.

    Returns:
        A handle with ``rows`` and ``remove()``, which is also a context manager. If a backward raises, the
        row of the node that failed has no ``seconds``.

    >>> x = torch.ones(2, requires_grad=True)
    >>> loss = x.exp().sum()
    >>> with log_backward(loss) as log:
    ...     loss.backward()
    >>> [(row.node, row.gradients) for row in log.rows][:2]
    [('SumBackward0', ((),)), ('ExpBackward0', ((2,),))]
    """
    log = BackwardLog(
        norms=norms,
        stash=stash,
        logger=logger if logger is not None else logging.getLogger("backstash.graph"),
        level=level,
    )
    named = {} if model is None else {id(p): name for name, p in model.named_parameters()}
    for node in iter_graph(outputs):
        variable = getattr(node, "variable", None)
        log.watch(node, named.get(id(variable), "") or module_of(node))
    return log


def _norm(grad: Tensor | None) -> float | None:
    if grad is None or grad.layout is not torch.strided:
        return None
    return float(torch.linalg.vector_norm(grad.detach()))


def _line(row: NodeRun) -> str:
    names = ", ".join(f"{value.name} {value.shape} {value.where}" for value in row.unpacked)
    norms = ", ".join("none" if norm is None else f"{norm:.3g}" for norm in row.norms)
    waited = f", waited {row.waited_seconds:.2g} s" if row.waited_seconds is not None else ""
    return clean(
        f"{row.node}{' of ' + row.module if row.module else ''}: gradients {list(row.gradients)}"
        f"{' norms ' + norms if norms else ''}; unpacked [{names}]; {row.seconds:.2g} s{waited}"
    )
