"""Statistics of a stash: counted while it runs, read as one frozen record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .._saved.thread_state import Counts
from .._text import clean, html_table, show_text
from .._tiers.base import LowerTier
from ..stores import Store
from ..units import format_bytes
from .admission import FITS, NESTED, PARAMETER, SMALL, SMALL_STEP, Admission
from .session import Session

__all__ = ["Left", "Stats", "collect"]


@dataclass(frozen=True, slots=True)
class Left:
    """The tensors that stayed in memory for one reason."""

    count: int
    """The number of saves."""
    nbytes: int
    """Their bytes; a storage that was saved twice counts twice."""


@dataclass(frozen=True, slots=True)
class Stats:
    """What a stash has done and holds at one moment. Bytes moved only grow; bytes held rise and fall.

    ``docs/reference/statistics.md`` lists the same fields.
    """

    name: str | None
    """The stash's name."""
    saves: int
    """Tensors that autograd gave to the stash."""
    blocks: int
    """Pieces of storage that the stash manages now."""
    eligible_bytes: int
    """Bytes of all blocks so far, each storage counted once however many views of it were saved."""
    deduplicated_bytes: int
    """Bytes of saves that were views of a block already held, and so cost nothing."""
    moved_again_bytes: int
    """Bytes of storages that were saved again after they had moved, because they were or may have been written
    since; part of ``eligible_bytes``."""
    packed_bytes: int
    """Original bytes of the blocks that were packed so far."""
    payload_bytes: int
    """Bytes that they were packed to. They count as held wherever they are."""
    recomputed_bytes: int
    """Bytes discarded so far, to be recomputed in backward: of blocks, and of modules' saves."""
    stayed_bytes: int
    """Bytes of the blocks so far that stayed in memory: not moved, recomputed or freed by packing."""
    keep_bytes: int
    """Bytes held in memory now."""
    keep_peak_bytes: int
    """The most bytes held in memory at once."""
    host_bytes: int
    """Bytes held in host memory for accelerators now, in whole pages; 0 for CPU tensors."""
    host_peak_bytes: int
    """The most bytes of pinned memory that were allocated for it at once, used or not."""
    disk_bytes: int
    """Bytes held on disk now, each slot rounded up to the disk's unit; for a segment that is being filled, the
    bytes in it."""
    disk_file_bytes: int
    """The size of the file in bytes; ``disk_bytes`` if the store has no file."""
    disk_peak_bytes: int
    """The most bytes on disk at once."""
    inflight_bytes: int
    """Bytes in flight to a lower tier now, the source still in memory."""
    inflight_peak_bytes: int
    """The most bytes in flight at once."""
    ahead_bytes: int
    """Bytes read back and held for a later use now."""
    ahead_peak_bytes: int
    """The most bytes read back and held at once."""
    written_bytes: int
    """Bytes sent to a lower tier so far: given to the disk, or copied into a segment, written when full."""
    read_bytes: int
    """Bytes brought back so far."""
    pack_stall_seconds: float
    """Seconds that forward waited for space in the ``inflight`` window."""
    unpack_stall_seconds: float
    """Seconds that backward waited for bytes to come back."""
    prefetch_hits: int
    """Uses of a block that was requested before backward needed it."""
    prefetch_misses: int
    """Uses of a block that was not."""
    left: Mapping[str, Left]
    """Tensors that stayed in memory, by reason. If the reason begins with ``"not packed: "`` or
    ``"not recomputed: "``, the tensor only kept its size, and may have moved."""
    hooks_off: int
    """How often the hooks were off for the rest of a context, because its step fits: see :class:`Stash`.
    Those saves are in no other figure."""
    notes: tuple[str, ...]
    """Fallbacks that were taken, each with its reason."""

    @property
    def stall_seconds(self) -> float:
        """Seconds that the computing threads waited for the stash, in forward and backward."""
        return self.pack_stall_seconds + self.unpack_stall_seconds

    def as_dict(self, prefix: str = "") -> dict[str, float]:
        """Return the figures as a flat dict of floats, for a training log.

        Args:
            prefix: is put before each name. Default ``""``.

        >>> from backstash import Stash
        >>> figures = Stash().stats().as_dict(prefix="stash/")
        >>> figures["stash/keep_bytes"], figures["stash/stall_seconds"]
        (0.0, 0.0)
        """
        return {
            prefix + name: float(value)
            for name, value in self.as_json().items()
            if isinstance(value, int | float)
        }

    def as_json(self) -> dict[str, Any]:
        """Return the whole record as plain values, for JSON."""
        return {**asdict(self), "stall_seconds": self.stall_seconds}

    def _host_line(self) -> list[str]:
        if not self.host_peak_bytes:
            return []
        now, peak = format_bytes(self.host_bytes), format_bytes(self.host_peak_bytes)
        return [f"  in host    {now:>9} now {peak:>9} taken"]

    def _packed_line(self) -> list[str]:
        if not self.packed_bytes:
            return []
        was, now = format_bytes(self.packed_bytes), format_bytes(self.payload_bytes)
        return [f"  packed     {was:>9} to {now}"]

    def _recomputed_line(self) -> list[str]:
        nbytes = self.recomputed_bytes
        return [f"  recomputed {format_bytes(nbytes):>9}"] if nbytes else []

    def _hooks_off_line(self) -> list[str]:
        if not self.hooks_off:
            return []
        times = f"{self.hooks_off} times for the rest of a context, whose step fits"
        return [f"  hooks off  {times}: PyTorch alone holds it"]

    def __str__(self) -> str:
        size = format_bytes
        lines = [
            f"stash {self.name or ''}".rstrip()
            + f": {self.saves} saves, {self.blocks} blocks alive",
            f"  in place   {size(self.keep_bytes):>9} now {size(self.keep_peak_bytes):>9} peak",
            f"  in flight  {size(self.inflight_bytes):>9} now {size(self.inflight_peak_bytes):>9} peak",
            *self._host_line(),
            f"  on disk    {size(self.disk_bytes):>9} now {size(self.disk_peak_bytes):>9} peak, "
            f"file {size(self.disk_file_bytes)}",
            f"  read ahead {size(self.ahead_bytes):>9} now {size(self.ahead_peak_bytes):>9} peak",
            f"  moved      {size(self.written_bytes)} down, {size(self.read_bytes)} up; "
            f"{size(self.deduplicated_bytes)} saved again at no cost",
            *self._packed_line(),
            *self._recomputed_line(),
            f"  waited     {self.pack_stall_seconds:.3f} s in forward, "
            f"{self.unpack_stall_seconds:.3f} s in backward; "
            f"{self.prefetch_hits} blocks read ahead of need, {self.prefetch_misses} not",
        ]
        for reason, left in sorted(self.left.items(), key=lambda item: -item[1].nbytes):
            lines.append(f"  left       {size(left.nbytes):>9} in {left.count} saves: {reason}")
        lines += self._hooks_off_line()
        lines += [f"  note       {note}" for note in self.notes]
        return "\n".join(map(clean, lines))

    _repr_pretty_ = show_text

    def _repr_html_(self) -> str:
        size = format_bytes
        rows = [
            (where, size(now), size(peak))
            for where, now, peak in (
                ("in place", self.keep_bytes, self.keep_peak_bytes),
                ("in flight", self.inflight_bytes, self.inflight_peak_bytes),
                ("in host memory", self.host_bytes, self.host_peak_bytes),
                ("on disk", self.disk_bytes, self.disk_peak_bytes),
                ("read ahead", self.ahead_bytes, self.ahead_peak_bytes),
            )
            if peak
        ]
        title, *lines = str(self).splitlines()
        rest = [line.strip() for line in lines if not line.strip().startswith(_IN_TABLE)]
        return html_table(title, ("", "now", "peak"), rows, rest)


