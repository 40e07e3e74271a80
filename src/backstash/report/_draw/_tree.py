"""Arrange a graph's nodes, in the order of forward, as a tree of modules, and fold it until it is readable.

Every box is a run of consecutive nodes in that order. Merging such runs cannot make a cycle, in whatever order
modules call each other. Therefore a module that is called twice is two runs.

:func:`grow` makes the tree from the paths of modules. :func:`choose` decides how deep modules are opened, and
which stretches are left out. Between the two, ``_repeats`` joins equal runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ._facts import Facts

__all__ = [
    "Choice",
    "Item",
    "choose",
    "common_path",
    "grow",
    "inferred_paths",
    "walk",
]

_T = TypeVar("_T", str, int)
_MOST_BOXES = 60
"""The most boxes with ``depth=None``, about as many as a person can read."""
_MOST_ASKED = 240
"""The most boxes with a given ``depth``."""
_LENGTHS = (40, 24, 16, 12, 8, 6, 4)
_VERY_LONG, _LENGTH_OF_VERY_LONG = (
    400,
    12,
)  # of over 400 children, showing more than 12 does not help


@dataclass(slots=True)
class Item:
    """A run of nodes: one node, a module, a repeated run (its children are the first copy), or a folded one."""

    kind: str
    """``"op"``, ``"module"``, ``"repeat"`` or ``"fold"``."""
    first: int
    end: int
    path: tuple[str, ...] = ()
    children: list[Item] = field(default_factory=list)
    number: int = 0
    """Equal for items with the same operations on the same shapes, whatever they use."""
    count: int = 1
    """Number of copies in a repeated run."""
    chained: bool = False
    """Whether each copy uses results of the copy before."""
    last_path: tuple[str, ...] = ()
    """For a repeated module: the path of the last copy."""
    is_small: bool = False
    """For a module: whether at most one of its nodes saves anything, and it contains no other module."""
    left_out: bool = False
    """For a folded run: whether it was left out to save space; if not, it is a module that is not opened."""

    @property
    def period(self) -> int:
        """Number of nodes in one copy of a repeated run."""
        return (self.end - self.first) // self.count


def grow(paths: list[tuple[str, ...]]) -> Item:
    """Return the tree for nodes with these paths, in order."""
    root = Item("module", 0, len(paths))
    open_items = [root]
    for index, path in enumerate(paths):
        keep = 1 + len(common_path([open_items[-1].path, path]))
        while len(open_items) > keep:
            open_items.pop().end = index
        while len(open_items) <= len(path):
            inner = Item("module", index, index, path[: len(open_items)])
            open_items[-1].children.append(inner)
            open_items.append(inner)
        open_items[-1].children.append(Item("op", index, index + 1, path))
    for item in open_items:
        item.end = len(paths)
    return root


def walk(root: Item) -> Iterator[Item]:
    """Yield every item, parents before their children."""
    ahead = [root]
    while ahead:
        item = ahead.pop()
        yield item
        ahead += reversed(item.children)


def inferred_paths(facts: Facts) -> list[tuple[str, ...]]:
    """Return the paths of nodes without labels, inferred from the names of their parameters.

    A node that uses a named leaf, directly or through nodes that save nothing (a transposed weight), belongs to
    the leaf's module. A node that ran between two such nodes belongs to the innermost module that contains
    both. This is a guess, and the notes say so.
    """
    own: list[tuple[str, ...] | None] = []
    from_leaves: list[bool] = []
    for op in facts.ops:
        found = [_module_of_leaf(facts.leaves[leaf].name) for leaf in op.leaves]
        found += [own[source] for source, _ in op.inputs if from_leaves[source]]
        known = [path for path in found if path]
        own.append(common_path(known) if known else None)
        is_view = len(op.leaves) + len(op.inputs) == 1 and not op.held
        from_leaves.append(is_view and bool(known))
    return _filled(own)


def _module_of_leaf(name: str) -> tuple[str, ...] | None:
    first = name.split(" = ", 1)[0]
    return tuple(first.split(".")[:-1]) or None


def common_path(paths: Iterable[tuple[_T, ...]]) -> tuple[_T, ...]:
    """Return the leading names (or numbers) that all ``paths`` share."""
    shared, *others = paths
    for path in others:
        while path[: len(shared)] != shared:
            shared = shared[:-1]
    return shared


def _filled(own: list[tuple[str, ...] | None]) -> list[tuple[str, ...]]:
    after: tuple[str, ...] = ()
    following = [after] * len(own)
    for index in range(len(own) - 1, -1, -1):
        following[index] = after = own[index] or after if own[index] is not None else after
    found: list[tuple[str, ...]] = []
    before: tuple[str, ...] = ()
    seen_any = False
    for index, path in enumerate(own):
        if path is None:
            path = common_path([before, following[index]]) if seen_any else ()
        else:
            before, seen_any = path, True
        found.append(path)
    return found


@dataclass(frozen=True, slots=True)
class Choice:
    """A tree to draw, and how it was folded."""

    root: Item
    depth: int
    """Modules whose path has this many names are one box."""
    deepest: int
    """The depth that would open all modules."""
    left_out: int
    """Number of nodes in stretches that were left out; for repeats, only the first copy counts."""
    closed: int
    """Number of modules that are one box because they are small."""


def choose(root: Item, facts: Facts, depth: int | None) -> Choice:
    """Return the tree to draw, opened to ``depth`` or as far as it stays readable."""
    if depth is None:
        _mark_small(root, facts)
    deepest = 1 + max(len(item.path) for item in walk(root))
    if depth is None:
        chosen, most = _readable_depth(root, facts, deepest), _MOST_BOXES
    else:
        chosen, most = min(depth, deepest), _MOST_ASKED
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
    """Mark small modules. A Linear is a transposition, a product and some views: one box shows as much."""
    for item in walk(root):
        if item.kind == "module" and item.path and all(c.kind == "op" for c in item.children):
            saving = sum(bool(facts.ops[child.first].held) for child in item.children)
            item.is_small = saving <= 1


def _readable_depth(root: Item, facts: Facts, deepest: int) -> int:
    """Return the greatest depth, at least 1, at which a person can read all boxes."""
    depth = 1
    while depth < deepest and _boxes(_opened(root, depth + 1), facts) <= _MOST_BOXES:
        depth += 1
    return depth


def _opened(root: Item, depth: int) -> Item:
    """Return a copy of the tree in which modules at ``depth``, and small ones, are folded."""
    copy = replace(root, children=list(root.children))
    ahead = [copy]
    while ahead:
        item = ahead.pop()
        if item.kind == "module" and (len(item.path) >= depth or item.is_small):
            item.kind, item.children = "fold", []
        for place, each in enumerate(item.children):
            if each.kind != "op":  # operations never change, so they are not copied
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
