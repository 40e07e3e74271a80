"""Saving to a stash for one function, or for one call of ``save_for_backward``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from .._saved.handout import hand_out
from .._text import shown
from .._torch.hook_stack import Pair, current_pair, own_pack, pop_owned, push, replace_current
from .._torch.versions import HeldVersion, Routed
from ..errors import UsageError
from ..stash import Stash
from ..stores import Store
from ._mutation import guard_new_pair

__all__ = ["HookPair", "save_for_backward", "saved_on", "saved_tensors"]

_F = TypeVar("_F")


class HookPair(Protocol):
    """An object with a pack and an unpack hook, such as a ``Stash``."""

    def pack(self, tensor: Tensor) -> Any:
        """Return the object that autograd holds in place of ``tensor``."""

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor that was packed."""


def saved_on(target: Stash | Store | AbstractContextManager[Any]) -> Callable[[_F], _F]:
    """Return a decorator; what the decorated function saves for backward goes to ``target``.

    Args:
        target: a ``Stash``, or a store (``Disk(directory)``), which gets a stash of its own with
            ``min_bytes=0``. Any other context of hooks works too, if it can be entered several times.

    Returns:
        The decorator. Of a subclass of ``torch.autograd.Function`` it makes a subclass whose ``apply`` saves
        to ``target``; of any other callable, a built-in one too, a callable.

    Raises:
        UsageError: ``target``, or the object that is decorated, is something else.

    The idea is from a request in PyTorch's tracker for such a keyword argument of ``save_for_backward``.
    Double backward works, since autograd keeps the history itself.

    >>> import tempfile
    >>> x = torch.eye(3, dtype=torch.float64, requires_grad=True)
    >>> with tempfile.TemporaryDirectory() as directory, Stash(disk=directory, min_bytes=0) as stash:
    ...     inverse = saved_on(stash)(torch.linalg.inv)(x * 2)
    ...     inverse.sum().backward()
    >>> x.grad.diagonal()
    tensor([-0.5000, -0.5000, -0.5000], dtype=torch.float64)
    """
    context = Stash(disk=target, min_bytes=0) if isinstance(target, Store) else target
    if not hasattr(context, "__enter__"):
        raise UsageError(
            f"saved_on({shown(target)}): allowed are a Stash, a store, and a context of hooks"
        )

    def decorate(function: Any) -> Any:
        if isinstance(function, type) and issubclass(function, Function):
            return _saving_class(function, context)
        if not callable(function) or isinstance(function, type):
            raise UsageError(
                f"saved_on(...)({shown(function)}): allowed are a Function and a callable"
            )

        @functools.wraps(function)
        def saving(*args: Any, **kwargs: Any) -> Any:
            with context:
                return function(*args, **kwargs)

        return saving

    return decorate


def _saving_class(function: Any, context: AbstractContextManager[Any]) -> Any:
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        with context:
            return super(saving, cls).apply(*args, **kwargs)

    body: dict[str, Any] = {"apply": classmethod(apply), "__doc__": function.__doc__}
    body["__module__"] = function.__module__
    saving: Any = type(function)(function.__name__, (function,), body)
    return saving


