"""A trace: what one training step saved, used and freed, when, and what memory it held besides.

A trace holds no tensors and no addresses: it can be written to a file, and planned for on another machine.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any, Literal

from ..errors import UsageError

__all__ = ["Links", "Moment", "Option", "RegionCut", "Trace", "TracedBlock", "TracedRegion"]

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Option:
    """One way of holding a block: what it costs, and what it occupies."""

    resident_bytes: int
    """Bytes in place from the save to the free."""
    save_seconds: float = 0.0
    """What it adds to the computing thread's time when the block is saved."""
    use_seconds: float = 0.0
    """What it adds when backward uses the block."""
    moved_bytes: int = 0
    """Bytes written down after the save and read back before the use; 0: the link is not needed."""
    made_bytes: int = 0
    """Bytes that are computed again at the first use, and in memory until the free."""


@dataclass(frozen=True, slots=True)
class TracedBlock:
    """One block of the step."""

    group: str
    """Its class: the module's path with ``*`` for numbers, the shape, and which save of that module it is."""
    nbytes: int
    """Its size in bytes."""
    options: Mapping[str, Option]
    """The ways it can be held, by the action's name: ``"keep"`` is always one."""
    saved_until: int = 0
    """Of one that is saved more than once: how many blocks the step has the last time."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened to a block, and what lies between it and the moment before."""

    kind: Literal["save", "use", "free"]
    """``"use"``: its first use."""
    block: int
    """Which block, as its index in ``Trace.blocks``."""
    seconds: float
    """Of computing since the moment before, without waits of the stash's."""
    other_bytes: int
    """The most memory since the moment before that is not the stash's."""


@dataclass(frozen=True, slots=True)
class RegionCut:
    """A part of a call that can be recomputed, while the rest of what the call saves is held."""

    members: tuple[int, ...]
    """The blocks that are discarded, as indices in ``Trace.blocks``."""
    stays: tuple[int, ...]
    """The numbers of the call's saves that are held."""
    part: float
    """Of the seconds of a replay of the whole call."""
    inputs: tuple[int, ...]
    """As :attr:`TracedRegion.inputs`."""


@dataclass(frozen=True, slots=True)
class TracedRegion:
    """One forward of a module that can be recomputed in backward, instead of what it saves being held."""

    name: str
    """The module's path with ``*`` for numbers."""
    members: tuple[int, ...]
    """The blocks that are let go then, as indices in ``Trace.blocks``: what nothing else saves."""
    save_seconds: float = 0.0
    """What noting their bytes adds when they are saved."""
    use_seconds: float = 0.0
    """What the replay adds at the first use of one of them."""
    beside_bytes: int = 0
    """Made again beside them, and freed when the replay has ended."""
    index: int = 0
    """Its place among the forwards of this name in the step, from 0."""
    small_bytes: int = 0
    """Of tensors that are no blocks, and that are let go and made again with them."""
    inputs: tuple[int, ...] = ()
    """The blocks that it is made from, as indices in ``Trace.blocks``; those that moved come back first."""
    cuts: tuple[RegionCut, ...] = ()
    """What else may be recomputed of it, from the least that is held on; see :mod:`backstash._plan.cuts`."""
    stays: tuple[int, ...] = ()
    """Of the cut that this is, see :meth:`cut_at`: the numbers of the saves that are held."""

    def cut_at(self, level: int) -> TracedRegion:
        """The same call where only the part of a cut is recomputed, from 1, the last one if there are fewer; 0:
        the
        whole."""
        if not level or not self.cuts:
            return self
        cut = self.cuts[min(level, len(self.cuts)) - 1]
        return replace(
            self,
            members=cut.members,
            use_seconds=self.use_seconds * cut.part,
            inputs=cut.inputs,
            cuts=(),
            stays=cut.stays,
        )


