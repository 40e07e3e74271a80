"""Count and record the forwards of named modules in a step, and look up which of them the plan recomputes.

A forward is identified by its module's path, with ``*`` for numbers, and by its index among the step's forwards
of that name. Its saves are numbered, too: a block that is also saved outside the forward is not discarded.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .cuts import CallGraph, cuts_of
from .table import REGION
from .trace import RegionCut, TracedRegion

__all__ = [
    "LEFT",
    "ONCE",
    "TRACED",
    "Forward",
    "Regions",
    "Stays",
    "name_of",
    "traced_regions",
]

ONCE = "once"
"""Do not recompute it: hold what it saves as usual."""
LEFT = "left"
"""Do not recompute it, and do not manage what it saves: all of it stays in place."""
TRACED = "traced"
"""Do not recompute it, and record what it saves."""

Stays = Mapping[tuple[str, int], frozenset[int]]
"""By a forward's name and index: the numbers of its saves that are not discarded."""

_NUMBER = re.compile(r"\d+")


def name_of(path: str) -> str:
    """Return the name that the paths of similar modules share."""
    return _NUMBER.sub("*", path)


@dataclass(slots=True)
class Forward:
    """One forward of a named module in a recorded step."""

    name: str
    index: int
    """Its index among the step's forwards of this name."""
    number: int = 0
    """Its index among all forwards of the recorded step."""
    saved: dict[int, int] = field(default_factory=dict)
    """Block by the number of its save: blocks that this forward saved first."""
    again: Counter[int] = field(default_factory=Counter)
    """How often each of these blocks was saved again in this forward."""
    nbytes: int = 0
    """Bytes of the blocks in ``saved``."""
    small_bytes: int = 0
    """Bytes of tensors too small to be blocks that recomputing would free, too."""
    can_run_again: bool = False
    """Whether a replay was bit-equal."""
    seconds: float = 0.0
    """Seconds of the forward, without the stash's own."""
    inputs: list[int] = field(default_factory=list)
    """Numbers of the blocks of its inputs."""
    operands: set[int] = field(default_factory=set)
    """Numbers of the blocks that it holds only so that a replay can read them."""
    own: set[int] = field(default_factory=set)
    """Numbers of the blocks that it saved first and that no replay computes."""
    others: set[int] = field(default_factory=set)
    """Numbers of further blocks that it saved, which were saved before."""
    shared: set[int] = field(default_factory=set)
    """Numbers of the blocks that it saved first, and that something outside it saves again."""
    graph: CallGraph | None = None
    """The operations of this forward, if a replay of it, or of another forward of its module, was timed."""

    def add(self, number: int, block: int, nbytes: int, *, is_new: bool) -> None:
        """Record a save: of a new block, or of one that was saved before."""
        if is_new or block in self.operands:
            self.nbytes += nbytes
            self.operands.discard(block)
        elif block in self.saved.values():
            self.again[block] += 1
        else:
            self.others.add(block)
            return  # saved outside this forward: it is held anyway
        self.saved[number] = block

    def add_own(self, block: int, *, is_new: bool) -> None:
        """Record a save of what no replay computes: of a new block, or of one that was saved before."""
        if is_new:
            self.own.add(block)
        elif block in self.own or block in self.saved.values():
            self.again[block] += 1
        else:
            self.others.add(block)


