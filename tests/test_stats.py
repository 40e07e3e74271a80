"""What a stash reports, gathered from all who count it."""

from types import SimpleNamespace as Of

import pytest

from backstash._admission import SMALL
from backstash._saved.thread_state import Counts
from backstash._stats import Left, account


def tiers(n, *, disk=None, host=None):
    """Counts that are all different: ``n`` tells whose they are."""
    inflight = Of(nbytes=n + 1, peak_bytes=n + 2, written_bytes=n + 3, stall_seconds=n + 0.5)
    down = Of(
        resident=Of(nbytes=n + 4, peak_bytes=n + 5),
        inflight=inflight,
        health=Of(notes={f"note {n}": None}),
        disk=disk,
    )
    up = Of(
        ahead_bytes=n + 6,
        ahead_peak_bytes=n + 7,
        read_bytes=n + 8,
        stall_seconds=n + 0.25,
        hits=n + 9,
        misses=n + 10,
    )
    return Of(evictor=down, prefetcher=up, host=host)


def tier(n, swept):
    return Of(
        buffers=Of(stall_seconds=n + 0.125, sweep=lambda: swept.append(n)),
        pool=Of(used_bytes=n + 1, slab_peak_bytes=n + 2, note=f"pool {n}"),
        writeback=Of(disk_peak_bytes=n + 3),
    )


def books_of(device_tiers, **counts):
    return Of(counts=lambda: Counts(**counts), device_tiers=device_tiers, blocks_alive=3)


INTAKE = Of(left={}, eligible_bytes=40, deduplicated_bytes=50)


def test_every_side_is_counted():
    swept = []
    device_tiers = [
        tiers(100, disk=Of(peak_bytes=900)),
        tiers(2000, host=tier(30_000, swept)),
        tiers(40_000, host=tier(500_000, swept)),
    ]
    session = books_of(device_tiers, saves=5, small_saves=2, small_bytes=70)
    admission = Of(left={SMALL: [1, 10], "it": [2, 20]}, eligible_bytes=40, deduplicated_bytes=50)
    store = Of(used_bytes=77, notes=["of the store"])
    stats = account("mine", session, admission, store, "of the workers")
    assert swept == [30_000, 500_000], "what has ended is looked at first"
    assert (stats.name, stats.saves, stats.blocks) == ("mine", 7, 3)
    assert (stats.eligible_bytes, stats.deduplicated_bytes) == (40, 50)
    assert stats.left == {SMALL: Left(3, 80), "it": Left(2, 20)}
    assert (stats.keep_bytes, stats.keep_peak_bytes) == (42_100 + 12, 42_100 + 15)
    assert (stats.inflight_bytes, stats.inflight_peak_bytes) == (42_100 + 3, 42_100 + 6)
    assert (stats.host_bytes, stats.host_peak_bytes) == (530_002, 530_004)
    assert (stats.disk_bytes, stats.disk_peak_bytes) == (77, 500_003)
    assert (stats.ahead_bytes, stats.ahead_peak_bytes) == (42_100 + 18, 42_100 + 21)
    assert (stats.written_bytes, stats.read_bytes) == (42_100 + 9, 42_100 + 24)
    assert stats.pack_stall_seconds == 42_100 + 1.5 + 530_000 + 0.25
    assert stats.unpack_stall_seconds == 42_100 + 0.75
    assert (stats.prefetch_hits, stats.prefetch_misses) == (42_100 + 27, 42_100 + 30)
    assert stats.notes == (
        "of the store",
        "of the workers",
        "pool 30000",
        "pool 500000",
        "note 100",
        "note 2000",
        "note 40000",
    )


@pytest.mark.parametrize("disk", [None, Of(peak_bytes=900)])
def test_what_there_is_not_is_nothing(disk):
    stats = account(None, books_of([tiers(100, disk=disk)], saves=5), INTAKE, None, "")
    assert (stats.name, stats.saves, stats.left) == (None, 5, {})
    assert (stats.disk_bytes, stats.disk_peak_bytes) == (0, 0 if disk is None else 900)
    assert (stats.host_bytes, stats.host_peak_bytes) == (0, 0)
    assert stats.notes == ("note 100",)


def test_notes_are_told_once_and_small_saves_by_themselves():
    device_tiers = [tiers(100), tiers(100)]
    stats = account(
        "", books_of(device_tiers, small_saves=2, small_bytes=70), INTAKE, None, "note 100"
    )
    assert stats.notes == ("note 100",)
    assert (stats.saves, stats.left) == (2, {SMALL: Left(2, 70)})
