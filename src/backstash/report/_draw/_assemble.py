"""Turn drafts into the records of a drawing: boxes, edges between them, and frames around them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ._drafts import Draft, Drafts, LeafBox, leaves_inside, place_leaves
from ._facts import Facts, Leaf, OpFacts, Root
from ._records import (
    DrawnEdge,
    DrawnGroup,
    DrawnNode,
    DrawnTensor,
    agreed,
    frames_around,
    path_around,
)
from ._tensors import same_memory, tensors_of
from ._text import clean, relative, short_name
from ._tree import common_path

__all__ = ["assemble"]

_MOST_OUTPUTS = 4


def assemble(
    facts: Facts, drafts: Drafts, *, show_saved: bool, by_dtype: bool
) -> tuple[list[DrawnNode], list[DrawnEdge], list[DrawnGroup]]:
    """Return the boxes (operations, then leaves, then outputs), the edges, and the frames with their boxes."""
    leaf_boxes, inside = place_leaves(facts, drafts)
    same = same_memory(facts)
    nodes = []
    for index, box in enumerate(drafts.boxes):
        tensors = tensors_of(box, facts, same, by_dtype) if show_saved else ()
        leaves = [facts.leaves[leaf] for leaf in inside.get(index, ())]
        nodes.append(_node(box, facts, leaves, tensors))
    edges = _Edges(facts, drafts)
    groups_of: list[int | None] = [box.group for box in drafts.boxes]
    box_of_leaf = {}
    for leaf_box in leaf_boxes:
        for user, count in leaf_box.uses.items():
            edges.add(len(nodes), user, count=count)
        box_of_leaf.update(dict.fromkeys(leaf_box.leaves, len(nodes)))
        users = [drafts.boxes[user].group for user in leaf_box.uses]
        around = common_path(frames_around(group, drafts.groups) for group in users)
        group = around[-1] if around else None
        groups_of.append(group)
        nodes.append(_leaf_node(leaf_box, facts, path_around(group, drafts.groups)))
    for box_index, roots in _outputs(facts, drafts, box_of_leaf).items():
        for several in [[root] for root in roots] if len(roots) <= _MOST_OUTPUTS else [roots]:
            for _, root in several:
                edges.add_output(box_index, len(nodes), root.output)
            groups_of.append(None)
            nodes.append(_output_node(several, len(facts.roots)))
    groups = _filled(drafts.groups, groups_of)
    return nodes, edges.drawn(), groups


def _node(
    box: Draft, facts: Facts, leaves: list[Leaf], tensors: tuple[DrawnTensor, ...]
) -> DrawnNode:
    runs = list(box.runs())
    ops = [op for first, end in runs for op in facts.ops[first:end]]
    path = ".".join(box.item.path)
    if box.item.kind == "op":
        kind, name = "operation", clean(ops[0].name)
        label, detail = clean(short_name(ops[0].name)), clean(ops[0].given)
    else:
        name = clean(ops[0].name) if len(ops) == 1 else ""
        kind = "folded" if box.item.left_out else "module"
        classes = facts.classes
        what = _counted(ops, len(runs))
        if kind == "folded":
            label, detail = f"… {len(ops):,} nodes …", what
        else:
            label = clean(path) or "the whole graph"
            of_class = classes.get(path, "")
            if len(ops) > 9 * len(runs):
                what = f"{len(ops):,} nodes"
            detail = clean(f"{of_class}: {what}" if of_class else what)
    shape = agreed((facts.ops[end - 1].shape for _, end in runs), None)
    return DrawnNode(
        kind=kind,
        label=label,
        name=name,
        module=clean(path),
        shape=shape if kind != "folded" else None,
        dtype=ops[-1].dtype,
        detail=detail,
        nodes=len(ops) + len(leaves),
        leaves=leaves_inside(leaves, box),
        repeats=box.repeats,
        tensors=tensors,
        nbytes=sum(leaf.nbytes for leaf in leaves),
    )


def _counted(ops: list[OpFacts], runs: int) -> str:
    """Return the commonest kinds of ``ops`` with their counts; kinds that save something come first."""
    counts = Counter(op.name for op in ops)
    saving = {op.name for op in ops if op.held}
    if any(count % runs for count in counts.values()):
        runs = 1  # otherwise all runs are equal, and the counts are for one run
    kinds = sorted(counts, key=lambda name: (name not in saving, -counts[name]))
    parts = []
    for name in kinds[:3]:
        count = counts[name] // runs
        parts.append(f"{count:,} {short_name(name)}" if count > 1 else short_name(name))
    rest = sum(counts[name] for name in kinds[3:]) // runs
    if rest:
        parts.append(f"{rest:,} other{'s' if rest > 1 else ''}")
    return clean(", ".join(parts))


def _leaf_node(box: LeafBox, facts: Facts, path: str) -> DrawnNode:
    leaves = [facts.leaves[leaf] for leaf in box.leaves]
    first = leaves[0]
    kind = "parameter" if all(leaf.is_parameter for leaf in leaves) else "leaf"
    name = relative(first.name, path)
    if box.merged:
        name = f"{len(leaves):,} {'parameters' if kind == 'parameter' else 'leaves'}"
    return DrawnNode(
        kind=kind,
        label=clean(name) or kind,
        name=clean(first.name) if len(leaves) == 1 else "",
        shape=agreed((leaf.shape for leaf in leaves), None),
        dtype=first.dtype,
        nodes=len(leaves),
        repeats=1 if box.merged else len(leaves),
        nbytes=sum(leaf.nbytes for leaf in leaves),
    )


def _outputs(
    facts: Facts, drafts: Drafts, box_of_leaf: dict[int, int]
) -> dict[int, list[tuple[int, Root]]]:
    """Return, for each box, the outputs that it made, with their numbers among all outputs."""
    found: dict[int, list[tuple[int, Root]]] = {}
    for index, root in enumerate(facts.roots):
        if root.op is not None:
            found.setdefault(drafts.box_of[root.op], []).append((index, root))
        elif root.leaf is not None:
            found.setdefault(box_of_leaf[root.leaf], []).append((index, root))
    return found


def _output_node(several: list[tuple[int, Root]], of: int) -> DrawnNode:
    index, root = several[0]
    label = "output" if of == 1 else f"output {index}"
    if len(several) > 1:
        label = f"{len(several):,} outputs"
    shape = agreed((each.shape for _, each in several), None)
    return DrawnNode("output", label, shape=shape, dtype=root.dtype)


def _filled(groups: list[DrawnGroup], groups_of: list[int | None]) -> list[DrawnGroup]:
    inside: dict[int, list[int]] = {}
    for node, group in enumerate(groups_of):
        if group is not None:
            inside.setdefault(group, []).append(node)
    return [replace(each, nodes=tuple(inside.get(i, ()))) for i, each in enumerate(groups)]


class _Edges:
    """The edges between boxes: the graph's, merged, without those between copies of a repeat."""

    def __init__(self, facts: Facts, drafts: Drafts) -> None:
        self._drafts = drafts
        self._edges: dict[tuple[int, int], list[int]] = {}
        """For each edge between two boxes, the outputs used by each of the graph's edges."""
        self._outputs: dict[int, set[int]] = {}
        """For each box, which outputs of its nodes are used."""
        for index, op in enumerate(facts.ops):
            target = drafts.box_of[index]
            for source, output in op.inputs:
                self._outputs.setdefault(drafts.box_of[source], set()).add(output)
                if self._is_drawn(source, index):
                    self.add(drafts.box_of[source], target, output)

    def add(self, source: int, target: int, output: int = 0, count: int = 1) -> None:
        """Add one edge, or several, from box to box."""
        self._edges.setdefault((source, target), []).extend([output] * count)

    def add_output(self, source: int, target: int, output: int) -> None:
        """Add an edge from a box to the box of an output that ``draw`` was given."""
        self._outputs.setdefault(source, set()).add(output)
        self.add(source, target, output)

    def _is_drawn(self, source: int, target: int) -> bool:
        drafts = self._drafts
        from_box, to_box = drafts.box_of[source], drafts.box_of[target]
        if from_box == to_box:
            return False
        around = common_path([drafts.repeats_of[from_box], drafts.repeats_of[to_box]])
        copies = drafts.copies_of[source], drafts.copies_of[target]
        return copies[0][: len(around)] == copies[1][: len(around)]

    def drawn(self) -> list[DrawnEdge]:
        """Return the records of all edges, sorted by their ends."""
        return [self._record(*ends, used) for ends, used in sorted(self._edges.items())]

    def _record(self, source: int, target: int, used: list[int]) -> DrawnEdge:
        boxes = self._drafts.boxes
        is_op = source < len(boxes) and boxes[source].item.kind == "op"
        outputs, output, labels = sorted(set(used)), None, []
        if is_op and self._outputs.get(source, set()) - {0}:
            output = agreed(outputs, None)
            labels.append(_outputs_label(outputs))
        times = len(boxes[target].offsets) if target < len(boxes) else 1
        if len(used) > times and len(used) % times == 0 and len(outputs) == 1:
            labels.append(f"{len(used) // times:,} x")
        return DrawnEdge(source, target, output, len(used), "  ".join(labels))


def _outputs_label(outputs: list[int]) -> str:
    if len(outputs) == 1:
        return f"output {outputs[0]}"
    if len(outputs) > 3:
        return f"{len(outputs):,} outputs"
    return f"outputs {', '.join(map(str, outputs))}"
