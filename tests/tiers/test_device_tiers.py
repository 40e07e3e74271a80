"""What the tiers of a device are made from, what they count, and how they share the host's memory."""

from types import SimpleNamespace

import pytest
import torch

from backstash import Stash
from backstash._device.memory import DeviceMemory
from backstash._runtime.reclaim import ReclaimQueue
from backstash._tiers.base import LowerTier
from backstash._tiers.device_tiers import DeviceTiers
from backstash._tiers.disk import DiskTier
from backstash._tiers.host import HostTier
from backstash._tiers.host_backing import HostCleanup
from backstash.testing import MemoryStore, TwinDevice, stash_on

PAGE = 4096


def test_without_a_store_a_cpu_has_nothing_below():
    with Stash() as stash, Stash(disk=MemoryStore()) as other:
        without, below = stash._session.device_tiers[0], other._session.device_tiers[0]
    assert without.tier is None and type(below.tier) is DiskTier
    assert without.device is None and without.number == 0
    assert without.evictor.resident.memory is None


@pytest.mark.parametrize("disk", [False, True])
def test_below_an_accelerator_is_host_memory_whatever_is_below_that(disk):
    device = TwinDevice()
    with stash_on(device, host="1MiB", disk=MemoryStore() if disk else None) as stash:
        tiers = stash._session.device_tiers[1]
    assert type(tiers.tier) is HostTier and tiers.tier.writeback.disk is stash._store
    assert tiers.device is device and tiers.number == 1
    memory = tiers.evictor.resident.memory
    assert type(memory) is DeviceMemory and memory.device is device
    stash.close()


def test_without_host_memory_an_accelerator_has_nothing_below():
    with stash_on(TwinDevice(), host=0, disk=MemoryStore()) as stash:
        tiers = stash._session.device_tiers[1]
    assert tiers.tier is None and stash._config.pools == []
    stash.close()


def test_pools_take_no_more_than_they_leave(monkeypatch):
    monkeypatch.setattr("backstash._tiers.device_tiers.spare_bytes", lambda: 1001)
    with stash_on(TwinDevice()) as stash:
        config = stash._config
    del config.pools[:]
    assert config._more_host() == 500
    config.pools.extend([SimpleNamespace(slab_bytes=300), SimpleNamespace(slab_bytes=201)])
    assert config._more_host() == 250
    config.pools.append(SimpleNamespace(slab_bytes=600))
    assert config._more_host() == -50, "others have taken what there was"


def test_a_device_that_nothing_drives_has_a_reason_and_no_tiers():
    with Stash() as stash:
        assert stash._config.tiers_of(torch.device("meta"), 1) == "device meta"


def test_a_device_is_notified_of_what_its_stream_saves():
    device, used = TwinDevice(), []
    device.used = lambda tensor: used.append(tensor) or "a stream"
    with stash_on(device, host="1MiB", min_bytes=0) as stash:
        held = torch.ones(100, requires_grad=True).exp()
    assert held.grad_fn._raw_saved_result.data.block.stream == "a stream"
    assert len(used) == 1 and used[0].data_ptr() == held.data_ptr()
    del held
    stash.close()


# What is counted.


def moved(stash, count=4):
    """Graphs whose saved tensors, a page each, are where a copy or a write has brought them."""
    with stash:
        graphs = [torch.ones(1024, requires_grad=True).exp() for _ in range(count)]
    stash._workers.close()
    for tiers in stash._session.device_tiers:
        if tiers.device is not None:
            tiers.device.run(-1, -1)
    stash.stats()
    return graphs


FIGURES = ("used_bytes", "host_bytes", "host_peak_bytes", "disk_peak_bytes")


def figures(tier):
    return [getattr(tier, name) for name in FIGURES]


def test_the_figures_of_a_disk_below_a_cpu(monkeypatch):
    monkeypatch.setattr("backstash._tiers.segments.SMALL_BYTES", 0)
    stash = Stash(disk=MemoryStore(), min_bytes=0)
    graphs = moved(stash)
    tier, stats = stash._session.device_tiers[0].tier, stash.stats()
    assert isinstance(tier, LowerTier) and tier.runs_ahead is False
    assert figures(tier) == [4 * PAGE, 0, 0, 4 * PAGE] and tier.note == ""
    assert (stats.disk_bytes, stats.disk_peak_bytes) == (4 * PAGE, 4 * PAGE)
    assert (stats.host_bytes, stats.host_peak_bytes) == (0, 0)
    tier.stalls.seconds = 1.5
    assert stash.stats().pack_stall_seconds >= 1.5
    del graphs
    assert stash.stats().disk_bytes == 0 and figures(tier) == [0, 0, 0, 4 * PAGE]
    stash.close()


