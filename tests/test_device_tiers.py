"""What the sides of a stash are made from, and how they share the host's memory."""

from types import SimpleNamespace

import torch

from backstash import Stash
from backstash._tiers import device_tiers as _device_tiers
from backstash.testing import MemoryStore, TwinDevice, stash_on


def test_without_a_store_a_cpu_has_nothing_below():
    with Stash() as stash, Stash(disk=MemoryStore()) as other:
        without, below = stash._session.device_tiers[0], other._session.device_tiers[0]
    assert (without.evictor.disk, without.has_tier) == (None, False)
    assert below.evictor.disk is not None and below.has_tier
    assert without.stream() is None


def test_pools_take_no_more_than_they_leave(monkeypatch):
    monkeypatch.setattr(_device_tiers, "spare_bytes", lambda: 1001)
    with stash_on(TwinDevice()) as stash:
        plan = stash._plan
    del plan.pools[:]
    assert plan._more_host() == 500
    plan.pools.extend([SimpleNamespace(slab_bytes=300), SimpleNamespace(slab_bytes=201)])
    assert plan._more_host() == 250
    plan.pools.append(SimpleNamespace(slab_bytes=600))
    assert plan._more_host() == -50, "others have taken what there was"


def test_a_device_that_nothing_drives_has_a_reason_and_no_side():
    with Stash() as stash:
        assert stash._plan.tiers_of(torch.device("meta"), 1) == "device meta"


def test_a_device_is_told_what_its_stream_saves():
    device, used = TwinDevice(), []
    device.used = used.append
    with stash_on(device, host="1MiB", min_bytes=0) as stash:
        held = torch.ones(100, requires_grad=True).exp()
    tiers = stash._session.device_tiers[1]
    assert tiers.stream() == "the current stream"
    assert len(used) == 1 and used[0].data_ptr() == held.data_ptr()
    del held
    stash.close()
