"""A stash under load, in small; `scripts/soak_load.py` is the long form."""

import gc
import sys
import threading
from pathlib import Path

import pytest
import torch

from backstash import Stash
from backstash.testing import TwinDevice, stash_on

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from long_tests import mostly_long, takes_long
from under_load.blocks import MODES, Alive, many_blocks
from under_load.extents import PATTERNS, SHARE, spread
from under_load.footprint import footprint
from under_load.graphs import many_graphs
from under_load.mixes import MIXES
from under_load.steps import LEAKS, TIERS, changing_steps, growth
from under_load.threads import closed_meanwhile, many_threads

KIB = 1 << 10

# Each never reaches one of its budgets, so that nothing is ever taken from the front of some queue.
ROOMY = {
    "keep": lambda where: Stash(keep=None, disk=where, min_bytes=0),
    "disk": lambda where: Stash(disk=where, min_bytes=0, inflight=0),
    "in flight": lambda where: Stash(disk=where, min_bytes=0),
    "host": lambda where: stash_on(TwinDevice(chance=1.0), host="64MiB", min_bytes=0),
    "host, disk": lambda where: stash_on(
        TwinDevice(chance=1.0), host="300MiB", inflight="299MiB", disk=where, min_bytes=0
    ),
}


def steps(stash, x, count, *, backward):
    for _ in range(count):
        with stash:
            y = x
            for _ in range(10):
                y = torch.tanh(y * 1.1)
        if backward:
            y.sum().backward()
    del y
    gc.collect()
    stash.stats()
    return footprint(stash)[0]


@takes_long
@pytest.mark.parametrize("backward", [True, False], ids=["differentiated", "dropped"])
@pytest.mark.parametrize("mix", ROOMY)
def test_what_is_gone_takes_no_memory(tmp_path, mix, backward):
    stash = ROOMY[mix](tmp_path)
    x = torch.randn(16, 16, requires_grad=True)
    with stash:
        held = torch.exp(x * 1.0)
        looked_at = held * held.sum() + held.sin()
    # One of its entries has been used and the other not: what was read waits for it.
    torch.autograd.grad(looked_at.sum(), held, retain_graph=True)
    before = steps(stash, x, 150, backward=backward)
    after = steps(stash, x, 150, backward=backward)
    assert after < before + 700  # 1,500 blocks have come and gone
    del held, looked_at
    stash.close()


@pytest.fixture
def one_thread_in_torch():
    """The same sums on every thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore::backstash.StashWarning")
@pytest.mark.usefixtures("one_thread_in_torch")
@pytest.mark.parametrize("mix", mostly_long(MIXES, *[*MIXES][::2]))
def test_eight_threads_on_one_stash(tmp_path, mix):
    seed = 100 * list(MIXES).index(mix)
    assert many_threads(mix, str(tmp_path), rounds=2, seed=seed, patience=60) == []


@pytest.mark.usefixtures("one_thread_in_torch")
@pytest.mark.parametrize("mix", ["keep, disk", "host, disk"])
def test_a_stash_that_is_closed_while_threads_use_it(tmp_path, mix):
    assert closed_meanwhile(mix, str(tmp_path), seed=1, patience=60) == []


@takes_long
@pytest.mark.filterwarnings("ignore::backstash.StashWarning")
@pytest.mark.parametrize(
    "mix", mostly_long(["keep, disk", "tiny windows", "tiny host, disk"], "tiny host, disk")
)
def test_a_hundred_graphs_in_random_order(tmp_path, mix):
    assert many_graphs(mix, str(tmp_path), rounds=1, seed=5) == []


@pytest.mark.parametrize("mode", mostly_long(["in place", "disk"], "disk"))
def test_many_blocks_come_and_go(tmp_path, mode):
    assert mode in MODES
    *moments, last = many_blocks(mode, str(tmp_path), counts=[1000, 10_000])
    assert isinstance(last, Alive) and len(moments) == 1, last
    assert last.blocks == 10_000


@pytest.mark.parametrize("tiers", ["keep, disk", "host, disk"])
def test_steps_of_changing_shapes_leave_nothing(tmp_path, tiers):
    assert tiers in TIERS
    looks = list(changing_steps(tiers, str(tmp_path), steps=60, seed=0))
    assert [look.wrong for look in looks] == [""] * 6
    assert growth([look.held for look in looks]) == []


@pytest.mark.parametrize("leak", mostly_long(LEAKS, "blocks"))
def test_a_leak_would_be_found(tmp_path, leak):
    looks = changing_steps("keep, disk", str(tmp_path), steps=36, seed=0, leak=leak)
    assert growth([look.held for look in looks])


@pytest.mark.parametrize("name", PATTERNS)
def test_the_file_stays_near_what_is_alive(name):
    found = spread(PATTERNS[name], steps=200)
    assert found.ratio < (6 if name == "Robson's" else SHARE)


def test_threads_that_save_one_tensor_see_no_change_that_there_was_not(tmp_path):
    """Each with a stash of its own: whether two tensors share a version is found out unseen."""
    shared = torch.randn(64, requires_grad=True) * 1.0
    stashes = [Stash(keep=None, disk=tmp_path, min_bytes=0) for _ in range(4)]
    found = []

    def work(stash):
        try:
            for _ in range(150):
                with stash:
                    loss = sum(shared.sin() for _ in range(20))
                torch.autograd.grad(loss.sum(), shared)
        except RuntimeError as error:
            found.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(each,)) for each in stashes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert found == []
    for stash in stashes:
        stash.close()
