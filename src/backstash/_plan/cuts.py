"""Parts of a module call that can be recomputed: what stays in memory between, found by minimum cuts.

A call that is recomputed as a whole discards all that it saves and runs all its operations again. Between that
and holding everything lie the choices that keep what is dear to compute: the result of an attention, say, but
not what a norm or an activation has made of it. At a price for each byte that is held the cheapest of them is a
minimum cut: of the graph whose operations cost the seconds that they take, and whose saved tensors cost their
bytes. A few prices give a few choices, from the cheapest bytes on.

The idea is that of Checkmate's and PyTorch's own minimum-cut partitioner (``torch._functorch``), which cut the
graph of a whole compiled program. networkx, which has such a cut, takes 12 MiB of memory when it is imported,
more than a budget may cost a small program, so the flow is computed here.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CallGraph", "CallOperation", "Cut", "cuts_of"]

# Of a byte, in the seconds that the call takes for each byte that it saves.
_PRICES = (1 / 16, 1 / 4, 1, 3 / 2, 2)
_UNLIMITED = float("inf")


@dataclass(frozen=True, slots=True)
class CallOperation:
    """One operation of a call that was replayed."""

    seconds: float
    """What it took."""
    reads: tuple[int, ...]
    """The values that it reads and that the call has made, by number."""
    makes: tuple[int, ...]
    """The values that it makes."""


@dataclass(frozen=True, slots=True)
class CallGraph:
    """The operations of one call that lead to what it saves, in order."""

    operations: tuple[CallOperation, ...]
    saves: tuple[tuple[int, int], ...]
    """The number of a save in the call, and the value that is saved."""

    @property
    def seconds(self) -> float:
        """What all of them take."""
        return sum(each.seconds for each in self.operations)


@dataclass(frozen=True, slots=True)
class Cut:
    """One choice of what stays."""

    stays: frozenset[int]
    """The numbers of the saves that are held."""
    part: float
    """Of the seconds of all operations, what those take that run again."""


def cuts_of(graph: CallGraph, nbytes: Mapping[int, int]) -> list[Cut]:
    """The choices at a few prices, those that hold the least first; the call as a whole is none of them.

    Args:
        graph: of the call.
        nbytes: of what each save holds, by its number.
    """
    held_bytes: dict[int, int] = defaultdict(int)
    for number, value in graph.saves:
        held_bytes[value] = max(held_bytes[value], nbytes.get(number, 0))
    total, seconds = sum(held_bytes.values()), graph.seconds
    if not total or not seconds:
        return []
    found: dict[frozenset[int], Cut] = {}
    for price in reversed(_PRICES):
        held, running = _cheapest(graph, held_bytes, price * seconds / total)
        stays = frozenset(number for number, value in graph.saves if value in held)
        part = sum(graph.operations[at].seconds for at in running) / seconds
        if 0 < len(stays) < len(graph.saves):
            found.setdefault(stays, Cut(stays, part))
    return [*found.values()]


def _cheapest(
    graph: CallGraph, held_bytes: Mapping[int, int], price: float
) -> tuple[set[int], set[int]]:
    """The values that are held, and the indices of the operations that run again, where a byte has this price.

    A cut with the source on the side of what is not run: an operation on the sink's side runs and cuts its edge
    of seconds; a value on the sink's side is needed, and where its operation does not run, its bytes are cut.
    """
    flow = _Flow()
    for at, operation in enumerate(graph.operations):
        flow.add("source", ("run", at), operation.seconds)
        for value in operation.reads:
            flow.add(("need", value), ("run", at), _UNLIMITED)
        for value in operation.makes:
            capacity = held_bytes[value] * price if value in held_bytes else _UNLIMITED
            flow.add(("run", at), ("need", value), capacity)
    made = {value for each in graph.operations for value in each.makes}
    for value in held_bytes:
        if value in made:
            flow.add(("need", value), "sink", _UNLIMITED)
    idle = flow.source_side()
    running = {at for at in range(len(graph.operations)) if ("run", at) not in idle}
    of_running = {value for at in running for value in graph.operations[at].makes}
    return {value for value in held_bytes if value not in of_running}, running


class _Flow:
    """A network of capacities, and its maximum flow: shortest augmenting paths (Edmonds and Karp 1972)."""

    def __init__(self) -> None:
        self._left: dict[object, dict[object, float]] = defaultdict(dict)

    def add(self, tail: object, head: object, capacity: float) -> None:
        """Add an edge; two between the same nodes add up."""
        self._left[tail][head] = self._left[tail].get(head, 0.0) + capacity
        self._left[head].setdefault(tail, 0.0)

    def source_side(self) -> set[object]:
        """The nodes that the source still reaches once the flow is as large as it can be."""
        while True:
            came_from = self._reach()
            if "sink" not in came_from:
                return set(came_from)
            path: list[object] = ["sink"]
            while path[-1] != "source":
                path.append(came_from[path[-1]])
            edges = list(zip(path[1:], path[:-1], strict=True))
            amount = min(self._left[tail][head] for tail, head in edges)
            for tail, head in edges:
                self._left[tail][head] -= amount
                self._left[head][tail] += amount

    def _reach(self) -> dict[object, object]:
        came_from: dict[object, object] = {"source": "source"}
        todo = deque[object](["source"])
        while todo:
            node = todo.popleft()
            for head, capacity in self._left.get(node, {}).items():
                if capacity > 0 and head not in came_from:
                    came_from[head] = node
                    if head == "sink":
                        return came_from
                    todo.append(head)
        return came_from
