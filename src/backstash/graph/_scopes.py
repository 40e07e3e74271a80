"""Contexts in which saved tensors stay in place: all of them, or those that do not satisfy a predicate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from .._saved.handout import hand_out
from .._text import shown
from .._torch.hook_stack import Pair, current_pair, pop_owned, push, take_all
from .._torch.versions import HeldVersion, Routed
from ..errors import UsageError
from ._mutation import guard_in_place, is_guard

__all__ = ["only", "skip"]


@contextmanager
def skip() -> Iterator[None]:
    """A context in which no hook pair is active, so that saved tensors stay in place.

    torch itself holds them, with its own version check. Contexts entered inside it work as usual. It is also
    a decorator.

    Raises:
        UsageError: at the end, a context entered inside is still active. That one stays active, and the outer
            ones are active again.

    >>> import torch
    >>> from backstash.graph import saved_tensors_hooks
    >>> packed = []
    >>> x = torch.ones(2, requires_grad=True)
    >>> with saved_tensors_hooks(lambda t: packed.append(1) or t.clone(), lambda t: t):
    ...     y = x.exp()
    ...     with skip():
    ...         y = y.exp()
    >>> len(packed)
    1
    """
    outer = take_all()
    guard_in_place()
    try:
        yield
    finally:
        left = [pair for pair in take_all() if not is_guard(pair)]
        for pair in reversed(left + outer):
            push(*pair)
        if left:
            raise UsageError(
                f"skip() was exited before {len(left)} context(s) entered inside it: exit contexts in "
                "the reverse order (the contexts around skip() are active again, and so are these)"
            )


def only(predicate: Callable[[Tensor], bool]) -> _Only:
    """Return a context in which only tensors that satisfy ``predicate`` are packed by the pair around it.

    The others stay in place, and a change in place raises an error when backward needs them. With no pair
    around it, all tensors stay in place.

    Args:
        predicate: ``callable(Tensor) -> bool``; it gets every saved tensor and must not change it.

    Raises:
        UsageError: ``predicate`` cannot be called; or, from ``__exit__``, contexts are left in the wrong
            order.
        InplaceError: from backward, for a tensor that stayed in place and was changed since.

    >>> import torch
    >>> from backstash.graph import saved_tensors_hooks
    >>> packed = []
    >>> x = torch.ones(2, requires_grad=True)
    >>> with saved_tensors_hooks(lambda t: packed.append(t.numel()) or t.clone(), lambda t: t):
    ...     with only(lambda t: t.numel() > 2):
    ...         y = x.exp().repeat(2).exp()
    >>> packed
    [4]
    """
    if not callable(predicate):
        raise UsageError(f"only({shown(predicate)}): allowed is a callable that takes a Tensor")
    return _Only(predicate)


class _Only:
    __slots__ = ("predicate",)

    def __init__(self, predicate: Callable[[Tensor], bool]) -> None:
        self.predicate = predicate

    def __enter__(self) -> None:
        entered = _Chosen(self, self.predicate, current_pair())
        push(entered.pack, entered.unpack)

    def __exit__(self, *args: object) -> None:
        pop_owned(self, "only(...)")


class _Chosen:
    """One entry of ``only``: the outer pair packs and unpacks the chosen tensors, the others are held here."""

    __slots__ = ("left", "outer", "owner", "predicate")

    def __init__(
        self, owner: object, predicate: Callable[[Tensor], bool], outer: Pair | None
    ) -> None:
        self.owner = owner
        self.predicate = predicate
        self.outer = outer

    def pack(self, tensor: Tensor) -> HeldVersion | Routed:
        if self.outer is not None and self.predicate(tensor):
            return Routed(self.outer.unpack, self.outer.pack(tensor))
        return HeldVersion(tensor)

    def unpack(self, packed: HeldVersion | Routed) -> Tensor:
        return hand_out(packed.get())
