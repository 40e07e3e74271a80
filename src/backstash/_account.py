"""What a stash has done and holds, gathered from all who count it."""

from __future__ import annotations

from ._books import Books
from ._intake import SMALL, Intake
from ._stats import Left, Stats
from .stores import Store

__all__ = ["account"]


def account(
    name: str | None, books: Books, intake: Intake, store: Store | None, note: str
) -> Stats:
    """The record of a stash, whose lock the caller holds. ``note`` is of its workers."""
    counts = books.counts()
    downs, ups = [side.down for side in books.sides], [side.up for side in books.sides]
    hosts = [side.host for side in books.sides if side.host is not None]
    for host in hosts:
        host.rooms.sweep()
    left = {reason: Left(*of_it) for reason, of_it in intake.left.items()}
    if counts.small_saves:
        slow = left.get(SMALL, Left(0, 0))
        left[SMALL] = Left(slow.count + counts.small_saves, slow.nbytes + counts.small_bytes)
    disk_peaks = [down.disk.peak_bytes for down in downs if down.disk is not None]
    disk_peaks += [host.spills.disk_peak_bytes for host in hosts]
    notes = [*(store.notes if store is not None else ()), note, *(host.pool.note for host in hosts)]
    notes += [told for down in downs for told in down.refusals.notes]
    forward_stalls = [down.flights.stall_seconds for down in downs]
    forward_stalls += [host.rooms.stall_seconds for host in hosts]
    return Stats(
        name=name,
        saves=counts.saves + counts.small_saves,
        blocks=books.blocks_alive,
        eligible_bytes=intake.eligible_bytes,
        deduplicated_bytes=intake.deduplicated_bytes,
        keep_bytes=sum(down.keep.nbytes for down in downs),
        keep_peak_bytes=sum(down.keep.peak_bytes for down in downs),
        host_bytes=sum(host.pool.used_bytes for host in hosts),
        host_peak_bytes=sum(host.pool.slab_peak_bytes for host in hosts),
        disk_bytes=store.used_bytes if store is not None else 0,
        disk_peak_bytes=max(disk_peaks, default=0),
        inflight_bytes=sum(down.flights.nbytes for down in downs),
        inflight_peak_bytes=sum(down.flights.peak_bytes for down in downs),
        ahead_bytes=sum(up.ahead_bytes for up in ups),
        ahead_peak_bytes=sum(up.ahead_peak_bytes for up in ups),
        written_bytes=sum(down.flights.written_bytes for down in downs),
        read_bytes=sum(up.read_bytes for up in ups),
        pack_stall_seconds=sum(forward_stalls),
        unpack_stall_seconds=sum(up.stall_seconds for up in ups),
        prefetch_hits=sum(up.hits for up in ups),
        prefetch_misses=sum(up.misses for up in ups),
        left=left,
        notes=tuple(dict.fromkeys(filter(None, notes))),
    )
