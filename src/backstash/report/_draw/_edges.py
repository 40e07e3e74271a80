"""Edges between boxes: those of the graph, merged, without what one time of a repeat hands to the next."""

from __future__ import annotations

from dataclasses import dataclass, field

from ._drafts import Drafts
from ._facts import Facts
from ._records import DrawnEdge

__all__ = ["Edges"]


@dataclass(slots=True)
class _Edge:
    count: int = 0
    outputs: set[int] = field(default_factory=set)


class Edges:
    """Collects edges by their ends."""

    def __init__(self, facts: Facts, drafts: Drafts) -> None:
        self._drafts = drafts
        self._edges: dict[tuple[int, int], _Edge] = {}
        self._outputs: dict[int, set[int]] = {}
        """For each box, which outputs of its nodes are used."""
        for index, op in enumerate(facts.ops):
            target = drafts.box_of[index]
            for source, output in op.inputs:
                self._outputs.setdefault(drafts.box_of[source], set()).add(output)
                if self._is_drawn(source, index):
                    self.add(drafts.box_of[source], target, output)

    def add(self, source: int, target: int, output: int = 0, count: int = 1) -> None:
        """One more edge, or several, from box to box."""
        edge = self._edges.setdefault((source, target), _Edge())
        edge.count += count
        edge.outputs.add(output)

    def add_output(self, source: int, target: int, output: int) -> None:
        """From the box of a node to the box of what ``draw`` was given."""
        self._outputs.setdefault(source, set()).add(output)
        self.add(source, target, output)

    def _is_drawn(self, source: int, target: int) -> bool:
        drafts = self._drafts
        from_box, to_box = drafts.box_of[source], drafts.box_of[target]
        if from_box == to_box:
            return False
        common = 0
        for mine, theirs in zip(
            drafts.repeats_of[from_box], drafts.repeats_of[to_box], strict=False
        ):
            if mine != theirs:
                break
            common += 1
        return drafts.copies_of[source][:common] == drafts.copies_of[target][:common]

    def drawn(self) -> list[DrawnEdge]:
        """All of them, by their ends."""
        return [self._record(*ends, edge) for ends, edge in sorted(self._edges.items())]

    def _record(self, source: int, target: int, edge: _Edge) -> DrawnEdge:
        boxes = self._drafts.boxes
        is_op = source < len(boxes) and boxes[source].item.kind == "op"
        output, labels = None, []
        if is_op and self._outputs.get(source, set()) - {0}:
            outputs = sorted(edge.outputs)
            output = outputs[0] if len(outputs) == 1 else None
            labels.append(_outputs_label(outputs))
        times = len(boxes[target].offsets) if target < len(boxes) else 1
        if edge.count > times and edge.count % times == 0 and len(edge.outputs) == 1:
            labels.append(f"{edge.count // times:,} x")
        return DrawnEdge(source, target, output, edge.count, "  ".join(labels))


def _outputs_label(outputs: list[int]) -> str:
    if len(outputs) == 1:
        return f"output {outputs[0]}"
    if len(outputs) > 3:
        return f"{len(outputs):,} outputs"
    return f"outputs {', '.join(map(str, outputs))}"
