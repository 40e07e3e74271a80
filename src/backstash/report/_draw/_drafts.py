"""Turn a folded tree into boxes and frames, with the nodes and leaves of the graph that each stands for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from ._facts import Facts, Leaf
from ._records import DrawnGroup, DrawnLeaf, agreed, path_around
from ._text import clean, relative
from ._tree import Item

__all__ = ["Draft", "Drafts", "LeafBox", "draft", "leaves_inside", "place_leaves"]

_MOST_NAMES = 3
_MOST_SEPARATE = 8
_MOST_INSIDE = 4


@dataclass(slots=True)
class Draft:
    """A box: the run of nodes that it shows, and the copies of that run."""

    item: Item
    group: int | None
    repeats: int
    offsets: list[int]
    """The distance, in nodes, from the shown run to every copy that the box stands for; the first is 0."""

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield the first node and the end of every run."""
        for offset in self.offsets:
            yield self.item.first + offset, self.item.end + offset


@dataclass(slots=True)
class Drafts:
    """All boxes that stand for nodes, and the frames."""

    boxes: list[Draft] = field(default_factory=list)
    groups: list[DrawnGroup] = field(default_factory=list)
    box_of: list[int] = field(default_factory=list)
    """For each node of the graph, its box."""
    start_of: list[int] = field(default_factory=list)
    """For each node of the graph, the first node of its run."""
    copies_of: list[tuple[int, ...]] = field(default_factory=list)
    """For each node, the number of its copy in each repeat around it, outermost repeat first."""
    repeats_of: list[tuple[int, ...]] = field(default_factory=list)
    """For each box, the repeats around it, outermost first."""


@dataclass(slots=True)
class _Visit:
    item: Item
    group: int | None
    repeats: tuple[int, ...]
    offsets: list[int]
    copies: list[tuple[int, ...]]
    times: Item | None = None
    """The repeat whose only child this is; the two have one frame together."""


def draft(root: Item, classes: dict[str, str]) -> Drafts:
    """Return boxes and frames for ``root``; ``classes`` has the class of each module by its path."""
    found = Drafts([], [], [0] * root.end, [0] * root.end, [()] * root.end)
    repeats = 0
    ahead = [_Visit(root, None, (), [0], [()])] if root.end else []
    while ahead:
        visit = ahead.pop()
        item = visit.item
        if not item.children:
            _add_box(found, visit)
            continue
        group = visit.group
        if item.kind == "repeat":
            _repeat(visit, repeats)
            repeats += 1
        if _has_frame(item, visit.times):
            group = len(found.groups)
            found.groups.append(_frame(visit, classes, path_around(visit.group, found.groups)))
        times = item if item.kind == "repeat" and len(item.children) == 1 else None
        for child in reversed(item.children):
            inner = _Visit(child, group, visit.repeats, visit.offsets, visit.copies, times)
            ahead.append(inner)
    return found


def _repeat(visit: _Visit, number: int) -> None:
    item = visit.item
    times = range(item.count)
    visit.offsets = [each + time * item.period for each in visit.offsets for time in times]
    visit.copies = [(*each, time) for each in visit.copies for time in times]
    visit.repeats = (*visit.repeats, number)


def _add_box(found: Drafts, visit: _Visit) -> None:
    box = len(found.boxes)
    repeats = visit.times.count if visit.times is not None else 1
    found.boxes.append(Draft(visit.item, visit.group, repeats, visit.offsets))
    found.repeats_of.append(visit.repeats)
    for offset, copies in zip(visit.offsets, visit.copies, strict=True):
        for index in range(visit.item.first + offset, visit.item.end + offset):
            found.box_of[index] = box
            found.start_of[index] = visit.item.first + offset
            found.copies_of[index] = copies


def _has_frame(item: Item, times: Item | None) -> bool:
    """Whether to draw a frame: around several items, or to show how often one item repeats."""
    if item.kind == "repeat":
        return len(item.children) > 1
    if times is not None:
        return True
    return bool(item.path) and len(item.children) > 1


def _contents(item: Item, classes: dict[str, str]) -> str:
    """Return what a repeated run consists of: the classes of its modules, and the number of other nodes."""
    names = [
        classes.get(".".join(child.path)) or child.path[-1]
        for child in item.children
        if child.kind == "module" or (child.kind == "fold" and not child.left_out)
    ]
    others = item.period - sum(c.end - c.first for c in item.children if c.kind != "op")
    if not names:
        return f"{item.period:,} nodes"
    if len(names) > _MOST_NAMES:
        names = [*names[: _MOST_NAMES - 1], f"{len(names) - _MOST_NAMES + 1} more"]
    return f"({', '.join([*names, f'{others:,} more nodes'] if others else names)})"