class Regions:
    """Count the forwards of named modules, and decide for each whether it is recomputed.

    The caller holds the stash's lock.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._ended_counts: dict[str, int] = {}  # of the step before
        self._paths: set[str] = set()
        self._choices: dict[str, list[bool]] = {}
        self._known: set[str] = set()  # names that occurred in measured steps
        self._stays: dict[tuple[str, int], frozenset[int]] = {}
        self._planned_stays: dict[tuple[str, int], frozenset[int]] = {}
        # By the forwards that the stash does not manage: the bytes of what they held when they were measured.
        self._left: dict[tuple[str, int], int] = {}
        self._bytes: dict[str, int] = {}
        self._tried: Counter[str] = Counter()
        self._forwards: list[Forward] = []
        self._again: Counter[int] = Counter()  # blocks that were saved again, anywhere
        # By storage: the one forward whose recomputing would free it, and its bytes; None: none would.
        self._small: dict[int, tuple[Forward, int] | None] = {}

    def begin_step(self) -> None:
        """Begin a step: reset its counts."""
        self._ended_counts = dict(self._counts)
        self._counts.clear()
        self._paths.clear()
        self._small.clear()

    @property
    def has_any(self) -> bool:
        """Whether a forward of a named module began in this step or in a measured one."""
        return bool(self._known or self._counts)

    def has_begun(self, names: Iterable[str]) -> bool:
        """Whether a forward of one of these names began in this step or the one before."""
        return any(self._counts[name] or self._ended_counts.get(name) for name in names)

    def is_repeated(self, path: str) -> bool:
        """Return whether the module at ``path`` already ran in this step, and record that it runs."""
        if path in self._paths:
            return True
        self._paths.add(path)
        return False

    def begin(self, name: str) -> int:
        """Count a forward of this name, and return how many came before it in the step."""
        index = self._counts[name]
        self._counts[name] = index + 1
        return index

    def runs_again(self, name: str, index: int) -> bool:
        """Whether the plan recomputes this forward. A module that was named after the plan was made is
        recomputed."""
        choices = self._choices.get(name)
        if choices is None:
            return name not in self._known
        return index < len(choices) and choices[index]

    def left_bytes(self, name: str, index: int) -> int | None:
        """If the plan leaves everything in place that this forward holds: the bytes of that when it was
        measured."""
        return self._left.get((name, index))

    def can_be_followed(self, traced: Iterable[TracedRegion]) -> bool:
        """Whether every forward that the plan recomputes and that began in the ended step can be recomputed.

        Args:
            traced: the step's forwards that can be.
        """
        can = {(each.name, each.index) for each in traced}
        return all(
            (name, index) in can or index >= self._ended_counts.get(name, 0)
            for name, choices in self._choices.items()
            for index, runs in enumerate(choices)
            if runs
        )

    def stays(self, name: str, index: int) -> frozenset[int]:
        """Return the numbers of the saves in this forward that are held: those that something outside it saves
        again, and those that a plan holds which recomputes only a part of the forward."""
        key = name, index
        return self._stays.get(key, frozenset()) | self._planned_stays.get(key, frozenset())

    @property
    def all_stays(self) -> Stays:
        """The numbers of the saves in each forward that something outside saves again."""
        return dict(self._stays)

    def may_try(self, name: str, most: int) -> bool:
        """Count a forward of this name whose replay is to be timed; return whether there were fewer than
        ``most``."""
        self._tried[name] += 1
        return self._tried[name] <= most

    def note_bytes(self, forward: Forward) -> None:
        """Record how much an ended forward saved."""
        self._bytes[forward.name] = max(self.bytes_of(forward.name), forward.nbytes)

    def bytes_of(self, name: str) -> int:
        """Return the most bytes that a recorded forward of this name saved."""
        return self._bytes.get(name, 0)

    def note_name(self, name: str) -> None:
        """Record that a measured step has a forward of this name, which may still be refused."""
        self._known.add(name)

    def record(self, name: str, index: int) -> Forward:
        """Return a new record of a forward."""
        forward = Forward(name, index, len(self._forwards))
        self._forwards.append(forward)
        return forward

    def is_recorded(self, forward: Forward) -> bool:
        """Whether this is a record of the step that is being recorded."""
        at = forward.number
        return at < len(self._forwards) and self._forwards[at] is forward

    def add_small(self, forward: Forward, storage: int, nbytes: int) -> None:
        """Count a tensor that a recorded forward saved and that is too small to be a block."""
        if storage not in self._small:
            forward.small_bytes += nbytes
            self._small[storage] = forward, nbytes
        elif (known := self._small[storage]) is not None and known[0] is not forward:
            self.hold_small(storage)

    def hold_small(self, storage: int) -> None:
        """Record that something else holds this storage, so that discarding it frees nothing."""
        known = self._small.get(storage)
        self._small[storage] = None
        if known is not None:
            known[0].small_bytes -= known[1]

    def saved_again(self, block: int) -> None:
        """Count another save of a block, in a step that is being recorded."""
        self._again[block] += 1

    def take(self) -> list[Forward]:
        """Return the ended step's forwards, and record which of their saves stay."""
        taken, self._forwards = self._forwards, []
        again, self._again = self._again, Counter()
        for each in taken:
            shared = {
                number for number, block in each.saved.items() if again[block] > each.again[block]
            }
            key = each.name, each.index
            self._stays[key] = self._stays.get(key, frozenset()) | shared
            each.operands = {block for block in each.operands if not again[block]}
            firsts = (*each.saved.values(), *each.own)
            each.shared = {block for block in firsts if again[block] > each.again[block]}
        return taken

    def follow(
        self,
        choices: Mapping[str, Sequence[str]],
        stays: Stays,
        left_bytes: Mapping[str, Sequence[int]],
    ) -> None:
        """Follow the plan from now on.

        Args:
            choices: for each forward of a name, :data:`REGION`, :data:`ONCE` or :data:`LEFT`.
            stays: see :data:`Stays`.
            left_bytes: for each forward of a name, if what it holds is not managed, the bytes that it may hold.
        """
        self._choices = {name: [way == REGION for way in each] for name, each in choices.items()}
        self._left = {
            (name, at): nbytes
            for name, each in choices.items()
            for at, (way, nbytes) in enumerate(zip(each, left_bytes.get(name, ()), strict=False))
            if way == LEFT or (way == REGION and nbytes)
        }
        self._known.update(choices)
        self._planned_stays = dict(stays)


