"""A recording at one moment, with derived figures: the record that a timeline's renderers get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..units import format_bytes
from ._levels import Level, Phase, Step, levels_of, phases_of, steps_of
from ._lives import RECOMPUTED, UNKNOWN, Lives, ModuleUse, lives_of

__all__ = ["TimelineSnapshot"]


@dataclass(frozen=True, eq=False)
class TimelineSnapshot:
    """The input of the renderers of a :class:`~backstash.report.Timeline`.

    Its properties have the names and meanings of those of ``Timeline``. Each is computed at its first read and
    cached, and so are the events, because a recording creates an object for each event at every read.
    """

    recording: Any
    """An object with ``events``, and optionally ``full``."""
    moments: tuple[tuple[float, str], ...]
    """The end of each step, by ``time.perf_counter()``, and the step's label."""
    began: float
    """When the timeline was made, by ``time.perf_counter()``."""

    @cached_property
    def events(self) -> tuple[Any, ...]:
        events = self.recording.events
        return tuple(sorted(events, key=lambda event: event.seconds + event.duration_seconds))

    @property
    def full(self) -> bool:
        return bool(getattr(self.recording, "full", False))

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        return levels_of(self.events)

    @cached_property
    def lives(self) -> Lives:
        return lives_of(self.events)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        return phases_of(self.events)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        moments: Sequence[tuple[float, str]] = self.moments
        if self.full and self.events:
            last = self.events[-1].seconds + self.events[-1].duration_seconds
            moments = [moment for moment in moments if moment[0] <= last]
        return steps_of(moments, self.began, self.events)

    @property
    def modules(self) -> tuple[ModuleUse, ...]:
        return self.lives.modules

    @cached_property
    def stalls(self) -> tuple[Any, ...]:
        found = [event for event in self.events if event.kind == "stall"]
        return tuple(sorted(found, key=lambda event: -event.duration_seconds))

    @cached_property
    def began_seconds(self) -> float:
        first: float = min([self.began, *(event.seconds for event in self.events)])
        return first

    @property
    def memory_peak_bytes(self) -> int:
        return max((level.memory_bytes for level in self.levels), default=0)

    @property
    def saved_peak_bytes(self) -> int:
        return self.lives.peak_bytes

    @property
    def reads_ahead(self) -> int:
        return sum(event.kind == "read" and event.cause == "ahead" for event in self.events)

    @property
    def reads_on_demand(self) -> int:
        return sum(event.kind == "read" and event.cause == "demand" for event in self.events)

    def made_again(self, cause: str) -> int:
        """Return how often bytes were recomputed (``"recomputed"``) or unpacked (``"packed"``)."""
        return sum(event.kind == "decode" and event.cause == cause for event in self.events)

    @property
    def made_again_seconds(self) -> float:
        return float(sum(each.duration_seconds for each in self.events if each.kind == "decode"))

    @cached_property
    def notes(self) -> tuple[str, ...]:
        return tuple(_notes(self))


def _notes(line: TimelineSnapshot) -> list[str]:
    """Return sentences on what is unknown."""
    found = []
    if not line.events:
        found.append(
            "Nothing was recorded: no tensor that may move was saved during the recording."
        )
    elif not line.steps:
        found.append(
            "Where a step ends is not known: no optimizer stepped and mark() was not called."
        )
    if line.full:
        found.append(
            f"The recording stopped at its limit of {len(line.events):,} events; later events are not "
            "in it."
        )
    lives = line.lives
    if lives.recomputed_bytes:
        found.append(
            f"{format_bytes(lives.recomputed_bytes)} were saved while backward ran (recomputed, or for a "
            f"second backward), marked {RECOMPUTED.strip()}: their path begins at the recomputed part, not at "
            "the model."
        )
    unknown = sum(
        use.saved_bytes for use in lives.modules if use.path.removeprefix(RECOMPUTED) == UNKNOWN
    )
    if unknown:
        found.append(
            f"{format_bytes(unknown)} belong to no known module: they were saved outside any module's "
            "forward, or on a thread that runs none."
        )
    return found