_IN_TABLE = ("in place", "in flight", "in host", "on disk", "read ahead")


def _left(session: Session, admission: Admission, counts: Counts) -> dict[str, Left]:
    """Return what stayed in place, by reason."""
    left: dict[str, Left] = {}

    def add(reason: str, count: int, nbytes: int) -> None:
        if count:
            known = left.get(reason, Left(0, 0))
            left[reason] = Left(known.count + count, known.nbytes + nbytes)

    for of in (admission.left, *(tiers.packer.refused for tiers in session.device_tiers)):
        for reason, (count, nbytes) in list(of.items()):
            add(reason, count, nbytes)
    add(SMALL, counts.small_saves, counts.small_bytes)
    add(PARAMETER, counts.parameter_saves, counts.parameter_bytes)
    fits = FITS if session.small_steps is None else SMALL_STEP
    add(fits, counts.fitting_saves, counts.fitting_bytes)
    add(NESTED, counts.nested_saves, counts.nested_bytes)
    return left


def collect(
    name: str | None,
    session: Session,
    admission: Admission,
    store: Store | None,
    note: str,
    *,
    nested: bool = False,
) -> Stats:
    """Return the statistics of a stash. The caller holds its lock, unless ``nested``, which only reads.

    ``note`` is the note of its workers.
    """
    counts = session.counts()
    evictors = [tiers.evictor for tiers in session.device_tiers]
    prefetchers = [tiers.prefetcher for tiers in session.device_tiers]
    below = [tiers.tier for tiers in session.device_tiers if tiers.tier is not None]
    if not nested:
        for tier in below:
            tier.sweep()
    stalls = [
        *(each.inflight.stalls.seconds for each in evictors),
        *(each.stall_seconds for each in below),
    ]
    unfilled = sum(tier.unfilled_bytes() for tier in below)
    on_disk = store.used_bytes - unfilled if store is not None else 0
    packers = [tiers.packer for tiers in session.device_tiers]
    packed = sum(packer.packed_bytes for packer in packers)
    payload = sum(packer.payload_bytes for packer in packers)
    recomputed = sum(packer.recomputed_bytes for packer in packers)
    written = sum(evictor.inflight.written_bytes for evictor in evictors)
    gone = written + recomputed + packed - payload
    return Stats(
        name=name,
        saves=counts.saves + counts.small_saves + counts.fitting_saves,
        blocks=session.blocks_alive,
        eligible_bytes=admission.eligible_bytes,
        deduplicated_bytes=admission.deduplicated_bytes,
        packed_bytes=packed,
        payload_bytes=payload,
        recomputed_bytes=recomputed + admission.discarded_bytes,
        stayed_bytes=max(0, admission.eligible_bytes - gone),
        moved_again_bytes=admission.moved_again_bytes,
        keep_bytes=sum(evictor.resident.nbytes for evictor in evictors),
        keep_peak_bytes=sum(evictor.resident.peak_bytes for evictor in evictors),
        host_bytes=sum(tier.host_bytes for tier in below),
        host_peak_bytes=sum(tier.host_peak_bytes for tier in below),
        disk_bytes=on_disk,
        disk_file_bytes=getattr(store, "file_bytes", on_disk),
        disk_peak_bytes=max((tier.disk_peak_bytes for tier in below), default=0),
        inflight_bytes=sum(evictor.inflight.nbytes for evictor in evictors),
        inflight_peak_bytes=sum(evictor.inflight.peak_bytes for evictor in evictors),
        ahead_bytes=sum(prefetcher.ahead.nbytes for prefetcher in prefetchers),
        ahead_peak_bytes=sum(prefetcher.ahead.peak_bytes for prefetcher in prefetchers),
        written_bytes=written,
        read_bytes=sum(prefetcher.read_bytes for prefetcher in prefetchers),
        pack_stall_seconds=sum(stalls),
        unpack_stall_seconds=sum(prefetcher.stall_seconds for prefetcher in prefetchers),
        prefetch_hits=sum(prefetcher.hits for prefetcher in prefetchers),
        prefetch_misses=sum(prefetcher.misses for prefetcher in prefetchers),
        left=_left(session, admission, counts),
        hooks_off=counts.times_off,
        notes=_notes(session, store, note, below),
    )


def _notes(
    session: Session, store: Store | None, note: str, below: Sequence[LowerTier]
) -> tuple[str, ...]:
    """Return the notes of the store, the workers (``note``), the tiers and the controllers."""
    notes = [*(store.notes if store is not None else ()), note, *(tier.note for tier in below)]
    for tiers in session.device_tiers:
        notes += tiers.evictor.health.notes
    for planner in session.planners.values():
        notes += planner.notes
    return tuple(dict.fromkeys(filter(None, notes)))
