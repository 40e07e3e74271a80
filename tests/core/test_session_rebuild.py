"""Rebuilding a session: from what is alive come the very sums and queues that there were."""

from types import SimpleNamespace

import pytest
import torch

from backstash import Disk, Stash
from backstash._core.session import Session
from backstash._runtime.reclaim import ReclaimQueue
from backstash._saved.block import Block, BlockCleanup, StorageVersion
from backstash._saved.placement import Stored
from backstash._tiers.backing import DiskBacking, DiskCleanup
from backstash._tiers.device_tiers import DeviceTiers
from backstash._tiers.host_backing import HostBacking, HostCleanup
from backstash.stores import Slot
from backstash.testing import TwinDevice, stash_on
from oracle import same_bits

COUNTED = ("blocks", "keep_bytes", "inflight_bytes", "ahead_bytes", "host_bytes", "disk_bytes")
WAYS = {
    "disk": lambda where: Stash(disk=Disk(where), min_bytes=64, inflight=0, prefetch="100KiB"),
    "keep": lambda where: Stash(disk=where, min_bytes=64, inflight=0, keep="100KiB"),
    "accelerator": lambda where: stash_on(
        TwinDevice(chance=0.0), host="200KiB", disk=where, min_bytes=64, inflight=0, keep="50KiB"
    ),
}


def forward(x, looked=lambda: None):
    """Chains of small and of large blocks; ``looked`` is called in the middle of backward."""
    y, small = x, x[:100]
    for _ in range(4):
        y, small = y.exp() * 0.5, small.exp() * 0.5
    y.register_hook(lambda grad: looked())
    for _ in range(4):
        y, small = y.exp() * 0.5, small.exp() * 0.5
    return y.sum() + small.sum()


def counted(stash):
    stats = stash.stats()
    return {name: getattr(stats, name) for name in COUNTED}


def leave_dirty(stash):
    """As if somebody were interrupted in the middle of every entry at once."""
    session = stash._session
    session.blocks_alive += 77
    for tiers in session.device_tiers:
        tiers.evictor.resident.nbytes += 1
        tiers.evictor.inflight.nbytes += 10
        tiers.prefetcher.ahead.nbytes += 100
        tiers.prefetcher.ahead.again_bytes += 1000
    with pytest.raises(KeyboardInterrupt), session.section.lock, session.section:
        raise KeyboardInterrupt


@pytest.mark.parametrize("way", WAYS)
def test_the_sums_are_what_they_were(tmp_path, way):
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(1)).requires_grad_()
    (want,) = torch.autograd.grad(forward(x), x)
    stash, seen = WAYS[way](tmp_path), []

    def look():
        seen.append(counted(stash))
        leave_dirty(stash)
        seen.append(counted(stash))

    with stash:
        loss = forward(x, look)
        look()
    look()
    assert seen[0] == seen[1] and seen[2] == seen[3]
    assert seen[2]["blocks"] > 8 and seen[2]["disk_bytes"] > 0
    (found,) = torch.autograd.grad(loss, x)
    assert same_bits(found, want)
    before, after = seen[4:]
    # Rebuilding waits for the device, and then what was only waited for goes back.
    assert after.pop("host_bytes") <= before.pop("host_bytes")
    assert after == before and before["ahead_bytes"] > 0
    del loss
    (found,) = torch.autograd.grad(forward(x), x)
    leave_dirty(stash)
    stash.close()
    assert counted(stash) == dict.fromkeys(COUNTED, 0)


def test_what_stays_for_another_backward_is_counted_again(tmp_path):
    x = torch.zeros(10_000, requires_grad=True)
    with Stash(disk=tmp_path, min_bytes=64, inflight=0) as stash:
        loss = forward(x)
    torch.autograd.grad(loss, x, retain_graph=True)
    prefetcher = stash._session.device_tiers[0].prefetcher
    before = prefetcher.ahead.again_bytes
    leave_dirty(stash)
    assert stash.stats().ahead_bytes == before == prefetcher.ahead.again_bytes > 0
    del loss
    assert stash.stats().ahead_bytes == prefetcher.ahead.again_bytes == 0
    stash.close()


