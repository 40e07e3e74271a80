"""How far the extent file grows beyond what is alive in it, for blocks that come and go in awkward sizes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from backstash.stores._extents import Extents

__all__ = ["PATTERNS", "SHARE", "Spread", "spread"]

_UNIT_BYTES = 4096
_KIB, _MIB = 1 << 10, 1 << 20
_LARGEST = 64 * _MIB

# A pattern says what is taken and what is freed: ("take", key, bytes) or ("free", key, 0).
Event = tuple[str, int, int]
Pattern = Callable[[int, random.Random], Iterator[Event]]


@dataclass(frozen=True, slots=True)
class Spread:
    """What a pattern did to a file."""

    peak_bytes: int
    """The most that was alive at once."""
    end_bytes: int
    """The most that the file was large."""

    @property
    def ratio(self) -> float:
        """The file's size over the most that was alive."""
        return self.end_bytes / self.peak_bytes


def spread(pattern: Pattern, *, steps: int, seed: int = 0) -> Spread:
    """Run ``steps`` steps of ``pattern`` in an empty file."""
    extents = Extents(unit_bytes=_UNIT_BYTES)
    taken: dict[int, tuple[int, int]] = {}
    peak = end = 0
    for what, key, nbytes in pattern(steps, random.Random(seed)):
        if what == "take":
            taken[key] = extents.take(nbytes), nbytes
            peak, end = max(peak, extents.used_bytes), max(end, extents.end_bytes)
        else:
            extents.free(*taken.pop(key))
    return Spread(peak, end)


def _graphs(
    sizes: Callable[[int], list[int]], steps: int, alive: int, random: random.Random | None = None
) -> Iterator[Event]:
    """Each step saves blocks and frees them in reverse, ``alive`` graphs later, or those of any graph."""
    graphs: list[list[int]] = []
    key = 0
    for step in range(steps):
        graph = []
        for nbytes in sizes(step):
            yield "take", key, nbytes
            graph.append(key)
            key += 1
        graphs.append(graph)
        if len(graphs) > alive:
            done = graphs.pop(random.randrange(len(graphs)) if random is not None else 0)
            yield from (("free", each, 0) for each in reversed(done))


def _uniform(steps: int, random: random.Random) -> Iterator[Event]:
    return _graphs(lambda _: [random.randint(_KIB, 16 * _MIB) for _ in range(24)], steps, 2, random)


def _heavy_tailed(steps: int, random: random.Random) -> Iterator[Event]:
    size = lambda: min(_LARGEST, int(64 * _KIB * random.paretovariate(0.8)))  # noqa: E731
    return _graphs(lambda _: [size() for _ in range(24)], steps, 3, random)


def _sequence_lengths(steps: int, random: random.Random) -> Iterator[Event]:
    """A language model's batches: all blocks of a step have its length, which rises and falls back."""
    return _graphs(lambda step: [(128 + 16 * (step % 100)) * 4 * _KIB] * 24, steps, 2)


def _random_lengths(steps: int, random: random.Random) -> Iterator[Event]:
    def sizes(step: int) -> list[int]:
        length = random.randint(16, 2048)
        return [length * width * _KIB for width in (1, 4, 3, 1)] * 6

    return _graphs(sizes, steps, 2, random)


def _one_step_at_a_time(steps: int, random: random.Random) -> Iterator[Event]:
    return _graphs(lambda _: [random.randint(_KIB, 16 * _MIB) for _ in range(48)], steps, 0)


def _every_second(steps: int, random: random.Random) -> Iterator[Event]:
    """Blocks of one size; every second one dies and others, one unit larger each time, come in their place."""
    key, size = 0, 33 * _UNIT_BYTES
    alive: list[int] = []
    for _ in range(64):
        yield "take", key, size
        alive.append(key)
        key += 1
    for step in range(steps):
        size = (33 + step % 200) * _UNIT_BYTES
        for each in alive[::2]:
            yield "free", each, 0
        alive = alive[1::2]
        for _ in range(32):
            yield "take", key, size
            alive.append(key)
            key += 1


def _same_in_holes(steps: int, random: random.Random) -> Iterator[Event]:
    """Blocks of one size, of which any dies and another of that very size comes."""
    key = 0
    alive: list[int] = []
    for _ in range(64 * steps):
        yield "take", key, 33 * _UNIT_BYTES
        alive.append(key)
        key += 1
        if len(alive) > 200:
            last = len(alive) - 1
            chosen = random.randrange(last)
            yield "free", alive.pop(chosen), 0


def _robson(steps: int, random: random.Random) -> Iterator[Event]:
    """The worst that is known for any allocator that moves nothing: ever larger blocks, holes just too small.

    J. M. Robson, "Bounds for Some Functions Concerning Dynamic Storage Allocation", JACM 1974.
    """
    key = 0
    alive: list[tuple[int, int]] = []
    budget = 1 << 14  # units
    for level in range(10):
        size = 1 << level
        used = sum(held for _, held in alive)
        while used + size <= budget:
            yield "take", key, size * _UNIT_BYTES
            alive.append((key, size))
            key += 1
            used += size
        for each, _ in alive[
            1::2
        ]:  # one of every pair stays, so that no hole holds what comes next
            yield "free", each, 0
        alive = alive[::2]


SHARE = 1.5
"""What the file may be of the most that was alive, in each pattern but Robson's."""

PATTERNS: dict[str, Pattern] = {
    "one step at a time": _one_step_at_a_time,
    "uniform": _uniform,
    "heavy-tailed": _heavy_tailed,
    "rising lengths": _sequence_lengths,
    "random lengths": _random_lengths,
    "one size, any dies": _same_in_holes,
    "every second": _every_second,
    "Robson's": _robson,
}
