"""Which leaves are drawn as one box, and which inside the box that uses them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ._drafts import Draft, Drafts
from ._facts import Facts, Leaf
from ._records import DrawnLeaf
from ._text import clean

__all__ = ["LeafBox", "leaves_inside", "place_leaves"]

_MOST_APART = 8
_MOST_INSIDE = 4


@dataclass(slots=True)
class LeafBox:
    """Leaves that are one box: the same one of every repeat, or many of one user."""

    leaves: list[int]
    uses: dict[int, int] = field(default_factory=dict)
    """For each box that uses them, how often."""
    merged: bool = False
    """Whether they are there together only because they were too many."""


def place_leaves(facts: Facts, drafts: Drafts) -> tuple[list[LeafBox], dict[int, list[int]]]:
    """Boxes for leaves; and for each folded box, the leaves that nothing else uses."""
    roots = {root.leaf for root in facts.roots if root.leaf is not None}
    uses: list[dict[int, int]] = [{} for _ in facts.leaves]
    slots: list[list[object]] = [[("leaf", leaf)] for leaf in range(len(facts.leaves))]
    for index, op in enumerate(facts.ops):
        box = drafts.box_of[index]
        for slot, leaf in enumerate(op.leaves):
            uses[leaf][box] = uses[leaf].get(box, 0) + 1
            # The same for each time of a repeated run: what is used there is one box.
            slots[leaf].append((box, index - drafts.start_of[index], slot))
    inside: dict[int, list[int]] = {}
    classes = _Classes()
    for leaf, used in enumerate(uses):
        only = next(iter(used)) if len(used) == 1 and leaf not in roots else None
        if only is not None and drafts.boxes[only].item.kind == "fold":
            inside.setdefault(only, []).append(leaf)
        else:
            classes.add(leaf, slots[leaf])
    return _merged([_box(leaves, uses) for leaves in classes.groups()]), inside


def _box(leaves: list[int], uses: list[dict[int, int]]) -> LeafBox:
    found = LeafBox(leaves)
    for leaf in leaves:
        for box, count in uses[leaf].items():
            found.uses[box] = found.uses.get(box, 0) + count
    return found


def _merged(boxes: list[LeafBox]) -> list[LeafBox]:
    """More than eight boxes that only one and the same box uses become one."""
    users: dict[int, list[LeafBox]] = {}
    for box in boxes:
        if len(box.uses) == 1:
            users.setdefault(next(iter(box.uses)), []).append(box)
    gone: set[int] = set()
    for user, alike in users.items():
        if len(alike) > _MOST_APART:
            leaves = [leaf for box in alike for leaf in box.leaves]
            count = sum(box.uses[user] for box in alike)
            alike[0].leaves, alike[0].uses, alike[0].merged = leaves, {user: count}, True
            gone.update(id(box) for box in alike[1:])
    return [box for box in boxes if id(box) not in gone]


class _Classes:
    """Leaves that share a slot, directly or through others, are of one class."""

    def __init__(self) -> None:
        self._leaf_of: dict[object, int] = {}
        self._parent: dict[int, int] = {}

    def add(self, leaf: int, slots: list[object]) -> None:
        """Join ``leaf`` with all leaves that have one of ``slots``."""
        self._parent[leaf] = leaf
        for slot in slots:
            other = self._find(self._leaf_of.setdefault(slot, leaf))
            own = self._find(leaf)
            if own != other:
                self._parent[max(own, other)] = min(own, other)

    def _find(self, leaf: int) -> int:
        while self._parent[leaf] != leaf:
            self._parent[leaf] = leaf = self._parent[self._parent[leaf]]
        return leaf

    def groups(self) -> list[list[int]]:
        """The classes, in the order of their first leaf."""
        found: dict[int, list[int]] = {}
        for leaf in self._parent:
            found.setdefault(self._find(leaf), []).append(leaf)
        return list(found.values())


def leaves_inside(leaves: list[Leaf], box: Draft) -> tuple[DrawnLeaf, ...]:
    """Rows for the leaves in a box: each by itself while they are few, those of one name together."""
    named: dict[str, list[Leaf]] = {}
    depth = len(box.item.path)
    for leaf in leaves:
        parts = leaf.name.split(".")
        # Each time that a module is repeated, it has another path before the same name.
        inside = len(parts) > depth and (len(box.offsets) > 1 or parts[:depth] == [*box.item.path])
        short = ".".join(parts[depth:]) if inside and " = " not in leaf.name else leaf.name
        named.setdefault(short or ("parameter" if leaf.is_parameter else "leaf"), []).append(leaf)
    if len(named) > _MOST_INSIDE:
        noun = "parameters" if all(leaf.is_parameter for leaf in leaves) else "leaves"
        named = {f"{len(leaves):,} {noun}": leaves}
    return tuple(_inside(name, each) for name, each in named.items())


def _inside(name: str, leaves: list[Leaf]) -> DrawnLeaf:
    shapes, dtypes = {leaf.shape for leaf in leaves}, {leaf.dtype for leaf in leaves}
    return DrawnLeaf(
        name=clean(name),
        shape=shapes.pop() if len(shapes) == 1 else None,
        dtype=dtypes.pop() if len(dtypes) == 1 else "",
        count=len(leaves),
        nbytes=sum(leaf.nbytes for leaf in leaves),
        is_parameter=all(leaf.is_parameter for leaf in leaves),
    )
