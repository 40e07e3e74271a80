"""Side effects of a step: detected while it runs, and undone if it has to run again.

A replayed step repeats its side effects: statistics, ``.grad`` of a backward inside it, a counter in a tensor,
a buffer that it replaces. A dispatch mode sees operations below autograd with the arguments that they write,
and keeps the earlier contents of that memory until they are restored or no longer needed. Effects that no
operation shows, such as those of a custom kernel that writes statistics, are undone in buffers of modules that
were called.

Some backward formulas differ while a dispatch mode is active, and round differently. So in a backward inside
the step, the mode is removed for each node that unpacks what it saved: see :meth:`Effects.leave_to_node`.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.module import register_module_forward_pre_hook

from ..._recompute.operations import place_of
from ..._torch.autocast import kernel_of
from ..._torch.dispatch import SilentMode, dual_level, put_back, take_off
from ..._torch.dynamo import leave_untraced
from ..._torch.engine import current_node, task_or_none
from ..._torch.hook_dicts import call_before_hooks
from ..._torch.mode_bits import NODES_THAT_DIFFER, ModeBits, is_in_jvp
from ..._torch.module_parts import own_buffers, set_buffer
from ..._torch.schemas import has_complex, operation_of, tensors_of
from ..._torch.storages import keep_identity, storage_identity, storage_of
from ..._torch.tensors import is_wrapper_subclass
from ...errors import UsageError

__all__ = ["Effects"]


class Effects(SilentMode):
    """Records the side effects of the code that runs while it is entered.

    Args:
        leaves: leaves whose gradients are always restored: a step may drop a gradient before a backward inside
            it accumulates another.
        ran_before: whether the step ran before, and so has given gradients to leaves.
    """

    def __init__(self, leaves: Iterable[Tensor], *, ran_before: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own: dict[int, object] = {}  # storages made inside, by identity, which this reserves
        self._own_sparse: dict[int, weakref.ref[Tensor]] = {}
        # By place: a tensor, its earlier value and version.
        self._written: dict[Any, tuple[Tensor, Tensor, int]] = {}
        self._grads = {id(leaf): (leaf, leaf.grad) for leaf in leaves}
        self._buffers: dict[tuple[int, str], tuple[nn.Module, str, Tensor]] = {}
        self._ran_before = ran_before
        self._bits = ModeBits()
        self._task = task_or_none()
        self._above = -1
        self._left: Any = None  # the node for which the mode was removed

    def __enter__(self) -> Effects:
        self._handle = register_module_forward_pre_hook(self._called)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._handle.remove()
        self._left = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __bool__(self) -> bool:
        """Return whether there were any side effects."""
        if self._grads or any(
            dict(own_buffers(module)).get(name) is not buffer
            for module, name, buffer in self._buffers.values()
        ):
            return True
        return not all(_is_same(tensor, before) for tensor, before, _ in self._written.values())

    @property
    def accumulated(self) -> list[Tensor]:
        """The leaves to which a backward inside has given gradients."""
        return [leaf for leaf, _ in self._grads.values()]

    def undo(self) -> None:
        """Restore the earlier values. If a write raised a tensor's version, restoring raises it, too."""
        for module, name, buffer in self._buffers.values():
            set_buffer(module, name, buffer)
        for leaf, grad in self._grads.values():
            leaf.grad = grad
        with torch.no_grad():
            for tensor, before, version in reversed(self._written.values()):
                if _is_same(tensor, before):
                    continue  # e.g. an expanded buffer, which cannot be written
                # Batch normalization saves its statistics and writes to them without raising a version.
                target = tensor.data if tensor._version == version else tensor
                if target.shape != before.shape:
                    target.resize_(before.shape)
                target.copy_(before)

    def leave_to_node(self) -> None:
        """Remove the mode while a node of a backward inside the step computes, after it has unpacked.

        The mode still sees the node's hooks, and what a custom function computes. The engine restores the
        thread's modes for the next node, such as one that accumulates a gradient.
        """
        node = current_node()
        if task_or_none() != self._task and not isinstance(node, BackwardCFunction):
            above = take_off(self)
            if above >= 0:
                self._left = node
                call_before_hooks(node, functools.partial(put_back, self, above))

    def leave(self) -> None:
        """Remove the mode until :meth:`come_back`."""
        self._above = take_off(self)

    def come_back(self) -> None:
        """Restore the mode after :meth:`leave`."""
        above, self._above = self._above, -1
        if above >= 0:
            put_back(self, above)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A context in which the mode is removed."""
        above = take_off(self)
        try:
            yield
        finally:
            if above >= 0:
                put_back(self, above)

    def _called(self, module: nn.Module, _: Any) -> None:
        for name, buffer in own_buffers(module):
            if not buffer.is_inference() and (id(module), name) not in self._buffers:
                self._buffers[id(module), name] = module, name, buffer
                self._note(buffer)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See ``TorchDispatchMode``. A subclass is asked first; its own operations then come here."""
        kwargs = kwargs or {}
        if any(each is not Tensor and each is not nn.Parameter for each in types):
            if any(map(is_wrapper_subclass, tensors_of(args))):
                return NotImplemented
        operation = operation_of(func)
        if self._bits.vectors:
            self._bits.look()
        if task_or_none() != self._task:
            self._look_at_node(current_node())
        in_forward_mode = dual_level() >= 0
        if in_forward_mode and operation.has_other_tangents and not is_in_jvp(sys._getframe(1)):
            raise UsageError(
                f"forward-mode AD computes the tangent of {func} differently while checkpoint_loop records the "
                "writes of the step: compute it outside of the loop"
            )
        if operation.writes or operation.train_at >= 0:
            for tensor in operation.written(args, kwargs):
                self._note(tensor)
        if (
            operation.is_seen_by_bits
            or operation.makes_bits
            or operation.may_autocast
            or operation.writes_inside
            or has_complex(args)
            or in_forward_mode
        ):
            with kernel_of(operation, args, kwargs):
                result = func(*args, **kwargs)
                if operation.is_seen_by_bits:
                    result = self._bits.saw(func, args, kwargs, result, depth=2)
        else:
            result = func(*args, **kwargs)
        if operation.lacks_formula:
            operation.check_formula(args, kwargs, result)
        if not operation.is_view:
            self._made(result, args, kwargs)
        return result

    def _look_at_node(self, node: Any) -> None:
        name = type(node).__name__
        if name in NODES_THAT_DIFFER and node is not self._left:
            raise UsageError(
                f"{name} inside the step computes differently while checkpoint_loop records the writes "
                "of the step: it reads tensors that were saved under the step's own hooks, before the "
                "loop, or in torch.func.vjp, jacrev or hessian. Use torch.func.grad, or "
                "torch.autograd.grad without such hooks"
            )
        if name != "AccumulateGrad" or id(node.variable) in self._grads:
            return
        leaf = node.variable
        if self._ran_before and leaf.grad is None:
            raise UsageError(
                "a step that ran a second time called a backward that reached a leaf of shape "
                f"{tuple(leaf.shape)} without a gradient, which step 0 did not: whether the step "
                "cleared a gradient is not known. Make step 0 do the same as this step"
            )
        self._grads[id(leaf)] = leaf, leaf.grad

    def _made(self, result: Any, args: Any, kwargs: Any) -> None:
        """Record the memory that an operation allocated: its results' memory that is not its arguments'."""
        given = {*map(_identity, tensors_of((*args, *kwargs.values())))}
        for each in tensors_of(result):
            storage, identity = storage_of(each), _identity(each)
            if identity in self._own or identity in given:
                continue
            if storage is None:
                self._own_sparse[identity] = weakref.ref(each)
            else:
                self._own[identity] = keep_identity(storage)

    def _note(self, tensor: Tensor) -> None:
        """Save the value of ``tensor``, which may be about to be written."""
        storage = storage_of(tensor)
        if storage is None:  # a sparse tensor
            made = self._own_sparse.get(id(tensor))
            if made is not None and made() is tensor:
                return
            place: Any = id(tensor)
        elif storage_identity(storage) in self._own:
            return
        else:
            place = storage_identity(storage), place_of(tensor)
        if place not in self._written:
            self._written[place] = tensor, tensor.detach().clone(), tensor._version


def _is_same(tensor: Tensor, before: Tensor) -> bool:
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    return is_strided and tensor.shape == before.shape and torch.equal(tensor, before)


def _identity(tensor: Tensor) -> int:
    storage = storage_of(tensor)
    return id(tensor) if storage is None else storage_identity(storage)


leave_untraced(__name__)
