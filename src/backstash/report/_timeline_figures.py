"""The figures of a recording: what its events say about levels, steps, modules and waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

from ..units import format_bytes
from ._levels import Level, Phase, Step, phases_of, steps_of
from ._lives import RECOMPUTED, UNKNOWN, Lives, ModuleUse, lives_of

__all__ = ["TimelineFigures"]

_T = TypeVar("_T")


class TimelineFigures:
    """Everything that can be read from a :class:`~backstash.report.Timeline`.

    Each figure is computed when it is read. After the end of the recording it is computed once.

    Args:
        recording: an object with ``events``, and optionally ``full``.
        moments: the end of each step, by ``time.perf_counter()``, and the step's label.
        began: when the timeline was made, by ``time.perf_counter()``.
        ended: whether the recording and ``moments`` do not change any more.
    """

    def __init__(
        self, recording: Any, moments: Sequence[tuple[float, str]], *, began: float, ended: bool
    ) -> None:
        self._recording = recording
        self._moments = moments
        self._began = began
        self._ended = ended
        self._known: dict[str, Any] = {}

    def _once(self, name: str, compute: Callable[[], _T]) -> _T:
        """Return a figure, which is remembered under its name if the recording has ended."""
        if name in self._known:
            value: _T = self._known[name]
            return value
        value = compute()
        if self._ended:
            self._known[name] = value
        return value

    def at_present(self) -> TimelineFigures:
        """Return the figures as they are now, which do not change while the recording continues."""
        if self._ended:
            return self
        so_far = SimpleNamespace(events=self.events, full=self.full)
        return TimelineFigures(so_far, tuple(self._moments), began=self._began, ended=True)

    @property
    def events(self) -> tuple[Any, ...]:
        """All events, in the order of their ends; times are those of ``time.perf_counter()``."""
        return self._once("events", lambda: tuple(sorted(self._recording.events, key=_end_of)))

    @property
    def full(self) -> bool:
        """Whether the recording has ended because it reached its limit of events."""
        return bool(getattr(self._recording, "full", False))

    @property
    def lives(self) -> Lives:
        """Where the bytes of each block were over time, with sums by module."""
        return self._once("lives", lambda: lives_of(self.events))

    @property
    def levels(self) -> tuple[Level, ...]:
        """The bytes in each tier after every change."""
        return self.lives.levels

    @property
    def steps(self) -> tuple[Step, ...]:
        """The training steps whose end is known."""
        return self._once("steps", lambda: _steps(self))

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Forward and backward, inferred from saves and uses."""
        return self._once("phases", lambda: phases_of(self.events))

    @property
    def modules(self) -> tuple[ModuleUse, ...]:
        """What the operations of each module saved, the module that saved most first.

        What a recomputation saves is marked ``(in backward)``; its path begins at the recomputed part. What is
        saved outside any module, or on a thread that runs none, is ``(no module known)``.
        """
        return self.lives.modules

    @property
    def stalls(self) -> tuple[Any, ...]:
        """The events in which a computing thread waited for the stash, the longest first."""
        found = (event for event in self.events if event.kind == "stall")
        return tuple(sorted(found, key=lambda event: -event.duration_seconds))

    @property
    def began_seconds(self) -> float:
        """When the timeline began, or its first event if that is earlier, by ``time.perf_counter()``."""
        first: float = min([self._began, *(event.seconds for event in self.events)])
        return first

    @property
    def memory_peak_bytes(self) -> int:
        """Most bytes that the stash held in the memory of the tensors' own device."""
        return max((level.memory_bytes for level in self.levels), default=0)

    @property
    def saved_peak_bytes(self) -> int:
        """Most bytes that were saved and not yet freed at the same time, on any tier."""
        return self.lives.peak_bytes

    @property
    def reads_ahead(self) -> int:
        """Number of reads that the stash began before backward needed them."""
        return self._count("read", "ahead")

    @property
    def reads_on_demand(self) -> int:
        """Number of reads that began only when backward needed them."""
        return self._count("read", "demand")

    @property
    def recomputed_blocks(self) -> int:
        """Number of times that backward recomputed a block."""
        return self._count("decode", "recomputed")

    @property
    def unpacked_blocks(self) -> int:
        """Number of times that backward unpacked a block."""
        return self._count("decode", "packed")

    def _count(self, kind: str, cause: str) -> int:
        return sum(event.kind == kind and event.cause == cause for event in self.events)

    @property
    def made_again_seconds(self) -> float:
        """Seconds of recomputing and unpacking, without reads and waits."""
        return float(sum(each.duration_seconds for each in self.events if each.kind == "decode"))

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what is unknown."""
        return tuple(_notes(self.at_present()))


def _end_of(event: Any) -> Any:
    return event.seconds + event.duration_seconds


def _steps(line: TimelineFigures) -> tuple[Step, ...]:
    events, moments = line.events, line._moments
    if line.full and events:
        last = _end_of(events[-1])
        moments = [moment for moment in moments if moment[0] <= last]
    return steps_of(moments, line._began, events)


def _notes(line: TimelineFigures) -> list[str]:
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
