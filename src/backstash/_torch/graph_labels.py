"""Label each node with the module that created it, in the node's own metadata, while forward runs."""

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
    """The hooks of :func:`label_modules`. After ``remove()``, existing labels stay on their nodes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._local = threading.local()
        for path, module in model.named_modules():
            self.handles.append(module.register_forward_pre_hook(self._start))
            self.handles.append(module.register_forward_hook(_Label(self, path), always_call=True))

    def _start(self, module: nn.Module, args: Any) -> None:
        self.starts().append((module, sequence_number()))

    def starts(self) -> list[tuple[nn.Module, int]]:
        """Return each module that is running on this thread, with the first sequence number of its call."""
        found: list[tuple[nn.Module, int]] | None = getattr(self._local, "starts", None)
        if found is None:
            found = self._local.starts = []
        return found


class _Label:
    """Labels the nodes of one module call. Inner modules end first and have already labelled theirs."""

    def __init__(self, labels: Labels, path: str) -> None:
        self.labels = labels
        self.path = path

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        starts = self.labels.starts()
        if not starts or starts[-1][0] is not module:
            return  # another pre-hook raised before this call was recorded
        _, start = starts.pop()
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
    """Label each node that a module's forward creates with the module's path, until the handle is removed.

    :func:`log_backward` reads the labels. They are stored in the metadata of the nodes and die with them.

    Args:
        model: the model, whose modules are those of ``named_modules()``.

    Returns:
        A handle with ``remove()``, which is also a context manager.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    >>> with label_modules(model):
    ...     y = model(torch.ones(1, 2))
    >>> module_of(y.grad_fn)
    '1'
    """
    return Labels(model)


def module_of(node: Any) -> str:
    """Return the path of the module that created ``node``, or ``""`` if it has no label."""
    return str(getattr(node, "metadata", {}).get(_KEY, ""))
