"""The nodes of a graph, in the order in which forward ran, as a tree of modules.

Everything that is drawn as one is a run of consecutive nodes in that order. Merging such runs cannot make
a cycle, whatever calls whatever; that is why a module that is called twice is two runs and not one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ._facts import Facts

__all__ = ["Item", "common_path", "grow", "inferred_paths", "walk"]


@dataclass(slots=True)
class Item:
    """A run of nodes: one, a module's, a repeated one (its children are the first time), or a folded one."""

    kind: str
    """``"op"``, ``"module"``, ``"repeat"`` or ``"fold"``."""
    first: int
    end: int
    path: tuple[str, ...] = ()
    children: list[Item] = field(default_factory=list)
    count: int = 1
    """How many times a repeated run is there."""
    chained: bool = False
    """Whether each time uses what the one before made."""
    last_path: tuple[str, ...] = ()
    """Of a repeated module: the path of the last one."""
    is_small: bool = False
    """Of a module: at most one of its nodes saves anything, and no other module is in it."""
    left_out: bool = False
    """Of a folded run: it was left out for room, and is not just a module that is not opened."""

    @property
    def period(self) -> int:
        """How many nodes one of the repeated runs has."""
        return (self.end - self.first) // self.count


def grow(paths: list[tuple[str, ...]]) -> Item:
    """The tree for nodes of these paths, in order."""
    root = Item("module", 0, len(paths))
    open_items = [root]
    for index, path in enumerate(paths):
        keep = 1 + _shared(open_items[-1].path, path)
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
    """Every item, a parent before its children."""
    ahead = [root]
    while ahead:
        item = ahead.pop()
        yield item
        ahead += reversed(item.children)


def _shared(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """How many names two paths begin with together."""
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


def inferred_paths(facts: Facts) -> list[tuple[str, ...]]:
    """Where nodes have no labels: the paths that the names of their parameters tell.

    A node that uses a named leaf, directly or through nodes that save nothing (a transposed weight), is of
    the module whose leaf it is. What ran between two such nodes is of the innermost module that has both.
    This is a guess, and the drawing says so.
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


def common_path(paths: list[tuple[str, ...]]) -> tuple[str, ...]:
    """The names that all ``paths`` begin with."""
    shared = paths[0]
    for path in paths[1:]:
        shared = shared[: _shared(shared, path)]
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
