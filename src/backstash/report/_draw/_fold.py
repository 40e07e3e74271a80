"""Choosing what is drawn: how deep modules are opened, and which stretches are left out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ._facts import Facts
from ._tree import Item, walk

__all__ = ["MOST_ASKED", "MOST_BOXES", "Choice", "choose"]

MOST_BOXES = 60
"""Boxes that a person reads without help: what ``depth=None`` opens modules to."""
MOST_ASKED = 240
"""Boxes that are drawn at most, however deep was asked for."""
_LENGTHS = (40, 24, 16, 12, 8, 6, 4)
_VERY_LONG, _LENGTH_OF_VERY_LONG = 400, 12  # more of so many would not tell more


@dataclass(frozen=True, slots=True)
class Choice:
    """A tree to draw, and how it was folded."""

    root: Item
    depth: int
    """Modules whose path has as many names are one box."""
    deepest: int
    """The depth that would open all of them."""
    left_out: int
    """How many nodes are in stretches that were left out, the first times of repeats only."""
    closed: int
    """How many modules are one box because there is little in them."""


def choose(root: Item, facts: Facts, depth: int | None) -> Choice:
    """The tree to draw: opened to ``depth``, or as far as it stays readable."""
    if depth is None:
        _mark_small(root, facts)
    costs = _costs(root, facts)
    deepest = len(costs) - 1
    if depth is None:
        readable = [each for each in range(1, deepest + 1) if costs[each] <= MOST_BOXES]
        chosen, most = max(readable, default=min(1, deepest)), MOST_BOXES
    else:
        chosen, most = min(depth, deepest), MOST_ASKED
    drawn = _opened(root, chosen)
    left_out = 0
    for length in _LENGTHS:
        if _boxes(drawn, facts) <= most:
            break
        drawn = _opened(root, chosen)
        left_out = _shorten(drawn, length)
    closed = sum(item.kind == "fold" and item.is_small for item in walk(drawn))
    return Choice(drawn, chosen, deepest, left_out, closed)


def _mark_small(root: Item, facts: Facts) -> None:
    """A Linear is a transposition, a product and some views: as one box it says the same."""
    for item in walk(root):
        if item.kind == "module" and item.path and all(c.kind == "op" for c in item.children):
            saving = sum(bool(facts.ops[child.first].held) for child in item.children)
            item.is_small = saving <= 1


def _costs(root: Item, facts: Facts) -> list[int]:
    """How many boxes each depth would draw, from 0 to the one that opens everything."""
    deepest = max((len(item.path) for item in walk(root)), default=0) + 1
    opened = [0] * (deepest + 1)  # boxes that there are from this depth on
    folded = [0] * (deepest + 1)  # boxes that there are at this depth only
    ahead = [root]
    while ahead:
        item = ahead.pop()
        if item.is_small:
            opened[len(item.path)] += 1
            continue
        if item.kind == "op":
            opened[len(item.path) + 1] += 1 + len(facts.ops[item.first].leaves)
        elif item.kind == "module":
            folded[len(item.path)] += 1
        ahead += item.children
    total, costs = 0, []
    for depth in range(deepest + 1):
        total += opened[depth]
        costs.append(total + folded[depth])
    return costs


def _opened(root: Item, depth: int) -> Item:
    """A copy of the tree in which modules at ``depth``, and small ones, are folded."""
    copy = replace(root, children=list(root.children))
    ahead = [copy]
    while ahead:
        item = ahead.pop()
        if item.kind == "module" and (len(item.path) >= depth or item.is_small):
            item.kind, item.children = "fold", []
        for place, each in enumerate(item.children):
            if each.kind != "op":  # those are never changed
                item.children[place] = inner = replace(each, children=list(each.children))
                ahead.append(inner)
    return copy


def _boxes(root: Item, facts: Facts) -> int:
    count = 0
    for item in walk(root):
        if item.kind == "op":
            # Many leaves of one operation are drawn as one.
            count += 1 + min(8, len(facts.ops[item.first].leaves))
        elif item.kind == "fold":
            count += 1
    return count


def _shorten(root: Item, length: int) -> int:
    """Leave out the middle of every list of children that is longer than ``length``."""
    left_out = 0
    for item in walk(root):
        kept = min(length, _LENGTH_OF_VERY_LONG) if len(item.children) > _VERY_LONG else length
        extra = len(item.children) - kept
        if extra <= 0:
            continue
        head = kept // 2
        middle = item.children[head : head + extra + 1]
        gap = Item("fold", middle[0].first, middle[-1].end, item.path)
        gap.left_out = True
        left_out += gap.end - gap.first
        item.children[head : head + extra + 1] = [gap]
    return left_out
