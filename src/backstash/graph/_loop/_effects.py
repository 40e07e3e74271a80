"""What a step does besides computing its state: seen while it runs, and undone where it has to run again.

A step that is run again does again whatever else it does: statistics, ``.grad`` of a backward inside it, a
counter in a tensor, a buffer in whose place it puts another. Operations below autograd are seen by a dispatch
mode, with the arguments that they write; what memory held before is kept until it is put back or forgotten.
What no operation shows, such as a kernel of the program's own that writes statistics, is put back where it is a
buffer of a module that was called.

Some formulas of backward are others while a dispatch mode is active, and round otherwise. So the mode steps
aside for each node of a backward inside the step that takes what it saved: see :meth:`Effects.leave_to_node`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.module import register_module_forward_pre_hook

from ..._recompute.tape import place_of
from ..._torch.dispatch import SilentMode, put_back, take_off, with_lazy_bits
from ..._torch.dynamo import leave_untraced
from ..._torch.engine import current_node, task_or_none
from ..._torch.hook_dicts import call_before_hooks
from ..._torch.mode_bits import ModeBits
from ..._torch.module_parts import own_buffers, set_buffer
from ..._torch.schemas import has_complex, operation_of, tensors_of
from ..._torch.storages import keep_identity, storage_identity, storage_of
from ..._torch.tensors import is_wrapper_subclass
from ...errors import UsageError

__all__ = ["Effects"]

# Nodes that compute in another way while a dispatch mode is active: of all operators that PyTorch lists for its
# own tests (``op_db``) it is those of these, in torch 2.13.
_OTHERWISE = frozenset(("ProdBackward0", "ProdBackward1", "CumprodBackward0", "LinalgDetBackward0"))


class Effects(SilentMode):
    """Those of what runs while it is entered.

    Args:
        leaves: whose gradients are put back whatever becomes of them: a step may drop one before a backward
            inside it accumulates another.
        ran_before: whether the step did, and so has given gradients to leaves.
    """

    def __init__(self, leaves: Iterable[Tensor], *, ran_before: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own: dict[int, object] = {}  # by a storage's identity: what keeps that from another
        self._own_sparse: dict[int, weakref.ref[Tensor]] = {}
        self._seen: set[Any] = set()
        self._written: list[tuple[Tensor, Tensor, int]] = []  # what it held, and its version
        self._grads = {id(leaf): (leaf, leaf.grad) for leaf in leaves}
        self._buffers: dict[tuple[int, str], tuple[nn.Module, str, Tensor]] = {}
        self._ran_before = ran_before
        self._bits = ModeBits()
        self._task = task_or_none()
        self._above = -1
        self._left: Any = None  # the node that it left to compute

    def __enter__(self) -> Effects:
        self._handle = register_module_forward_pre_hook(self._called)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._handle.remove()
        self._left = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __bool__(self) -> bool:
        """Whether anything was done."""
        if self._grads or any(
            dict(own_buffers(module)).get(name) is not buffer
            for module, name, buffer in self._buffers.values()
        ):
            return True
        return not all(_is_same(tensor, before) for tensor, before, _ in self._written)

    @property
    def accumulated(self) -> list[Tensor]:
        """The leaves that a backward inside has given gradients to."""
        return [leaf for leaf, _ in self._grads.values()]

    def undo(self) -> None:
        """Put back what was there before. A tensor whose version rose with the write rises again."""
        for module, name, buffer in self._buffers.values():
            set_buffer(module, name, buffer)
        for leaf, grad in self._grads.values():
            leaf.grad = grad
        with torch.no_grad():
            for tensor, before, version in reversed(self._written):
                if _is_same(tensor, before):
                    continue  # an expanded buffer, for one, cannot be written
                # Batch normalization saves its statistics and changes them, and no version rises.
                target = tensor.data if tensor._version == version else tensor
                if target.shape != before.shape:
                    target.resize_(before.shape)
                target.copy_(before)

    def leave_to_node(self) -> None:
        """A node of the graph has taken what it saved; in a backward inside the step it is not seen computing.

        The node's own hooks are seen, and what a function of one's own computes. For the next node, such as one
        that accumulates a gradient, the engine puts the thread's modes back.
        """
        node = current_node()
        if task_or_none() != self._task and not isinstance(node, BackwardCFunction):
            above = take_off(self)
            if above >= 0:
                self._left = node
                call_before_hooks(node, functools.partial(put_back, self, above))

    def leave(self) -> None:
        """See nothing more, until :meth:`come_back`."""
        self._above = take_off(self)

    def come_back(self) -> None:
        """See again what is done."""
        above, self._above = self._above, -1
        if above >= 0:
            put_back(self, above)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Nothing is seen inside."""
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
        """See ``TorchDispatchMode``. A subclass is asked first: its operations come here then."""
        kwargs = kwargs or {}
        if any(each is not Tensor and each is not nn.Parameter for each in types):
            if any(map(is_wrapper_subclass, tensors_of(args))):
                return NotImplemented
        operation = operation_of(func)
        if self._bits.is_asked:
            self._bits.look()
        if task_or_none() != self._task:
            self._look_at_node(current_node())
        if operation.writes or operation.train_at >= 0:
            for tensor in operation.written(args, kwargs):
                self._note(tensor)
        if not operation.is_product and not has_complex(args):
            result = func(*args, **kwargs)
        else:
            with with_lazy_bits():
                result = func(*args, **kwargs)
                result = self._bits.saw(func, args, kwargs, result, depth=2)
        if not operation.is_view:
            self._made(result, args, kwargs)
        return result

    def _look_at_node(self, node: Any) -> None:
        name = type(node).__name__
        if name in _OTHERWISE and node is not self._left:
            raise UsageError(
                f"{name} inside the step computes otherwise while what the step writes is watched: it takes "
                "what was saved under hooks of the step's own, before the loop, or in torch.func.vjp, jacrev "
                "or hessian. Use torch.func.grad, or torch.autograd.grad without such hooks"
            )
        if name != "AccumulateGrad" or id(node.variable) in self._grads:
            return
        leaf = node.variable
        if self._ran_before and leaf.grad is None:
            raise UsageError(
                f"a step that was run again went backward inside, to a leaf of shape {tuple(leaf.shape)} that "
                "has no gradient and that step 0 gave none: whether the step dropped one is not known. Let "
                "step 0 do what this one does"
            )
        self._grads[id(leaf)] = leaf, leaf.grad

    def _made(self, result: Any, args: Any, kwargs: Any) -> None:
        """Note the memory that an operation has made: what it returns, but for what it was given."""
        for each in tensors_of(result):
            storage = storage_of(each)
            identity = id(each) if storage is None else storage_identity(storage)
            if identity in self._own or identity in map(_identity, tensors_of(args)):
                continue
            if kwargs and identity in map(_identity, tensors_of((*kwargs.values(),))):
                continue
            if storage is None:
                self._own_sparse[identity] = weakref.ref(each)
            else:
                self._own[identity] = keep_identity(storage)

    def _note(self, tensor: Tensor) -> None:
        """It may be written."""
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
        if place not in self._seen:
            self._seen.add(place)
            self._written.append((tensor, tensor.detach().clone(), tensor._version))


def _is_same(tensor: Tensor, before: Tensor) -> bool:
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    return is_strided and tensor.shape == before.shape and torch.equal(tensor, before)


def _identity(tensor: Tensor) -> int:
    storage = storage_of(tensor)
    return id(tensor) if storage is None else storage_identity(storage)


leave_untraced(__name__)