def traced_regions(
    forwards: Iterable[Forward],
    stays: Stays,
    blocks: Sequence[Any],
    index: Mapping[int, int],
) -> tuple[TracedRegion, ...]:
    """Return the recorded forwards that can be recomputed and would free something.

    Args:
        forwards: of the step.
        stays: see :meth:`Regions.stays`.
        blocks: of the trace.
        index: block number to its index in ``blocks``.
    """
    found: list[TracedRegion] = []
    forwards = list(forwards)
    graphs = {each.name: (each.graph, each.nbytes) for each in forwards if each.graph is not None}
    for each in forwards:
        # Not of each one a replay was timed.
        graph, nbytes = graphs.get(each.name, (None, 0))
        size = each.nbytes / nbytes if nbytes else 1.0
        if each.graph is not None:
            graph, size = each.graph, 1.0
        held = stays.get((each.name, each.index), frozenset())
        kept = {block for number, block in each.saved.items() if number in held}
        members = sorted(
            {index[block] for block in each.saved.values() if block in index and block not in kept}
        )
        if not each.can_run_again or not members:
            continue
        extra = sum(blocks[index[block]].nbytes for block in kept if block in index)
        inputs = tuple(sorted({index[block] for block in each.inputs if block in index}))
        found.append(
            TracedRegion(
                each.name,
                tuple(members),
                0.0,
                _again_seconds(each, graph, size),
                extra,
                each.index,
                each.small_bytes,
                inputs,
                _cuts(graph, each.saved, members, inputs, blocks, index),
                operands=tuple(sorted(index[at] for at in each.operands if at in index)),
                own=tuple(sorted(index[at] for at in each.own if at in index)),
                others=tuple(sorted(index[at] for at in each.others if at in index)),
                shared=tuple(sorted(index[at] for at in each.shared if at in index)),
            )
        )
    return tuple(found)


def _again_seconds(forward: Forward, graph: CallGraph | None, size: float) -> float:
    """Return the seconds of a replay of this forward, which is ``size`` times as large as the one of the graph.

    A replay is timed by its operations. The forward itself takes longer while a step is recorded: on the CPU it
    allocates memory again that was returned to the system, and an accelerator may wait for the host.
    """
    return graph.seconds * size if graph is not None else forward.seconds


def _cuts(
    graph: CallGraph | None,
    saved: Mapping[int, int],
    members: Sequence[int],
    inputs: Sequence[int],
    blocks: Sequence[Any],
    index: Mapping[int, int],
) -> tuple[RegionCut, ...]:
    """Parts of a forward that can be recomputed, as its graph says, if it saved what that of its graph did."""
    if graph is None or not saved.keys() <= {number for number, _ in graph.saves}:
        return ()
    at = {number: index[block] for number, block in saved.items() if block in index}
    free = {number: blocks[block].nbytes for number, block in at.items() if block in members}
    found: dict[tuple[int, ...], RegionCut] = {}
    for cut in cuts_of(graph, free):
        held = {at[number] for number in cut.stays if number in at}
        left = tuple(member for member in members if member not in held)
        if left and len(left) < len(members):
            given = tuple(sorted({*inputs, *held}))
            found.setdefault(left, RegionCut(left, tuple(sorted(cut.stays)), cut.part, given))
    return tuple(found.values())
