"""Calls in the middle of a call: at the n-th line of backstash, for every n.

A signal's handler runs between two steps of whatever the thread does, and so does a finalizer that the garbage
collector runs. A trace function counts the lines of the package that a thread reaches, and makes a call there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import backstash
from faulty import INPUTS, are_right, forward
from oracle import same_bits

_INSIDE = str(Path(backstash.__file__).parent)
_NOT = str(Path(backstash.__file__).parent / "testing")  # the twin is a test's, and no device's

OTHERS = [(each.detach() * 2).requires_grad_() for each in INPUTS]
WANTED_OTHERS = torch.autograd.grad(forward(OTHERS), OTHERS)


class Caller:
    """Calls ``act`` at the ``at``-th line of this thread, and then no more; a negative one only counts."""

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        self.at = at
        self.count = 0
        self.where = ""
        self.first: dict[str, list[int]] = {}
        """Of a negative one: where each line was reached first, by ``"file.py:function"``."""
        self._act = act
        self._seen: set[object] = set()

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        name = frame.f_code.co_filename
        if not name.startswith(_INSIDE) or name.startswith(_NOT):
            return None
        if event == "line":
            self.count += 1
            if self.at < 0 and (frame.f_code, frame.f_lineno) not in self._seen:
                self._seen.add((frame.f_code, frame.f_lineno))
                place = f"{Path(name).name}:{frame.f_code.co_name}"
                self.first.setdefault(place, []).append(self.count)
            if self.count == self.at:
                self.where = f"{Path(name).name}:{frame.f_lineno} {frame.f_code.co_name}"
                sys.settrace(None)
                self._act()
                return None
        return self._trace

    def __enter__(self) -> Caller:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)


def another_step(stash: backstash.Stash, found: list[str]) -> None:
    """A step on other inputs, and one more use of the graph that the first program is at."""
    with torch.enable_grad(), stash:  # a pack hook runs without grad mode
        loss = forward(OTHERS)
    if not all(map(same_bits, torch.autograd.grad(loss, OTHERS), WANTED_OTHERS)):
        found.append("a wrong gradient of the nested program")


def step_with_a_call_at(at: int, stash: backstash.Stash, what: str) -> tuple[Caller, list[str]]:
    """One step whose ``at``-th line is followed by ``what``; and what is wrong."""
    found: list[str] = []
    held: list[torch.Tensor] = []

    def act() -> None:
        if what == "stats":
            str(stash.stats())
            repr(stash)
        elif what == "close":
            stash.close()
        else:
            another_step(stash, found)
            # Not the graph that is in backward: PyTorch itself waits there for the node that runs.
            if not are_right(torch.autograd.grad(held[0], INPUTS, retain_graph=True)):
                found.append("a wrong gradient of a graph that was held")

    with stash:
        held.append(forward())
    with Caller(at, act) as caller:
        try:
            with stash:
                loss = forward()
            if not are_right(torch.autograd.grad(loss, INPUTS)):
                found.append("a wrong gradient of the first program")
        except backstash.errors.StashClosedError:
            if what != "close":
                raise
    if not are_right(torch.autograd.grad(held[0], INPUTS)):
        found.append("a wrong gradient afterwards")
    return caller, found