def save_for_backward(ctx: Any, *tensors: Tensor | None, to: HookPair | None = None) -> None:
    """Call ``ctx.save_for_backward(*tensors)``, and choose where the tensors go.

    Args:
        ctx: the context that ``forward`` or ``setup_context`` of a ``torch.autograd.Function`` got.
        tensors: inputs, outputs or intermediates; ``None`` is allowed. Read them in ``backward`` by
            :func:`saved_tensors`. As in torch, only the last call in a ``forward`` counts.
        to: a ``Stash`` or another object with ``pack`` and ``unpack``, used instead of the hooks that are
            active around the call. Default ``None``: the active hooks, if any.

    Raises:
        UsageError: ``to`` has no ``pack`` and ``unpack``. What ``to.pack`` raises comes out of ``apply``.
        RuntimeError: hooks are disabled where ``apply`` is called.

    >>> import tempfile
    >>> class Exp(Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         y = x.exp()
    ...         save_for_backward(ctx, y, to=stash)
    ...         return y
    ...     @staticmethod
    ...     def backward(ctx, grad):
    ...         (y,) = saved_tensors(ctx)
    ...         return grad * y
    >>> x = torch.zeros(2, requires_grad=True)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     stash = Stash(disk=directory, min_bytes=0)
    ...     Exp.apply(x).sum().backward()
    >>> x.grad
    tensor([1., 1.])
    """
    ctx.save_for_backward(*tensors)
    if to is None:
        return
    if not callable(getattr(to, "pack", None)) or not callable(getattr(to, "unpack", None)):
        raise UsageError(
            f"save_for_backward(to={shown(to)}): allowed are a Stash, or a pair with pack and unpack"
        )
    given = [tensor for tensor in tensors if tensor is not None]
    if given:
        if any(ctx.needs_input_grad):
            with saved_tensors_hooks(HeldVersion, HeldVersion.get):
                pass  # this raises if hooks are disabled; _ToSave.__del__ could not
        ctx.to_save = _ToSave(tensors)
        ctx.to_save.prepare(ctx, given, to)


def saved_tensors(ctx: Any) -> tuple[Tensor | None, ...]:
    """Return the tensors that :func:`save_for_backward` saved: ``ctx.saved_tensors``, unpacked at each call."""
    found: tuple[Tensor | None, ...] = ctx.saved_tensors
    return found


class _ToSave(tuple[Any, ...]):
    """The tensors passed to ``save_for_backward``. It is destroyed just before they are saved.

    After ``forward``, torch restores the caller's grad mode, reads the tensors, drops this tuple, and then
    saves the tensors, if there is a graph. So ``__del__`` pushes the pair for the saves, and the last save
    pops that pair. If ``forward`` failed, its context has died before the tuple, and nothing is pushed.
    """

    def prepare(self, ctx: Any, tensors: list[Tensor], to: HookPair) -> None:
        self.ctx = weakref.ref(ctx)
        self.ids = [id(tensor) for tensor in tensors]
        self.to = to

    def __del__(self) -> None:
        ctx = self.ctx() if hasattr(self, "ctx") else None
        if ctx is not None and torch.is_grad_enabled() and any(ctx.needs_input_grad):
            _SavesOfOneCall(self.ids, self.to).activate()


class _SavesOfOneCall:
    """The hook pair for the saves of one ``apply``: it replaces the current pair until the last of them."""

    __slots__ = ("__weakref__", "ids", "left", "owner", "to", "under")

    def __init__(self, ids: list[int], to: HookPair) -> None:
        self.owner = self
        self.ids = ids
        self.to = to
        self.under: Pair | None = None

    def activate(self) -> None:
        self.under = current_pair()
        if self.under is None:
            push(self.pack, self.unpack)
        else:
            pack: Any = functools.partial(self.pack)
            pack.__wrapped__ = own_pack(self.under)
            pack.takes_its_own = True
            replace_current(Pair(pack, self.unpack))
        guard_new_pair()

    def pack(self, tensor: Tensor) -> HeldVersion | Routed:
        # A call that failed between forward and its saves leaves this pair behind until the next save.
        is_ours = bool(self.ids) and self.ids.pop(0) == id(tensor)
        try:
            if is_ours:
                return Routed(self.to.unpack, self.to.pack(tensor))
            self.ids.clear()
            if self.under is not None:
                return Routed(self.under.unpack, self.under.pack(tensor))
            return HeldVersion(tensor)
        except BaseException:
            self.ids.clear()
            raise
        finally:
            if not self.ids:
                self._finish()

    def unpack(self, packed: HeldVersion | Routed) -> Tensor:
        return hand_out(packed.get())

    def _finish(self) -> None:
        if self.under is None:
            pop_owned(self, "save_for_backward(to=...)")
        else:
            replace_current(self.under)