@dataclass(frozen=True, slots=True)
class Links:
    """How fast bytes move to the tier below and back, in bytes per second, with what each transfer takes."""

    down_rate: float
    up_rate: float
    latency_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Trace:
    """One step."""

    blocks: tuple[TracedBlock, ...]
    moments: tuple[Moment, ...]
    links: Links
    tail_seconds: float = 0.0
    """Of computing after the last moment: the optimizer's, and what else belongs to the step."""
    tail_other_bytes: int = 0
    """The most memory after the last moment that is not the stash's."""
    runs_ahead: bool = False
    """Whether what asks for memory is ahead of what computes, as a host of its accelerator: then a block on its
    way down is in memory until the window is full."""
    regions: tuple[TracedRegion, ...] = ()
    """What can be recomputed as a whole; no block is a member of two."""
    anew_seconds: float = 0.0
    """Of a step that does not leave everything in place: memory is given back before it, and taken again."""
    left_seconds: float | None = None
    """Of a step that did leave everything in place; ``None``: it takes as long as computing."""
    beside_left_bytes: int = 0
    """What a step that leaves everything in place was seen to hold beside what the moments and the blocks say:
    an allocator keeps it, and gives it back when it is told to."""

    @property
    def compute_seconds(self) -> float:
        """The step's time if nothing was moved."""
        return sum(moment.seconds for moment in self.moments) + self.tail_seconds

    def beside_seconds(self, *, all_stay: bool) -> float:
        """What a step takes beside what the moments and the options say."""
        if not all_stay:
            return self.anew_seconds
        return 0.0 if self.left_seconds is None else self.left_seconds - self.compute_seconds

    def left_alone(self) -> list[Option]:
        """Of each block, what it takes where all of them stay: nothing is done about any then."""
        return [Option(block.nbytes) for block in self.blocks]

    def span(self, kind: str) -> dict[int, int]:
        """For each block the index of its moment of this kind."""
        return {moment.block: at for at, moment in enumerate(self.moments) if moment.kind == kind}

    def raised(self, nbytes: int) -> Trace:
        """The same step in a process that holds so many bytes more."""
        moments = tuple(
            replace(each, other_bytes=each.other_bytes + nbytes) for each in self.moments
        )
        return replace(self, moments=moments, tail_other_bytes=self.tail_other_bytes + nbytes)

    @property
    def levels(self) -> int:
        """How many cuts the region has that has most."""
        return max((len(each.cuts) for each in self.regions), default=0)

    def cut_at(self, level: int) -> Trace:
        """The same step where of each region only a part can be recomputed: see :meth:`TracedRegion.cut_at`."""
        if not level:
            return self
        return replace(self, regions=tuple(each.cut_at(level) for each in self.regions))

    def computing(self, seconds: float) -> Trace:
        """The same step where computing takes so long. What options and replays take was timed itself."""
        scale = seconds / self.compute_seconds
        return replace(
            self,
            moments=tuple(replace(each, seconds=each.seconds * scale) for each in self.moments),
            tail_seconds=self.tail_seconds * scale,
        )

    def moving_at_most(self, nbytes: int, name: str) -> Trace:
        """The same step where the tier of this ``name`` can hold so many bytes: what is saved first may go."""
        left, blocks = nbytes, []
        for block in self.blocks:
            options = dict(block.options)
            moved = options[name].moved_bytes if name in options else 0
            if moved > left:
                del options[name]
            else:
                left -= moved
            blocks.append(replace(block, options=options))
        return replace(self, blocks=tuple(blocks))

    def keeping_below(self, nbytes: int) -> Trace:
        """The same step where smaller blocks stay in place; this one where there are none."""
        if all(each.nbytes >= nbytes for each in self.blocks):
            return self
        blocks = (
            each if each.nbytes >= nbytes else replace(each, options={"keep": each.options["keep"]})
            for each in self.blocks
        )
        return replace(self, blocks=tuple(blocks))

    def check(self) -> None:
        """Raise ``ValueError`` where a step cannot be like that, as one that a file describes may not be."""
        if self.span("save").keys() != set(range(len(self.blocks))):
            raise ValueError("each block is saved once")
        if any(each.block not in range(len(self.blocks)) for each in self.moments):
            raise ValueError("a moment of no block")
        if any("keep" not in each.options for each in self.blocks):
            raise ValueError("each block may be kept")
        numbers = [each.seconds for each in self.moments]
        numbers += [
            number
            for block in self.blocks
            for each in (*block.options.values(), Option(block.nbytes))
            for number in astuple(each)
        ]
        numbers += [self.beside_left_bytes, *(each.other_bytes for each in self.moments)]
        numbers += [self.links.down_rate, self.links.up_rate, self.links.latency_seconds]
        if any(not math.isfinite(each) or each < 0 for each in numbers):
            raise ValueError("seconds, bytes and rates are not below 0")
        if not (self.links.down_rate and self.links.up_rate):
            raise ValueError("a rate of 0")
        members = [at for each in self.regions for at in (*each.members, *each.inputs)]
        cuts = [cut for each in self.regions for cut in each.cuts]
        members += [at for each in cuts for at in (*each.members, *each.inputs)]
        if not all(each.members and 0 <= each.part <= 1 for each in cuts):
            raise ValueError("a cut recomputes blocks, in a part of the time")
        if not all(each.members and each.small_bytes >= 0 for each in self.regions):
            raise ValueError("a region lets go of blocks")
        if any(not 0 <= at < len(self.blocks) for at in members):
            raise ValueError("a region of blocks that there are not")

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a JSON file."""
        return {"format": _FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Any) -> Trace:
        """The trace that :meth:`as_dict` described.

        Raises:
            UsageError: the values are not those of a trace.
        """
        try:
            if values["format"] != _FORMAT:
                raise UsageError(
                    f"a trace of format {values['format']!r}: this version reads {_FORMAT}"
                )
            left = values.get("left_seconds")
            trace = cls(
                tuple(
                    TracedBlock(
                        each["group"],
                        each["nbytes"],
                        {name: Option(**option) for name, option in each["options"].items()},
                        int(each.get("saved_until", 0)),
                    )
                    for each in values["blocks"]
                ),
                tuple(Moment(**each) for each in values["moments"]),
                Links(**values["links"]),
                float(values["tail_seconds"]),
                int(values["tail_other_bytes"]),
                bool(values.get("runs_ahead", False)),
                tuple(
                    TracedRegion(
                        **{
                            **each,
                            "members": tuple(each["members"]),
                            "inputs": tuple(each.get("inputs", ())),
                            "cuts": tuple(_cut(cut) for cut in each.get("cuts", ())),
                            "stays": tuple(each.get("stays", ())),
                        }
                    )
                    for each in values.get("regions", ())
                ),
                float(values.get("anew_seconds", 0.0)),
                None if left is None else float(left),
                int(values.get("beside_left_bytes", 0)),
            )
            trace.check()
            return trace
        except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"this is no trace of a step: {error!r}") from error

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Trace:
        """The trace in a file that holds what :meth:`as_dict` gives, as JSON.

        Raises:
            UsageError: the file cannot be read, or is no trace of a step.
        """
        try:
            with open(path, encoding="utf-8") as file:
                return cls.from_dict(json.load(file))
        except (OSError, ValueError, UsageError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise UsageError(
                f"{os.fspath(path)!r} is no trace of a step; allowed: a file that `backstash plan --trace FILE "
                f"SCRIPT` wrote ({why})"
            ) from error

    def uses(self) -> Iterator[int]:
        """The blocks in the order in which backward first uses them."""
        return (moment.block for moment in self.moments if moment.kind == "use")


def _cut(values: Any) -> RegionCut:
    members, stays, inputs = (tuple(values[name]) for name in ("members", "stays", "inputs"))
    return RegionCut(members, stays, float(values["part"]), inputs)
