"""A trace: which blocks one training step saved, used and freed, when, and what other memory it held.

A trace contains no tensors and no addresses, so it can be written to a file and planned for on another machine.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any, Literal

from ..errors import UsageError

__all__ = ["Links", "Moment", "Option", "RegionCut", "Trace", "TracedBlock", "TracedRegion"]

_FORMAT = 2


@dataclass(frozen=True, slots=True)
class Option:
    """One way of holding a block: its costs and its memory."""

    resident_bytes: int
    """Bytes in place from the save to the free."""
    save_seconds: float = 0.0
    """Seconds that it adds to the computing thread when the block is saved."""
    use_seconds: float = 0.0
    """Seconds that it adds when backward uses the block."""
    moved_bytes: int = 0
    """Bytes written after the save and read back before the use; 0 if it needs no transfer."""
    made_bytes: int = 0
    """Bytes recomputed or unpacked at the first use, and in memory until the free."""


@dataclass(frozen=True, slots=True)
class TracedBlock:
    """One block of the step."""

    group: str
    """Its class: the module's path with ``*`` for numbers, the operation, the ordinal of the save, and the
    size."""
    nbytes: int
    """Its size in bytes."""
    options: Mapping[str, Option]
    """The ways to hold it, by the action's name; always includes ``"keep"``."""
    saved_until: int = 0
    """If it is saved more than once: the number of blocks in the step at its last save; else 0."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A save, use or free of a block, and what happened since the moment before."""

    kind: Literal["save", "use", "free"]
    """``"use"`` is the block's first use."""
    block: int
    """Which block, as its index in ``Trace.blocks``."""
    seconds: float
    """Seconds of computing since the moment before, without the stash's waits."""
    other_bytes: int
    """Peak memory since the moment before that is not the stash's, in bytes."""


@dataclass(frozen=True, slots=True)
class RegionCut:
    """A part of a call that can be recomputed, while the rest of what the call saves is held."""

    members: tuple[int, ...]
    """The blocks that are discarded, as indices in ``Trace.blocks``."""
    stays: tuple[int, ...]
    """The numbers of the call's saves that are held."""
    part: float
    """The seconds of its replay, as a fraction of those of the whole call's."""
    inputs: tuple[int, ...]
    """As :attr:`TracedRegion.inputs`."""


@dataclass(frozen=True, slots=True)
class TracedRegion:
    """One forward of a module that can be recomputed in backward, instead of holding what it saves."""

    name: str
    """The module's path with ``*`` for numbers."""
    members: tuple[int, ...]
    """The blocks discarded then, as indices in ``Trace.blocks``: those that nothing else saves."""
    save_seconds: float = 0.0
    """Seconds that the hooks of their saves take."""
    use_seconds: float = 0.0
    """Seconds that the replay adds at the first use of a member."""
    beside_bytes: int = 0
    """Bytes that the replay computes in addition to the members, and frees when it has ended."""
    index: int = 0
    """Its index among the step's forwards of this name, from 0."""
    small_bytes: int = 0
    """Bytes of tensors that are too small to be blocks and are discarded and recomputed with the members."""
    inputs: tuple[int, ...] = ()
    """The blocks of its inputs, as indices in ``Trace.blocks``; those that moved are read back before the
    replay."""
    cuts: tuple[RegionCut, ...] = ()
    """The parts of it that can be recomputed instead, the one that holds the least first; see
    :mod:`backstash._plan.cuts`."""
    stays: tuple[int, ...] = ()
    """The numbers of the saves that are held, if only a part is recomputed; see :meth:`cut_at`."""
    operands: tuple[int, ...] = ()
    """The blocks that exist only if it is recomputed, since a replay reads them."""
    own: tuple[int, ...] = ()
    """Further blocks that it saves first, which no replay computes."""
    others: tuple[int, ...] = ()
    """Further blocks that it saves, which were saved before."""
    shared: tuple[int, ...] = ()
    """The blocks that it saves first, and that something outside it saves again. They are held."""
    held: tuple[int, ...] = ()
    """The blocks that are members if all of it is recomputed, and that this part of it holds; see
    :meth:`cut_at`."""

    def cut_at(self, level: int) -> TracedRegion:
        """Return this call with only a part of it recomputed: that of the cut ``level`` - 1, or the last one.
        0:
        all of it."""
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
            held=tuple(sorted({*self.members}.difference(cut.members))),
        )


@dataclass(frozen=True, slots=True)
class Links:
    """Transfer rates to and from the tier below, in bytes per second."""

    down_rate: float
    up_rate: float


