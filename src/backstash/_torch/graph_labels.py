"""Which module made a node: written into the node's own metadata while forward runs."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor, nn

from .engine import number_of, sequence_number
from .handle import Handle
from .trees import tree_leaves

__all__ = ["Labels", "label_modules", "module_of"]

_KEY = "backstash.module"
_LEAF = 2**64 - 1  # the sequence number of every AccumulateGrad


class Labels(Handle):
    """The hooks of :func:`label_modules`. After ``remove()``, labels stay on the nodes that have them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._local = threading.local()
        for path, module in model.named_modules():
            self.handles.append(module.register_forward_pre_hook(self._start))
            self.handles.append(module.register_forward_hook(_Label(self, path), always_call=True))

    def _start(self, module: nn.Module, args: Any) -> None:
        self.starts().append(sequence_number())

    def starts(self) -> list[int]:
        """The first sequence number of each module call that runs on this thread."""
        found: list[int] | None = getattr(self._local, "starts", None)
        if found is None:
            found = self._local.starts = []
        return found


class _Label:
    """Labels what one module's call made; inner modules, which end first, have labelled theirs."""

    def __init__(self, labels: Labels, path: str) -> None:
        self.labels = labels
        self.path = path

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        start = self.labels.starts().pop()
        ahead = [each.grad_fn for each in tree_leaves(output) if isinstance(each, Tensor)]
        seen = set()
        while ahead:
            node = ahead.pop()
            if node is None or node in seen or not start <= number_of(node) < _LEAF:
                continue
            seen.add(node)
            metadata: Any = node.metadata
            metadata.setdefault(_KEY, self.path)
            ahead += [following for following, _ in node.next_functions]


def label_modules(model: nn.Module) -> Labels:
    """While the handle lives, each node that a module's forward makes is labelled with the module's path.

    :func:`log_backward` reads the labels. They are in the nodes' own metadata and go with them.

    Args:
        model: its modules, as ``named_modules()`` gives them.

    Returns:
        A handle with ``remove()``, also a context manager.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    >>> with label_modules(model):
    ...     y = model(torch.ones(1, 2))
    >>> module_of(y.grad_fn)
    '1'
    """
    return Labels(model)


def module_of(node: Any) -> str:
    """The path of the module that made ``node``, or ``""`` where it is not labelled."""
    return str(getattr(node, "metadata", {}).get(_KEY, ""))
