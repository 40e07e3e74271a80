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

import functools
from collections import defaultdict
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


def cuts_of(graph: CallGraph, nbytes: Mapping[int, int]) -> tuple[Cut, ...]:
    """The choices at a few prices, those that hold the least first; the call as a whole is none of them.

    Args:
        graph: of the call.
        nbytes: of what each save holds, by its number.
    """
    return _cuts_of(graph, tuple(nbytes.items()))


@functools.lru_cache(maxsize=16)  # each keeps its graph
def _cuts_of(graph: CallGraph, given: tuple[tuple[int, int], ...]) -> tuple[Cut, ...]:
    nbytes = dict(given)
    held_bytes: dict[int, int] = defaultdict(int)
    for number, value in graph.saves:
        held_bytes[value] = max(held_bytes[value], nbytes.get(number, 0))
    total, seconds = sum(held_bytes.values()), graph.seconds
    if not total or not seconds:
        return ()
    network = _Network(graph, held_bytes)
    found: list[Cut] = []
    for price in _PRICES:
        held, running = network.cheapest(price * seconds / total)
        stays = frozenset(number for number, value in graph.saves if value in held)
        part = sum(graph.operations[at].seconds for at in running) / seconds
        if 0 < len(stays) < len(graph.saves):
            found.append(Cut(stays, part))
    return tuple({each.stays: each for each in reversed(found)}.values())


_SOURCE, _SINK = 0, 1


class _Network:
    """The graph of a call as a network of capacities, whose maximum flow shows the minimum cut.

    A cut with the source on the side of what is not run: an operation on the sink's side runs and cuts its edge
    of seconds; a value on the sink's side is needed, and where its operation does not run, its bytes are cut.

    The flow is Dinic's (1970): in each round, the shortest paths that still have capacity are filled. At a
    higher price, what has been found still flows.
    """

    def __init__(self, graph: CallGraph, held_bytes: Mapping[int, int]) -> None:
        operations = graph.operations
        made = dict.fromkeys(value for each in operations for value in each.makes)
        read = dict.fromkeys(value for each in operations for value in each.reads)
        first = 2 + len(operations)
        self._value_at = {value: first + at for at, value in enumerate(made | read)}
        self._edges: list[list[int]] = [[] for _ in range(first + len(self._value_at))]
        # Of each edge: where it leads, and the capacity that is left. Its neighbour, edge ^ 1, leads back.
        self._heads: list[int] = []
        self._left: list[float] = []
        self._priced: list[tuple[int, int]] = []  # edges whose capacity has a price, and bytes
        self._price = 0.0
        self._operations, self._held_bytes = operations, held_bytes
        for at, operation in enumerate(operations, _SINK + 1):
            self._add(_SOURCE, at, operation.seconds)
            for value in operation.reads:
                self._add(self._value_at[value], at, _UNLIMITED)
            for value in operation.makes:
                if value in held_bytes:
                    self._priced.append((len(self._heads), held_bytes[value]))
                    self._add(at, self._value_at[value], 0.0)
                else:
                    self._add(at, self._value_at[value], _UNLIMITED)
        for value in held_bytes:
            if value in made:
                self._add(self._value_at[value], _SINK, _UNLIMITED)

    def _add(self, tail: int, head: int, capacity: float) -> None:
        self._edges[tail].append(len(self._heads))
        self._edges[head].append(len(self._heads) + 1)
        self._heads += head, tail
        self._left += capacity, 0.0

    def cheapest(self, price: float) -> tuple[set[int], set[int]]:
        """The values that are held, and the indices of the operations that run again, where a byte has this
        price, which is no lower than the last one."""
        for edge, nbytes in self._priced:
            self._left[edge] += nbytes * (price - self._price)
        self._price = price
        while (levels := self._levels())[_SINK] >= 0:
            self._fill(levels)
        running = {at for at in range(len(self._operations)) if levels[at + _SINK + 1] < 0}
        of_running = {value for at in running for value in self._operations[at].makes}
        return {value for value in self._held_bytes if value not in of_running}, running

    def _levels(self) -> list[int]:
        """The length of the shortest path with capacity from the source to each node; -1: there is none."""
        levels = [-1] * len(self._edges)
        levels[_SOURCE], todo = 0, [_SOURCE]
        for node in todo:
            for edge in self._edges[node]:
                head = self._heads[edge]
                if levels[head] < 0 < self._left[edge]:
                    levels[head] = levels[node] + 1
                    todo.append(head)
        return levels

    def _fill(self, levels: list[int]) -> None:
        """Let flow what the paths of these lengths can still take."""
        heads, left = self._heads, self._left
        todo = [list(each) for each in self._edges]  # edges that may lead on
        path: list[int] = []
        while True:
            node = heads[path[-1]] if path else _SOURCE
            if node == _SINK:
                amount = min(left[edge] for edge in path)
                for at, edge in reversed([*enumerate(path)]):
                    left[edge] -= amount
                    left[edge ^ 1] += amount
                    if left[edge] <= 0:
                        del path[at:]
            elif todo[node]:
                edge = todo[node][-1]
                if left[edge] > 0 and levels[heads[edge]] == levels[node] + 1:
                    path.append(edge)
                else:
                    todo[node].pop()
            elif path:
                todo[heads[path.pop() ^ 1]].pop()
            else:
                return
