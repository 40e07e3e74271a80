"""What the caller calls its tensors, and the classes of its modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn

from ...errors import UsageError

__all__ = ["Names", "Params"]

Params: TypeAlias = "nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]"
_ALLOWED = "allowed are a module, a dict of name to tensor, and (name, tensor) pairs"


class Names:
    """Names of tensors, by identity, while a graph is read."""

    def __init__(self, params: Params | None) -> None:
        self.classes: dict[str, str] = {}
        """The class of each module, by its path, where ``params`` is a module."""
        self.not_reached: list[str] = []
        """Names of leaves that need a gradient and are not in the graph; filled by :meth:`let_go`."""
        self.frozen: list[str] = []
        """Names of tensors that need no gradient; likewise."""
        self._owned: dict[int, tuple[str, Tensor]] = {}
        self._used: set[int] = set()
        for name, tensor in _pairs(params):
            first = self._owned.get(id(tensor), ("", tensor))[0]
            self._owned[id(tensor)] = (f"{first} = {name}" if first else name, tensor)
        if isinstance(params, nn.Module):
            for path, module in params.named_modules():
                self.classes[path] = type(module).__name__

    def of(self, tensor: Tensor) -> str:
        """The name of a leaf; ``""`` where the caller gave none. Two names are joined by ``=``."""
        self._used.add(id(tensor))
        return self._owned.get(id(tensor), ("", tensor))[0]

    def is_parameter(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is an ``nn.Parameter``."""
        return isinstance(tensor, nn.Parameter)

    def made(self) -> Iterator[tuple[str, Tensor]]:
        """The named tensors that are no leaves."""
        for name, tensor in self._owned.values():
            if tensor.grad_fn is not None:
                yield name, tensor

    def let_go(self) -> None:
        """Hold no tensor any longer. Fills ``not_reached`` and ``frozen`` with the names that were not used."""
        for key, (name, tensor) in self._owned.items():
            if key not in self._used and tensor.is_leaf:
                (self.not_reached if tensor.requires_grad else self.frozen).append(name)
        self._owned.clear()


def _pairs(params: Any) -> list[tuple[str, Tensor]]:
    if params is None:
        return []
    if isinstance(params, nn.Module):
        return list(params.named_parameters(remove_duplicate=False))
    if isinstance(params, Tensor) or not isinstance(params, (Mapping, Iterable)):
        raise UsageError(f"params={type(params).__name__}: {_ALLOWED}")
    found = []
    for each in params.items() if isinstance(params, Mapping) else params:
        if not (isinstance(each, tuple) and len(each) == 2 and isinstance(each[1], Tensor)):
            raise UsageError(f"params has an entry of type {type(each).__name__}: {_ALLOWED}")
        found.append((str(each[0]), each[1]))
    return found
