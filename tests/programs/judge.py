"""The verdict: equal to the bit, or an error where plain PyTorch raises or the value cannot be known.

Two references. Plain PyTorch gives bits or raises. Where it raises because of a change in place, and where
a write was unseen, the same program with every saved storage cloned says what the gradient would be.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from oracle import same_bits

from .knowable import NEVER, Knowable
from .places import CPU, Place
from .run import Result, Run, Step
from .ways import WAYS, Way, run_in

# What torch says of the second backward through a part under selective checkpointing.
_ONCE = "Trying to backward an extra time"


class Wrong(AssertionError):
    """A stash changed what a program gives."""


class Verdict:
    """What plain PyTorch says of a program, to which runs under a stash are held."""

    def __init__(self, steps: list[Step], place: Place = CPU) -> None:
        self.steps, self.place = steps, place
        take_hooks_away()
        plain = Run(nullcontext, **place.of(steps))
        try:
            self.plain = plain.run(steps)
        finally:
            plain.close()
        self._leaves_hooks = bool(take_hooks_away())
        self.knowable = Knowable()
        self._waiting: list[_Clone] = []
        true = Run(self._cloned, knowable=self.knowable, after=self._step_ended, **place.of(steps))
        try:
            self.true = true.run(steps)
        finally:
            true.close()
        self.has_races = bool(place.races())

    def _cloned(self) -> Any:
        """Every saved tensor's storage cloned, at each end: slow, and true whatever is changed in place."""

        def pack(tensor: Tensor) -> _Clone:
            self.knowable.saved(tensor)
            clone = _Clone(tensor)
            if tensor.requires_grad or type(tensor) is not Tensor:
                clone.settle()
            else:  # the operation may still fill it, as rrelu its noise
                self._waiting.append(clone)
            return clone

        return saved_tensors_hooks(pack, _Clone.give)

    def _step_ended(self) -> None:
        while self._waiting:
            self._waiting.pop().settle()

    def check(self, name: str, way: Way, directory: str) -> None:
        """Run under a stash of ``way``; raises :class:`Wrong`."""
        if way.leaves_out.intersection(step[0] for step in self.steps):
            return
        take_hooks_away()
        try:
            found = run_in(way, self.steps, directory, self.place)
        except AssertionError as error:
            raise Wrong(f"{name}: {error}") from error
        if (races := self.place.races()) and not self.has_races:
            raise Wrong(f"{name}: {races[0]}")
        if take_hooks_away() and not self._leaves_hooks:
            raise Wrong(f"{name}: it left hooks, where plain PyTorch leaves none")
        cut = self.knowable.cut if way.chance is not None or self.place is not CPU else NEVER
        for got in found:
            if len(got) < min(len(self.plain), cut):
                raise Wrong(f"{name}: {got[-1]!r} ended it, where plain PyTorch goes on")
            for number, (mine, theirs) in enumerate(zip(got, self.plain, strict=False)):
                if number >= cut or str(theirs).startswith("aten._nested"):
                    break  # plain cannot rebuild a changed nested tensor, and its graph is as it was
                said = self.difference(number, mine, theirs, raises=way.around != "mutation")
                if said:
                    step = self.steps[number][0] if number < len(self.steps) else "the end"
                    raise Wrong(f"{name}, step {number} ({step}): {said}")

    def difference(self, number: int, mine: Result, theirs: Result, *, raises: bool) -> str:
        """What is wrong with a result, in words; ``""`` for nothing."""
        true = self.true[number] if number < len(self.true) else None
        if number >= self.knowable.unseen_from and (not agree(theirs, true) or agree(mine, true)):
            return ""  # two values, and neither is the true one; or they are too near to be distinguished
        if theirs == "changed":
            if (mine == "changed" and raises) or agree(mine, true):
                return ""
            return (
                f"{_short(mine)}, where plain PyTorch raises and the value would be {_short(true)}"
            )
        if str(mine).startswith(_ONCE) and "changed" in self.plain[:number]:
            return ""  # where plain was refused, a stash gave gradients, and that was the one time
        if isinstance(theirs, str) or theirs is None or isinstance(mine, str) or mine is None:
            return "" if mine == theirs else f"{_short(mine)}, where plain gives {_short(theirs)}"
        if len(mine) != len(theirs) or not all(map(same_bits, mine, theirs)):
            return f"other bits than plain PyTorch's: {_short(mine)} for {_short(theirs)}"
        return ""


class _Clone:
    """A saved tensor on a storage of its own."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()

    def settle(self) -> None:
        """From now on, what happens to the tensor is not seen."""
        self._tensor = with_its_storage(self._tensor)

    def give(self) -> Tensor:
        """A clone, which the code that gets it may change."""
        return with_its_storage(self._tensor)


def judge(steps: list[Step], directory: str, ways: dict[str, Way] = WAYS) -> None:
    """Run a program under a stash of each of ``ways``; raises :class:`Wrong` at the first that differs."""
    verdict = Verdict(steps)
    for name, way in ways.items():
        verdict.check(name, way, directory)


def take_hooks_away() -> int:
    """Pop what a program left, and say how many pairs.

    torch's checkpoint that an error ended pops its own when it is collected.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        gc.collect()
    count = 0
    while torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        count += 1
    return count


def agree(mine: Result, true: Result) -> bool:
    """Whether they are as good as equal: the alignment of clones may differ, and so the order of a sum."""
    if not isinstance(mine, list) or not isinstance(true, list):
        return type(mine) is type(true) and mine == true
    return len(mine) == len(true) and all(map(_close, mine, true))


def _close(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    eps = torch.finfo(one.dtype).eps if one.is_floating_point() or one.is_complex() else 0.0
    return torch.allclose(one, other, rtol=4096 * eps, atol=256 * eps, equal_nan=True)


def with_its_storage(tensor: Tensor) -> Tensor:
    """``tensor`` on a clone of its storage: every other view of it is left behind."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or not tensor.numel():
        return tensor.detach().clone()
    try:
        storage = tensor.untyped_storage().clone()
        out = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            storage, tensor.storage_offset(), tensor.shape, tensor.stride()
        )
    except (RuntimeError, NotImplementedError):  # within a transform there is no storage
        return tensor.detach().clone()
    out = torch._neg_view(out) if tensor.is_neg() else out
    return out.conj() if tensor.is_conj() else out


def _short(result: Result) -> str:
    if isinstance(result, list):
        return str([None if each is None else each.flatten()[:3].tolist() for each in result])
    return repr(result)
