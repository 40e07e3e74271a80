"""Making the books anew: from what is alive come the very sums and queues that there were."""

from types import SimpleNamespace

import pytest
import torch

from backstash import Disk, Stash
from backstash._runtime.reclaim import BlockCleanup, HostCleanup, ReclaimQueue
from backstash._saved.block import Block, StorageVersion
from backstash._session import rebuild
from backstash._tiers.host_backing import HostBacking
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


def tear(stash):
    """As if somebody were interrupted in the middle of every entry at once."""
    session = stash._session
    session.blocks_alive += 77
    for tiers in session.device_tiers:
        tiers.evictor.resident.nbytes += 1
        tiers.evictor.inflight.nbytes += 10
        tiers.prefetcher.ahead_bytes += 100
    with pytest.raises(KeyboardInterrupt), session.lock, session.section:
        raise KeyboardInterrupt


@pytest.mark.parametrize("way", WAYS)
def test_the_sums_are_what_they_were(tmp_path, way):
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(1)).requires_grad_()
    (want,) = torch.autograd.grad(forward(x), x)
    stash, seen = WAYS[way](tmp_path), []

    def look():
        seen.append(counted(stash))
        tear(stash)
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
    # Mending waits for the device, and then what was only waited for goes back.
    assert after.pop("host_bytes") <= before.pop("host_bytes")
    assert after == before and before["ahead_bytes"] > 0
    del loss
    (found,) = torch.autograd.grad(forward(x), x)
    tear(stash)
    stash.close()
    assert counted(stash) == dict.fromkeys(COUNTED, 0)


def test_another_stash_s_blocks_are_not_counted(tmp_path):
    x = torch.randn(10_000).requires_grad_()
    stashes = [WAYS["keep"](tmp_path) for _ in range(2)]
    losses = []
    for stash in stashes:
        with stash:
            losses.append(forward(x))
    before = counted(stashes[0])
    del losses[1]
    tear(stashes[0])
    assert counted(stashes[0]) == before
    losses.clear()
    for stash in stashes:
        stash.close()
        assert counted(stash) == dict.fromkeys(COUNTED, 0)


# What each part of the books is given.


class Way:
    def restore(self, *what):
        self.given = what


def tiers_of(number, reclaim_queue, host=None):
    return SimpleNamespace(
        number=number,
        reclaim_queue=reclaim_queue,
        evictor=Way(),
        prefetcher=Way(),
        host=host,
        stream=lambda: None,
    )


def block_of(tiers, serial):
    tensor = torch.zeros(4)
    block = Block(StorageVersion(tensor, tensor.untyped_storage()), tensor.detach(), tiers)
    block.cleanup.serial = serial
    return block


def test_each_side_is_given_what_is_its_own_in_the_order_of_its_making():
    reclaim_queue = ReclaimQueue()
    first, second = tiers_of(0, reclaim_queue), tiers_of(1, reclaim_queue, host=Way())
    stranger = block_of(tiers_of(0, ReclaimQueue()), 5)
    late, early = block_of(first, 3), block_of(first, 0)
    unborn, other = block_of(first, -1), block_of(second, 2)
    half_made = [Block.__new__(Block), BlockCleanup.__new__(BlockCleanup)]
    late.backing, other.backing = Way(), HostBacking.__new__(HostBacking)
    late.cleanup.loaded_bytes, other.cleanup.loaded_bytes = 10, 20
    dead = HostCleanup(reclaim_queue, 1, None)
    dead.loaded_bytes = 300
    block_of(first, 4)  # and dead at once: it is yet to be settled
    thread_states = [SimpleNamespace(waiting=[((lambda: early), False), ((lambda: None), False)])]
    session = SimpleNamespace(reclaim_queue=reclaim_queue, device_tiers=[first, second])
    rebuild(session, thread_states)
    blocks, waiting, cleanup = first.evictor.given
    assert (blocks, waiting) == ([early, late], {id(early)})
    assert {each.serial for each in cleanup} == {-1, 0, 3, 4} and len(cleanup) == 4
    assert (
        first.prefetcher.given == ([late.backing, early, late],)
        and first.prefetcher.ahead_bytes == 10
    )
    blocks, _, cleanup = second.evictor.given
    assert blocks == [other] and set(cleanup) == {other.cleanup, dead}
    assert (
        second.prefetcher.given == ([other.backing, other],)
        and second.prefetcher.ahead_bytes == 320
    )
    assert second.host.given == ([other.backing], [dead])
    assert session.blocks_alive == 4  # the dead one is still counted, and the unborn one is not
    other.backing = None  # which has no end of its own
    del stranger, unborn, half_made