@dataclass(frozen=True, slots=True)
class Trace:
    """The record of one step."""

    blocks: tuple[TracedBlock, ...]
    moments: tuple[Moment, ...]
    links: Links
    tail_seconds: float = 0.0
    """Seconds of computing after the last moment, such as the optimizer's."""
    tail_other_bytes: int = 0
    """Peak memory after the last moment that is not the stash's, in bytes."""
    runs_ahead: bool = False
    """Whether the thread that allocates memory runs ahead of the device, as with an accelerator: then a block
    that is being written stays in memory until the window is full."""
    regions: tuple[TracedRegion, ...] = ()
    """The forwards that can be recomputed; no block is a member of two."""
    anew_seconds: float = 0.0
    """Seconds that a step takes in addition if not every block stays in place: memory is freed before it and
    allocated again."""
    left_seconds: float | None = None
    """Seconds of a step in which every block stays in place; ``None``: as many as its computing takes."""
    beside_left_bytes: int = 0
    """Bytes that a step in which every block stays in place held beyond the moments and blocks: the allocator
    caches them, and frees them on request. Negative: it held less, since measuring takes memory, too."""

    @property
    def compute_seconds(self) -> float:
        """Seconds of the step if no block was moved."""
        return sum(moment.seconds for moment in self.moments) + self.tail_seconds

    def extra_seconds(self, *, all_stay: bool) -> float:
        """Return the seconds of a step that the moments and options do not include."""
        if not all_stay:
            return self.anew_seconds
        return 0.0 if self.left_seconds is None else self.left_seconds - self.compute_seconds

    def left_alone(self) -> list[Option]:
        """Return each block's option if all blocks stay in place (unmanaged), which costs no time."""
        left = [Option(block.nbytes) for block in self.blocks]
        for region in self.regions:
            for operand in region.operands:
                left[operand] = Option(0)
        return left

    def span(self, kind: str) -> dict[int, int]:
        """Return each block's moment of this kind, as an index."""
        return {moment.block: at for at, moment in enumerate(self.moments) if moment.kind == kind}

    def raised(self, nbytes: int) -> Trace:
        """Return the same step in a process that holds this many bytes more."""
        moments = tuple(
            replace(each, other_bytes=each.other_bytes + nbytes) for each in self.moments
        )
        return replace(self, moments=moments, tail_other_bytes=self.tail_other_bytes + nbytes)

    def cut_at(self, levels: Sequence[int]) -> Trace:
        """Return the same step with a part of each region recomputed, see :meth:`TracedRegion.cut_at`; no
        levels: the whole of each."""
        if not any(levels):
            return self
        regions = zip(self.regions, levels, strict=True)
        return replace(self, regions=tuple(each.cut_at(level) for each, level in regions))

    def computing(self, seconds: float) -> Trace:
        """Return the same step with this many seconds of computing. Options and replays keep their own measured
        times."""
        scale = seconds / self.compute_seconds
        return replace(
            self,
            moments=tuple(replace(each, seconds=each.seconds * scale) for each in self.moments),
            tail_seconds=self.tail_seconds * scale,
        )

    def moving_at_most(self, nbytes: int, name: str) -> Trace:
        """Return the same step where the tier called ``name`` holds at most this many bytes; blocks saved first
        take them."""
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
        """Return the same step where blocks smaller than this stay in place; this trace if there are none."""
        if all(each.nbytes >= nbytes for each in self.blocks):
            return self
        blocks = (
            each if each.nbytes >= nbytes else replace(each, options={"keep": each.options["keep"]})
            for each in self.blocks
        )
        return replace(self, blocks=tuple(blocks))

    def check(self) -> None:
        """Raise ``ValueError`` if no step can have this trace, for example one that was read from a file."""
        if self.span("save").keys() != set(range(len(self.blocks))):
            raise ValueError("a block is not saved exactly once")
        if any(each.block not in range(len(self.blocks)) for each in self.moments):
            raise ValueError("a moment refers to a block that does not exist")
        if any("keep" not in each.options for each in self.blocks):
            raise ValueError('a block has no option "keep"')
        numbers = [each.seconds for each in self.moments]
        numbers += [
            number
            for block in self.blocks
            for each in (*block.options.values(), Option(block.nbytes))
            for number in astuple(each)
        ]
        # It may be negative, but not by more than the blocks have.
        numbers.append(self.beside_left_bytes + sum(each.nbytes for each in self.blocks))
        numbers += [each.other_bytes for each in self.moments]
        numbers += [self.links.down_rate, self.links.up_rate]
        if any(not math.isfinite(each) or each < 0 for each in numbers):
            raise ValueError("a time, a size or a rate is negative or not finite")
        if not (self.links.down_rate and self.links.up_rate):
            raise ValueError("a transfer rate is 0")
        members = [
            at
            for each in self.regions
            for at in (
                *each.members,
                *each.inputs,
                *each.operands,
                *each.own,
                *each.others,
                *each.shared,
                *each.held,
            )
        ]
        cuts = [cut for each in self.regions for cut in each.cuts]
        members += [at for each in cuts for at in (*each.members, *each.inputs)]
        if not all(each.members and 0 <= each.part <= 1 for each in cuts):
            raise ValueError("a cut has no blocks, or its part is not between 0 and 1")
        if not all(each.members and each.small_bytes >= 0 for each in self.regions):
            raise ValueError("a region has no blocks, or its small_bytes are negative")
        if any(not 0 <= at < len(self.blocks) for at in members):
            raise ValueError("a region refers to a block that does not exist")

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        return {"format": _FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Any) -> Trace:
        """Return the trace that :meth:`as_dict` described.

        Raises:
            UsageError: the values are not those of a trace.
        """
        try:
            if values["format"] != _FORMAT:
                raise UsageError(
                    f"the trace has format {values['format']!r}, and this version reads {_FORMAT}"
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
                Links(*(float(values["links"][name]) for name in ("down_rate", "up_rate"))),
                float(values["tail_seconds"]),
                int(values["tail_other_bytes"]),
                bool(values.get("runs_ahead", False)),
                tuple(
                    TracedRegion(
                        **{
                            **_with_tuples(each),
                            "cuts": tuple(
                                RegionCut(**_with_tuples(cut)) for cut in each.get("cuts", ())
                            ),
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
            raise UsageError(f"this is not the trace of a step: {error!r}") from error

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Trace:
        """Return the trace in a JSON file of what :meth:`as_dict` returns.

        Raises:
            UsageError: the file cannot be read, or is not a trace.
        """
        try:
            with open(path, encoding="utf-8") as file:
                return cls.from_dict(json.load(file))
        except (OSError, ValueError, UsageError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise UsageError(
                f"{os.fspath(path)!r} is not the trace of a step; allowed: a file that `backstash plan "
                f"--trace FILE SCRIPT` wrote ({why})"
            ) from error


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same values with tuples in place of lists, which JSON has."""
    return {name: tuple(of) if type(of) is list else of for name, of in values.items()}
