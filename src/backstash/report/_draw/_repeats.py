"""Find repeated runs of nodes: the same operations on the same shapes, connected the same way.

The k-th copy of a run may differ from the first only in which leaves it uses, and in using results of the copy
before. The places of its saved tensors do not count: with half of the blocks on disk it is still "12 x Block".
"""

from __future__ import annotations

from collections import Counter

from ._facts import Facts, OpFacts
from ._tree import Item, common_path, walk

__all__ = ["find_repeats"]

_SMALL_PERIODS = 4
_COMMON_GAPS = 10
_FEWEST_OPS = (
    16  # in a repeated run of operations without modules: a shorter chain is clearer unfolded
)
_FEWEST_MODULES_OPS = 8  # in a module that occurs twice


def find_repeats(root: Item, facts: Facts) -> None:
    """Replace runs of children that repeat by ``"repeat"`` items, everywhere in the tree."""
    numbers: dict[object, int] = {}
    for item in reversed(list(walk(root))):
        if item.kind == "op":
            key = _signature(facts.ops[item.first], facts)
        else:
            key = ("module", len(item.path), *(child.number for child in item.children))
            item.children = _folded(item.children, facts)
        item.number = numbers.setdefault(key, len(numbers))


def _are_wired_alike(one: Item, other: Item, ops: list[OpFacts]) -> bool:
    """Whether two items of one number take their inputs from corresponding places."""
    shift = other.first - one.first
    return all(
        _same_source(mine, theirs, one.first, other.first)
        for index in range(one.first, one.end)
        for mine, theirs in zip(ops[index].inputs, ops[index + shift].inputs, strict=True)
    )


def _signature(op: OpFacts, facts: Facts) -> object:
    held = tuple((each.name, each.shape, each.dtype) for each in op.held)
    leaves = tuple((facts.leaves[leaf].shape, facts.leaves[leaf].dtype) for leaf in op.leaves)
    return op.name, op.shape, op.dtype, held, leaves, len(op.inputs)


def _same_source(
    mine: tuple[int, int], theirs: tuple[int, int], start: int, other_start: int
) -> bool:
    source, output = mine
    other, other_output = theirs
    if other == source < start:
        return True  # both use one earlier node; which of its outputs may differ
    if other - source == other_start - start and output == other_output:
        return True
    return source < start <= other < other_start  # the other uses a result of this one


def _folded(children: list[Item], facts: Facts) -> list[Item]:
    periods = _periods([child.number for child in children])
    runs = {k: _runs(children, k, facts) for k in periods}
    found, place = [], 0
    while place < len(children):
        best, most = 0, 0
        for k, lengths in runs.items():
            copies = lengths[place] // k + 1
            if (copies - 1) * k > most and _is_worth(children, place, k, copies):
                best, most = k, (copies - 1) * k
        if not best:
            found.append(children[place])
            place += 1
            continue
        copies = runs[best][place] // best + 1
        found.append(_repeat(children[place : place + best * copies], best, copies, facts))
        place += best * copies
    return found


def _periods(numbers: list[int]) -> list[int]:
    """Return how many children one copy may have: small numbers, and the distances at which children recur."""
    last: dict[int, int] = {}
    gaps: Counter[int] = Counter()
    for place, number in enumerate(numbers):
        if number in last:
            gaps[place - last[number]] += 1
        last[number] = place
    common = {gap for gap, _ in gaps.most_common(_COMMON_GAPS)}
    small = {gap for gap in gaps if gap <= _SMALL_PERIODS}
    return sorted(gap for gap in common | small if 2 * gap <= len(numbers))


def _runs(children: list[Item], k: int, facts: Facts) -> list[int]:
    """Return, for each place, how many children from there on equal the child ``k`` places further."""
    lengths = [0] * (len(children) + 1)
    for place in range(len(children) - k - 1, -1, -1):
        one, other = children[place], children[place + k]
        if one.number == other.number and _are_wired_alike(one, other, facts.ops):
            lengths[place] = lengths[place + 1] + 1
    return lengths


def _is_worth(children: list[Item], place: int, k: int, copies: int) -> bool:
    if copies < 2:
        return False
    nodes = children[place + k * copies - 1].end - children[place].first
    if any(child.kind == "module" for child in children[place : place + k]):
        return copies > 2 or nodes >= _FEWEST_MODULES_OPS
    return copies > 2 and nodes >= _FEWEST_OPS


def _repeat(children: list[Item], k: int, copies: int, facts: Facts) -> Item:
    first, last = children[0], children[-1]
    path = common_path([child.path for child in children[:k]])
    item = Item("repeat", first.first, last.end, path, children[:k], count=copies)
    item.last_path = children[-k].path
    period = item.period
    item.chained = any(
        source >= item.first and (source - item.first) // period < (index - item.first) // period
        for index in range(item.first + period, item.first + 2 * period)
        for source, _ in facts.ops[index].inputs
    )
    return item
