"""A stash under load: threads, graphs by the hundred, steps by the hundred; `scripts/soak_load.py` is the long form."""

import gc
import sys
from pathlib import Path

import pytest
import torch

from backstash import Stash
from backstash.testing import TwinDevice, stash_on

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from under_load.footprint import footprint

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


@pytest.mark.parametrize("backward", [True, False], ids=["differentiated", "dropped"])
@pytest.mark.parametrize("mix", ROOMY)
def test_the_books_of_what_is_gone_take_no_memory(tmp_path, mix, backward):
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