@pytest.mark.parametrize("pages_on_disk", [0, 2, 4])
def test_the_figures_of_host_memory_below_an_accelerator(pages_on_disk):
    """What is used is that of both: room on disk is room, too."""
    device = TwinDevice(chance=1.0)
    store = MemoryStore() if pages_on_disk else None
    early = pages_on_disk * PAGE
    stash = stash_on(device, host=4 * PAGE, disk=store, inflight=early, min_bytes=0)
    graphs = moved(stash)
    tier, stats = stash._session.device_tiers[1].tier, stash.stats()
    assert isinstance(tier, LowerTier) and tier.runs_ahead is True
    assert figures(tier) == [(4 + pages_on_disk) * PAGE, 4 * PAGE, 4 * PAGE, pages_on_disk * PAGE]
    assert (stats.host_bytes, stats.host_peak_bytes) == (4 * PAGE, 4 * PAGE)
    assert (stats.disk_bytes, stats.disk_peak_bytes) == (pages_on_disk * PAGE,) * 2
    tier.buffers.stall_seconds = 1.5
    assert tier.stall_seconds == 1.5 and stash.stats().pack_stall_seconds >= 1.5
    tier.pool.note = "host memory is not what it was"
    assert tier.note == tier.pool.note and tier.note in stash.stats().notes
    del graphs
    assert stash.stats().host_bytes == 0
    assert figures(tier) == [0, 0, 4 * PAGE, pages_on_disk * PAGE]
    stash.close()
    assert tier.host_peak_bytes == 4 * PAGE, "the most that was ever pinned"


def test_what_an_object_that_died_took_part_in_is_subtracted():
    with stash_on(TwinDevice(), host="1MiB") as stash:
        tiers = stash._session.device_tiers[1]
    tiers.evictor.resident.nbytes, tiers.evictor.inflight.nbytes = 100, 50
    tiers.subtract(resident_bytes=30)
    tiers.subtract(inflight_bytes=20)
    assert (tiers.evictor.resident.nbytes, tiers.evictor.inflight.nbytes) == (70, 30)
    tiers.prefetcher.ahead.again_bytes = 9
    tiers.subtract(resident_bytes=70, inflight_bytes=30, again_bytes=8)
    assert tiers.prefetcher.ahead.again_bytes == 1
    assert (tiers.evictor.resident.nbytes, tiers.evictor.inflight.nbytes) == (0, 0)
    stash.close()


def test_a_dead_backing_s_cleanup_goes_to_the_tier_that_has_its_buffer():
    deferred = []
    tiers = DeviceTiers(1, None, None, None, tier=SimpleNamespace(defer=deferred.append))
    left = HostCleanup(ReclaimQueue(), 1, None)
    left.settle(tiers)
    assert deferred == [left]


def test_when_all_blocks_have_died_each_part_is_notified():
    forgotten = []

    def part(name):
        return SimpleNamespace(forget=lambda: forgotten.append(name))

    prefetcher = SimpleNamespace(ahead=part("ahead"))
    DeviceTiers(1, part("evictor"), prefetcher, None, tier=part("tier")).forget()
    assert forgotten == ["evictor", "ahead", "tier"]
    DeviceTiers(0, part("evictor"), prefetcher, None, tier=None).forget()
    assert forgotten[3:] == ["evictor", "ahead"]


class Least(LowerTier):
    """Has what a tier must have, and nothing else."""

    runs_ahead = False
    used_bytes = 0

    def begin(self, block):
        raise NotImplementedError

    def fetch(self, backing, *, ahead):
        raise NotImplementedError


def test_a_tier_that_counts_nothing_has_figures_all_the_same():
    tier = Least()
    assert figures(tier) == [0, 0, 0, 0] and (tier.stall_seconds, tier.note) == (0.0, "")
    for done in (tier.poll, tier.sweep, tier.forget, tier.close):
        assert done() is None
    assert tier.restore([], []) is tier.defer(None) is tier.resume(None) is None
    with pytest.raises(TypeError, match="abstract"):
        LowerTier()