def _frame(visit: _Visit, classes: dict[str, str], around: str) -> DrawnGroup:
    item, times = visit.item, visit.times
    path = ".".join(item.path)
    shown = relative(path, around)
    if item.kind == "repeat":
        title = f"{item.count:,} x {_contents(item, classes)}"
        repeats, chained = item.count, item.chained
    elif times is not None:
        name = classes.get(path, "")
        last = relative(".".join(times.last_path), around)
        span = f"{shown} … {last}"
        title = f"{times.count:,} x {name}  {span}" if name else f"{times.count:,} x {span}"
        repeats, chained = times.count, times.chained
    else:
        name = classes.get(path, "")
        title, repeats, chained = f"{shown}  {name}" if name else shown, 1, False
    return DrawnGroup(clean(title.strip()), path, visit.group, (), repeats, chained)


@dataclass(slots=True)
class LeafBox:
    """Leaves in one box: corresponding leaves of all copies of a repeat, or many leaves of one box."""

    leaves: list[int]
    uses: Counter[int]
    """For each box that uses them, the number of uses."""
    merged: bool = False
    """Whether they share a box only because there were too many."""


def place_leaves(facts: Facts, drafts: Drafts) -> tuple[list[LeafBox], dict[int, list[int]]]:
    """Return boxes for leaves; and for each folded box, the leaves that no other box uses."""
    roots = {root.leaf for root in facts.roots if root.leaf is not None}
    uses: list[Counter[int]] = [Counter() for _ in facts.leaves]
    slots: list[set[object]] = [set() for _ in facts.leaves]
    for index, op in enumerate(facts.ops):
        box = drafts.box_of[index]
        for slot, leaf in enumerate(op.leaves):
            uses[leaf][box] += 1
            # Copies of a repeated run share slots, so the leaves of all copies become one box.
            slots[leaf].add((box, index - drafts.start_of[index], slot))
    inside: dict[int, list[int]] = {}
    alike: dict[object, list[int]] = {}
    for leaf, used in enumerate(uses):
        only = next(iter(used)) if len(used) == 1 and leaf not in roots else None
        if only is not None and drafts.boxes[only].item.kind == "fold":
            inside.setdefault(only, []).append(leaf)
        else:
            alike.setdefault(frozenset(slots[leaf]) or leaf, []).append(leaf)
    boxes = [
        LeafBox(leaves, sum((uses[leaf] for leaf in leaves), Counter()))
        for leaves in alike.values()
    ]
    return _merged(boxes), inside


def _merged(boxes: list[LeafBox]) -> list[LeafBox]:
    """Merge boxes into one if the same box is their only user and there are more than eight."""
    users: dict[int, list[LeafBox]] = {}
    for box in boxes:
        if len(box.uses) == 1:
            users.setdefault(next(iter(box.uses)), []).append(box)
    gone: set[int] = set()
    for user, alike in users.items():
        if len(alike) > _MOST_SEPARATE:
            leaves = [leaf for box in alike for leaf in box.leaves]
            count = sum(box.uses[user] for box in alike)
            alike[0].leaves, alike[0].uses, alike[0].merged = leaves, Counter({user: count}), True
            gone.update(id(box) for box in alike[1:])
    return [box for box in boxes if id(box) not in gone]


def leaves_inside(leaves: list[Leaf], box: Draft) -> tuple[DrawnLeaf, ...]:
    """Return rows for the leaves in a box: one for each name, or one for all if there are many names."""
    named: dict[str, list[Leaf]] = {}
    depth = len(box.item.path)
    for leaf in leaves:
        parts = leaf.name.split(".")
        # Copies of a repeated module have different paths before the same name.
        inside = len(parts) > depth and (len(box.offsets) > 1 or parts[:depth] == [*box.item.path])
        short = ".".join(parts[depth:]) if inside and " = " not in leaf.name else leaf.name
        named.setdefault(short or ("parameter" if leaf.is_parameter else "leaf"), []).append(leaf)
    if len(named) > _MOST_INSIDE:
        noun = "parameters" if all(leaf.is_parameter for leaf in leaves) else "leaves"
        named = {f"{len(leaves):,} {noun}": leaves}
    return tuple(_inside(name, each) for name, each in named.items())


def _inside(name: str, leaves: list[Leaf]) -> DrawnLeaf:
    return DrawnLeaf(
        name=clean(name),
        shape=agreed((leaf.shape for leaf in leaves), None),
        dtype=agreed((leaf.dtype for leaf in leaves), ""),
        count=len(leaves),
        nbytes=sum(leaf.nbytes for leaf in leaves),
        is_parameter=all(leaf.is_parameter for leaf in leaves),
    )
