"""The bytes in each tier over time, and the steps and phases of a recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..places import PLACES

__all__ = ["BELOW", "TIERS", "Level", "Phase", "Step", "levels_of", "phases_of", "steps_of"]

_HELD = ("keep", "inflight", "ahead", "host", "disk")  # in each event
_NOT_HELD = ("packed", "recomputed")  # computed from the blocks that are alive
TIERS = {f"{key}_bytes": PLACES[key].label for key in (*_HELD, *_NOT_HELD)} | {
    "packed_bytes": "freed by packing"  # bytes before packing, less bytes after
}
"""The labels of the places of saved bytes by field name, from the tensors' own memory down. The last two are
not stored anywhere: bytes freed by packing, and bytes discarded to be recomputed."""

BELOW = tuple(f"{key}_bytes" for key in (*_HELD, *_NOT_HELD) if PLACES[key].is_below)
"""The fields whose bytes are not in the tensors' own memory."""

_FIELDS = tuple(f"{key}_bytes" for key in _HELD)


@dataclass(frozen=True, slots=True)
class Level:
    """The bytes in each tier at one moment."""

    seconds: float
    """The time, by ``time.perf_counter()``."""
    keep_bytes: int
    """Bytes in place."""
    inflight_bytes: int
    """Bytes that are being written, whose memory is not freed yet."""
    ahead_bytes: int
    """Bytes that were read back and are held until backward uses them."""
    host_bytes: int
    """Bytes of an accelerator's tensors in host memory."""
    disk_bytes: int
    """Bytes on disk."""
    packed_bytes: int = 0
    """Bytes freed by packing, of blocks saved during the recording: their size before packing, less the packed
    size, which is in one of the places above."""
    recomputed_bytes: int = 0
    """Bytes discarded, to be recomputed, of blocks saved during the recording."""

    @property
    def memory_bytes(self) -> int:
        """Bytes in the memory of the tensors' own device."""
        return self.keep_bytes + self.inflight_bytes + self.ahead_bytes


@dataclass(frozen=True, slots=True)
class Phase:
    """A period in which there were only saves, or only uses."""

    name: str
    """``"forward"`` or ``"backward"``."""
    begin_seconds: float
    """The time of its first save or use."""
    end_seconds: float
    """The beginning of the next phase, or the end of the last event."""


@dataclass(frozen=True, slots=True)
class Step:
    """One training step."""

    label: str
    """Its number from 1, or the label given to ``mark``."""
    begin_seconds: float
    """The end of the step before, or the beginning of the recording."""
    end_seconds: float
    """When the optimizer had stepped or ``mark`` was called."""
    peak_bytes: int
    """Most bytes that the stash held in the memory of the tensors' own device."""
    stall_seconds: float
    """Seconds that computing threads waited for the stash; two threads that wait at the same time count
    twice."""
    down_bytes: int
    """Bytes whose memory was freed after they were written to a lower tier."""
    read_bytes: int
    """Bytes that were read back."""
    made_again_seconds: float = 0.0
    """Seconds of unpacking and recomputing, without reads and waits."""

    @property
    def seconds(self) -> float:
        """The length of the step."""
        return self.end_seconds - self.begin_seconds


def levels_of(events: Sequence[Any], moves: Sequence[Any]) -> tuple[Level, ...]:
    """Return the bytes in each tier after each event that changed them. ``moves`` has each event's move, or
    ``None``."""
    found: list[Level] = []
    last: tuple[int, ...] = ()
    packed = recomputed = 0
    for event, move in zip(events, moves, strict=True):
        if move is not None:
            packed += move.packed_bytes
            recomputed += move.recomputed_bytes
        held = (*(max(0, getattr(event, name)) for name in _FIELDS), packed, recomputed)
        if held != last:
            found.append(Level(event.seconds + event.duration_seconds, *held))
            last = held
    return tuple(found)


def phases_of(events: Sequence[Any]) -> tuple[Phase, ...]:
    """Return forward and backward phases. Saves while backward runs are part of backward."""
    turns: list[tuple[float, str]] = []
    for event in events:
        name = {"save": "forward", "use": "backward"}.get(event.kind)
        if event.kind == "save" and event.cause == "backward":
            name = "backward"
        if name is not None and (not turns or turns[-1][1] != name):
            turns.append((event.seconds, name))
    if not turns:
        return ()
    ends = [begin for begin, _ in turns[1:]]
    ends.append(max(event.seconds + event.duration_seconds for event in events))
    return tuple(Phase(name, begin, end) for (begin, name), end in zip(turns, ends, strict=True))


def steps_of(
    moments: Sequence[tuple[float, str]], began: float, events: Sequence[Any]
) -> tuple[Step, ...]:
    """Return the steps that end at ``moments``, in order; an event belongs to the step in which it ended."""
    found = []
    at = 0
    for end, label in moments:
        within = []
        while at < len(events) and events[at].seconds + events[at].duration_seconds <= end:
            within.append(events[at])
            at += 1
        found.append(_step(label, began, end, within))
        began = end
    return tuple(found)


def _step(label: str, began: float, end: float, events: Sequence[Any]) -> Step:
    return Step(
        label,
        began,
        end,
        max((level.memory_bytes for level in levels_of(events, [None] * len(events))), default=0),
        sum(event.duration_seconds for event in events if event.kind == "stall"),
        sum(event.nbytes for event in events if event.kind == "land"),
        sum(event.nbytes for event in events if event.kind == "read"),
        sum(event.duration_seconds for event in events if event.kind == "decode"),
    )
