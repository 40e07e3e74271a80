"""What a stash reports, gathered from all who count it."""

from types import SimpleNamespace as Of

import pytest
import torch
from torch import nn

from backstash import Stash
from backstash._core.admission import SMALL
from backstash._core.stats import Left, collect
from backstash._saved.thread_state import Counts
from backstash.units import format_bytes


def tiers(n, tier=None, refused=None):
    """Counts that are all different: ``n`` shows whose they are."""
    inflight = Of(nbytes=n + 1, peak_bytes=n + 2, written_bytes=n + 3, stalls=Of(seconds=n + 0.5))
    evictor = Of(
        resident=Of(nbytes=n + 4, peak_bytes=n + 5),
        inflight=inflight,
        health=Of(notes={f"note {n}": None}),
    )
    prefetcher = Of(
        ahead=Of(nbytes=n + 6, peak_bytes=n + 7),
        read_bytes=n + 8,
        stall_seconds=n + 0.25,
        hits=n + 9,
        misses=n + 10,
    )
    packer = Of(
        packed_bytes=n + 11, payload_bytes=n + 12, recomputed_bytes=n, refused=refused or {}
    )
    return Of(evictor=evictor, prefetcher=prefetcher, packer=packer, tier=tier)


def tier(n, swept):
    """A tier below; its figures are of what it has swept."""
    return Of(
        sweep=lambda: swept.append(n),
        host_bytes=n + 1,
        host_peak_bytes=n + 2,
        disk_peak_bytes=n + 3,
        stall_seconds=n + 0.125,
        unfilled_bytes=lambda: 0,
        note=f"tier {n}",
    )


def session_of(device_tiers, **counts):
    return Of(
        counts=lambda: Counts(**counts),
        device_tiers=device_tiers,
        blocks_alive=3,
        planners={},
        small_steps=None,
    )


ADMISSION = Of(
    left={}, eligible_bytes=40, deduplicated_bytes=50, discarded_bytes=0, moved_again_bytes=60
)


def test_every_device_is_counted():
    swept = []
    device_tiers = [
        tiers(100),
        tiers(2000, tier(30_000, swept), {"not packed: it is odd": [1, 7]}),
        tiers(
            40_000,
            tier(500_000, swept),
            {"not packed: it is odd": [2, 60], "not packed: it is even": [3, 5]},
        ),
    ]
    session = session_of(device_tiers, saves=5, small_saves=2, small_bytes=70)
    admission = Of(
        left={SMALL: [1, 10], "it": [2, 20]},
        eligible_bytes=40,
        deduplicated_bytes=50,
        discarded_bytes=3,
        moved_again_bytes=60,
    )
    store = Of(used_bytes=77, notes=["of the store"])
    stats = collect("mine", session, admission, store, "of the workers")
    assert swept == [30_000, 500_000], "what has ended is looked at first"
    assert (stats.name, stats.saves, stats.blocks) == ("mine", 7, 3)
    assert (stats.eligible_bytes, stats.deduplicated_bytes) == (40, 50)
    assert stats.moved_again_bytes == 60
    assert stats.left == {
        SMALL: Left(3, 80),
        "it": Left(2, 20),
        "not packed: it is odd": Left(3, 67),
        "not packed: it is even": Left(3, 5),
    }
    assert (stats.packed_bytes, stats.payload_bytes) == (42_100 + 33, 42_100 + 36)
    assert stats.recomputed_bytes == 42_103
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
        "tier 30000",
        "tier 500000",
        "note 100",
        "note 2000",
        "note 40000",
    )


@pytest.mark.parametrize("below", [False, True])
def test_what_there_is_not_is_nothing(below):
    swept = []
    stats = collect(
        None,
        session_of([tiers(100, tier(900, swept) if below else None)], saves=5),
        ADMISSION,
        None,
        "",
    )
    assert (stats.name, stats.saves, stats.left) == (None, 5, {})
    assert (stats.disk_bytes, stats.disk_peak_bytes) == (0, 903 if below else 0)
    assert (stats.host_bytes, stats.host_peak_bytes) == ((901, 902) if below else (0, 0))
    assert stats.notes == (("tier 900",) if below else ()) + ("note 100",)
    assert swept == ([900] if below else [])


def test_the_most_on_disk_is_of_one_store_that_all_devices_share():
    device_tiers = [tiers(100, tier(900, [])), tiers(200, tier(40, []))]
    stats = collect(None, session_of(device_tiers), ADMISSION, Of(used_bytes=1, notes=[]), "")
    assert (stats.disk_bytes, stats.disk_peak_bytes) == (1, 903)


def test_notes_are_listed_once_and_small_saves_separately():
    device_tiers = [tiers(100), tiers(100)]
    stats = collect(
        "", session_of(device_tiers, small_saves=2, small_bytes=70), ADMISSION, None, "note 100"
    )
    assert stats.notes == ("note 100",)
    assert (stats.saves, stats.left) == (2, {SMALL: Left(2, 70)})


def test_a_small_block_counts_as_what_it_is_and_not_as_its_segment(disk_dir):
    with Stash(disk=disk_dir) as stash:
        y = (torch.ones(64 * 256, requires_grad=True) * 1).exp()
    stats = stash.stats()
    assert stats.written_bytes == stats.disk_bytes == stats.disk_peak_bytes == 64 << 10
    assert stats.disk_file_bytes >= stats.disk_bytes
    assert f"file {format_bytes(stats.disk_file_bytes)}" in str(stats)
    y.sum().backward()
    del y
    stash.close()


def test_what_is_saved_moves_or_is_recomputed_or_stays(disk_dir):
    """Also where a module is recomputed: what it saves is none of the blocks."""

    class Erf(nn.Module):
        def forward(self, x):
            return x.erf().erf().erf()

    first, second = Erf(), Erf()
    x = torch.ones(512, 512, requires_grad=True)
    with Stash(keep="2MiB", disk=disk_dir, min_bytes=0) as stash:
        stash.recompute(first)
        loss = second(first(x * 2)).sum()
    loss.backward()
    stats = stash.stats()
    assert stats.recomputed_bytes == 2 << 20, "the input of the first is held"
    assert stats.eligible_bytes == 4 << 20
    assert stats.stayed_bytes == 2 << 20 and stats.written_bytes == 2 << 20
    stash.close()
