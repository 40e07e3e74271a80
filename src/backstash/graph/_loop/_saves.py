"""Where the saved tensors of one evaluation of a step go: nowhere, or to a stash."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..._saved.handout import hand_out
from ..._torch.func_transforms import let_transforms_pass
from ..._torch.hook_stack import Pair, current_pair
from ..._torch.tensors import is_functorch_wrapped, is_zero_tensor
from ..._torch.versions import HeldVersion
from ...stash import Stash
from ._effects import Effects

__all__ = ["Again", "Saves"]


class Again(Exception):
    """The step must run again: it uses a tensor that was computed outside, or unpacks what it saved."""


class Saves:
    """Handles the tensors that are saved while it is entered. The graph uses it as long as it lives.

    Args:
        stash: holds the tensors. ``None``: they are dropped at once, and unpacking one raises ``Again``.
        is_asked: whether the step itself unpacks saved tensors, so that they stay in place if no stash holds
            them.
    """

    def __init__(self, stash: Stash | None, *, is_asked: bool) -> None:
        self._stash = stash
        self._outer: Pair | None = None
        self._effects: Effects | None = None
        self._storages: dict[int, int] = {}
        self.is_asked = is_asked
        """Whether the step itself unpacks saved tensors."""
        self.has_refused = False
        """Whether the step tried to unpack a dropped tensor."""
        self.seconds = 0.0
        """How many seconds it was entered."""

    @contextmanager
    def entered(self, effects: Effects | None) -> Iterator[None]:
        """Hold or drop the tensors that are saved inside, without ``effects`` seeing that."""
        let_transforms_pass()
        began = time.perf_counter()
        with ExitStack() as stack:
            if self._stash is not None:
                stack.enter_context(self._stash)
                self._outer = current_pair()
            if effects is not None:
                stack.enter_context(effects)
                self._effects = effects
            try:
                with saved_tensors_hooks(self._pack, self._unpack):
                    yield
            finally:
                self._effects = None
        self.seconds = time.perf_counter() - began

    def steps_aside(self) -> None:
        """Remove the mode during a transform of ``torch.func``, whose saved tensors stay in place."""
        if self._effects is not None:
            self._effects.leave()

    def comes_back(self) -> None:
        """Restore the mode after the transform has ended."""
        if self._effects is not None:
            self._effects.come_back()

    def _pack(self, tensor: Tensor) -> Any:
        if self._outer is None:
            return HeldVersion(tensor) if self.is_asked else None
        if not (tensor.is_leaf and tensor.requires_grad) and _has_memory(tensor):
            storage = tensor.untyped_storage()
            self._storages[storage.data_ptr()] = storage.nbytes()
        if self._effects is None:
            return self._outer.pack(tensor)
        with self._effects.aside():
            return self._outer.pack(tensor)

    def _unpack(self, packed: Any) -> Tensor:
        if packed is None:
            self.is_asked = self.has_refused = True
            raise Again
        if self._effects is None:
            return self._value(packed)
        self.is_asked = True
        with self._effects.aside():
            value = self._value(packed)
        self._effects.leave_to_node()
        return value

    def _value(self, packed: Any) -> Tensor:
        return hand_out(packed.get()) if self._outer is None else self._outer.unpack(packed)

    def kept_bytes(
        self, inputs: Iterable[Tensor], returned: Iterable[Tensor], outside: Iterable[Tensor]
    ) -> tuple[int, int]:
        """Return the bytes that the graph keeps alive, each once, and how many of them ``returned`` has too.

        Args:
            inputs: tensors at which the graph begins. It keeps these even if it saves none of them.
            returned: the state that the step returns.
            outside: tensors that live without the graph, and so do not count.
        """
        known = _bytes_by_storage(outside)
        kept = {each: nbytes for each, nbytes in self._storages.items() if each not in known}
        kept |= _bytes_by_storage(inputs)
        shared = kept.keys() & _bytes_by_storage(returned).keys()
        return sum(kept.values()), sum(kept[each] for each in shared)


def _bytes_by_storage(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of ``tensors`` by the address of their storage."""
    found: dict[int, int] = {}
    for each in filter(_has_memory, tensors):
        storage = each.untyped_storage()
        address = storage.data_ptr()
        found[address] = min(found.get(address, 0) + each.nbytes, storage.nbytes())
    return found


def _has_memory(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    return not is_functorch_wrapped(tensor) and not is_zero_tensor(tensor)
