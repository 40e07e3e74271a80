"""``saved_tensors_hooks``: torch's context, with checks, and composition on request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph as stock

from .._torch.hook_stack import Pair, current_pair, pop_owned, push
from .._torch.storages import storage_identity, storage_of
from .._torch.trees import tree_leaves, tree_map_only
from .._torch.versions import Routed, changed_in_place, running_node, version_of
from ..errors import UsageError

__all__ = ["Packed", "saved_tensors_hooks"]

_CONTAINERS = (tuple, list, dict)


class saved_tensors_hooks(stock.saved_tensors_hooks):
    """A context in which saved tensors go through ``pack_hook`` and come back through ``unpack_hook``.

    As with ``torch.autograd.graph.saved_tensors_hooks``, autograd uses the innermost pair, a context may be
    entered again, and exceptions of hooks keep their type. Unlike with torch's, a wrong hook is an error,
    not a wrong gradient (see *Raises*), and an identity ``pack_hook`` leaks no memory.

    Args:
        pack_hook: ``callable(Tensor) -> object``; must not change its argument.
        unpack_hook: ``callable(object) -> Tensor``; returns a tensor equal to the one that was packed. It may
            be called several times with one object, which it must not change.
        compose: whether the tensors inside the object that ``pack_hook`` returns (any pytree) are packed by
            the pair that is active around this context, if there is one. Default ``False``.

    Raises:
        UsageError: from backward, when ``unpack_hook`` returns another shape, dtype or device than was
            packed, or changes its argument in place; from ``__exit__``, when contexts are left in the
            wrong order. In either case the graph and the other contexts are as they were.
        InplaceError: from backward, when ``pack_hook`` returned the tensor or an alias of it, and the
            tensor was changed in place since.
        RuntimeError: from ``__enter__``, where hooks are disabled.

    >>> to_half = lambda t: t.half()
    >>> x = torch.tensor([1.5, 2.5], requires_grad=True)
    >>> with saved_tensors_hooks(lambda t: t.detach().numpy(), torch.from_numpy):  # could be a file
    ...     with saved_tensors_hooks(to_half, lambda t: t.float(), compose=True):
    ...         y = (x * x).sum()
    >>> y.backward()
    >>> x.grad
    tensor([3., 5.])
    """

    def __init__(
        self,
        pack_hook: Callable[[Tensor], Any],
        unpack_hook: Callable[[Any], Tensor],
        *,
        compose: bool = False,
    ) -> None:
        super().__init__(pack_hook, unpack_hook)
        self.compose = compose

    def __enter__(self) -> None:
        outer = current_pair() if self.compose else None
        entered = _Entered(self, self.pack_hook, self.unpack_hook, outer)
        push(entered.pack, entered.unpack)

    def __exit__(self, *args: object) -> None:
        pop_owned(self, f"saved_tensors_hooks({_name(self.pack_hook)}, {_name(self.unpack_hook)})")


class Packed:
    """What autograd holds: the pack hook's object, and the shape, dtype and device to unpack to."""

    __slots__ = ("alias_version", "device", "dtype", "shape", "value")

    def __init__(self, tensor: Tensor, value: Any) -> None:
        self.value = value
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.shape = None if tensor.is_nested else tensor.shape
        self.alias_version = version_of(value) if _is_alias(value, tensor) else None

    @property
    def packed_inside(self) -> Any:
        """The first tensor in the packed object, or the object, to describe it without unpacking."""
        leaves = tree_leaves(self.value)
        found = (
            leaf for leaf in leaves if isinstance(leaf, Tensor) or hasattr(leaf, "packed_inside")
        )
        return next(found, leaves)


class _Entered:
    """One entry of a context: its hooks, and the pair they compose with."""

    __slots__ = ("left", "outer", "owner", "pack_hook", "unpack_hook")

    def __init__(
        self,
        owner: object,
        pack_hook: Callable[[Tensor], Any],
        unpack_hook: Callable[[Any], Tensor],
        outer: Pair | None,
    ) -> None:
        self.owner = owner
        self.pack_hook = pack_hook
        self.unpack_hook = unpack_hook
        self.outer = outer

    def pack(self, tensor: Tensor) -> Packed:
        value = self.pack_hook(tensor)
        if value is tensor and not tensor.is_leaf:
            value = tensor.detach()  # an operation's output would keep its own node alive
        packed = Packed(tensor, value)
        outer = self.outer
        if outer is not None:
            packed.value = tree_map_only(
                Tensor, lambda leaf: Routed(outer.unpack, outer.pack(leaf)), value
            )
        return packed

    def unpack(self, packed: Packed) -> Tensor:
        value = packed.value
        if self.outer is not None:
            value = tree_map_only(Routed, Routed.get, value)
        elif packed.alias_version not in (None, version_of(value)):
            raise changed_in_place(value, packed.alias_version)
        versions = _versions(value)
        tensor = self.unpack_hook(value)
        if versions != _versions(value):
            raise UsageError(
                f"unpack hook {_name(self.unpack_hook)} changed its argument in place{running_node()}; "
                "it may be called again with the same object, so it must work on a copy"
            )
        if isinstance(tensor, Tensor):
            self._check(packed, tensor)
        return tensor

    def _check(self, packed: Packed, tensor: Tensor) -> None:
        expected = (packed.dtype, packed.device, packed.shape)
        got = (tensor.dtype, tensor.device, None if packed.shape is None else tensor.shape)
        for what, want, have in zip(("dtype", "device", "shape"), expected, got, strict=True):
            if want != have:
                shown = [tuple(v) if isinstance(v, torch.Size) else v for v in (have, want)]
                raise UsageError(
                    f"unpack hook {_name(self.unpack_hook)} returned a tensor of {what} {shown[0]}"
                    f"{running_node()}; the one that {_name(self.pack_hook)} packed has {what} "
                    f"{shown[1]}: unpack_hook(pack_hook(t)) must be like t"
                )


def _versions(value: Any) -> list[int | None]:
    """Return the versions of the tensors inside a packed object, as far as it is a plain container."""
    if isinstance(value, Tensor):
        return [version_of(value)]
    if type(value) in _CONTAINERS:
        return [version_of(leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return []


def _is_alias(value: Any, tensor: Tensor) -> bool:
    if value is tensor:
        return True
    if not isinstance(value, Tensor) or type(tensor) not in (Tensor, torch.nn.Parameter):
        return False
    one, other = storage_of(value), storage_of(tensor)
    if one is None or other is None:  # layouts without a storage
        return False
    return storage_identity(one) == storage_identity(other)


def _name(hook: Any) -> str:
    code = getattr(hook, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return f"{getattr(hook, '__qualname__', None) or type(hook).__name__}{where}"