def test_another_stash_s_blocks_are_not_counted(tmp_path):
    x = torch.randn(10_000).requires_grad_()
    stashes = [WAYS["keep"](tmp_path) for _ in range(2)]
    losses = []
    for stash in stashes:
        with stash:
            losses.append(forward(x))
    before = counted(stashes[0])
    del losses[1]
    leave_dirty(stashes[0])
    assert counted(stashes[0]) == before
    losses.clear()
    for stash in stashes:
        stash.close()
        assert counted(stash) == dict.fromkeys(COUNTED, 0)


# What each part of it is given.


class Part:
    def __init__(self, begun=()):
        self.begun, self.resumed = list(begun), []

    def restore(self, *what):
        self.given = what
        return self.begun

    def resume(self, transfer):
        self.resumed.append(transfer)


def tiers_of(number, begun=(), tier=None):
    return DeviceTiers(number, Part(begun), SimpleNamespace(ahead=Part()), None, tier=tier)


def block_of(reclaim_queue, number, serial, backing=None):
    tensor = torch.zeros(4)
    version = StorageVersion(tensor, tensor.untyped_storage())
    block = Block(version, tensor.detach(), reclaim_queue, number)
    block.cleanup.serial = serial
    if backing is not None:
        block.placement = Stored(backing)
    return block


def test_each_device_s_tiers_are_given_their_own_in_the_order_of_its_making():
    reclaim_queue = ReclaimQueue()
    first, second = tiers_of(0), tiers_of(1, begun=["a write"], tier=Part())
    stranger = block_of(ReclaimQueue(), 0, 5)
    on_disk = DiskBacking(None, Slot(16), 0, reclaim_queue)
    in_host = HostBacking(
        reclaim_queue, 1, SimpleNamespace(memory=torch.zeros(16, dtype=torch.uint8)), None
    )
    late, early = block_of(reclaim_queue, 0, 3, on_disk), block_of(reclaim_queue, 0, 0)
    neighbour = block_of(reclaim_queue, 0, 7, on_disk)  # in the same segment
    unborn, other = block_of(reclaim_queue, 0, -1), block_of(reclaim_queue, 1, 2, in_host)
    half_made = [Block.__new__(Block), BlockCleanup.__new__(BlockCleanup)]
    dead = HostCleanup(reclaim_queue, 1, None)
    block_of(reclaim_queue, 0, 4)  # and dead at once: it is yet to be settled
    thread_states = [SimpleNamespace(waiting=[((lambda: early), False), ((lambda: None), False)])]
    session = SimpleNamespace(
        reclaim_queue=reclaim_queue, device_tiers=[first, second], thread_states=thread_states
    )
    Session.rebuild(session)
    blocks, waiting, cleanups = first.evictor.given
    assert (blocks, waiting) == ([early, late, neighbour], {id(early)})
    of_blocks = cleanups[BlockCleanup]
    assert sorted(each.serial for each in of_blocks) == [-1, 0, 3, 4, 7]
    assert (cleanups[DiskCleanup], cleanups[HostCleanup]) == ([on_disk.cleanup], [])
    assert first.prefetcher.ahead.given == ([on_disk], [early, late, neighbour], cleanups)
    blocks, waiting, cleanups = second.evictor.given
    assert (blocks, waiting) == ([other], {id(early)})
    assert cleanups[BlockCleanup] == [other.cleanup] and cleanups[DiskCleanup] == []
    of_host = cleanups[HostCleanup]
    assert set(of_host) == {in_host.cleanup, dead} and len(of_host) == 2
    assert second.prefetcher.ahead.given == ([in_host], [other], cleanups)
    assert second.tier.given == ([other], of_host)
    assert second.tier.resumed == ["a write"]  # no worker may have been given it
    assert session.blocks_alive == 5  # the dead one is still counted, and the unborn one is not
    del stranger, unborn, half_made
