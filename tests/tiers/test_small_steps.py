"""Steps that save too little to be worth moving stay in memory."""

import pytest
import torch

from backstash import Stash

MIB = 1 << 20


@pytest.fixture
def stash(disk_dir):
    made = Stash(disk=disk_dir)
    made._session.leave_small_steps(16 * MIB)
    yield made
    made.close()


def step(stash: Stash, pieces: int) -> int:
    """Save ``pieces`` blocks of 1 MiB, and go backward: how many bytes were moved."""
    before = stash.stats().written_bytes
    with stash:
        x = torch.ones(MIB // 4, requires_grad=True)
        for _ in range(pieces):
            x = x.sin()
    x.sum().backward()
    return stash.stats().written_bytes - before


def left_alone(stash: Stash) -> int:
    return sum(each.count for reason, each in stash.stats().left.items() if "too little" in reason)


def test_a_small_step_moves_nothing_and_the_one_after_it_is_hardly_looked_at(stash) -> None:
    assert step(stash, 10) == 0 and left_alone(stash) == 0
    assert step(stash, 10) == 0 and left_alone(stash) == 6  # but for three blocks, and the leaf
    assert stash.stats().keep_bytes == 0


def test_a_large_first_step_moves_whole(stash) -> None:
    assert step(stash, 40) == 39 * MIB  # the first input is a leaf
    assert stash.stats().keep_bytes == 0


def test_a_step_that_grows_is_moved_and_so_is_the_next_one(stash) -> None:
    step(stash, 10)
    moved = step(stash, 40)
    assert 39 * MIB - 16 * MIB <= moved < 39 * MIB  # but for what was left alone until then
    assert step(stash, 40) == 39 * MIB


def test_a_step_that_shrinks_is_left_alone_again(stash) -> None:
    step(stash, 40)
    step(stash, 10)
    assert step(stash, 10) == 0


def test_gradients_of_both_kinds_of_step_are_plain_ones(stash) -> None:
    for pieces in (3, 40, 3, 3, 30):
        x = torch.linspace(0.1, 1, MIB // 4, requires_grad=True)
        y = x
        with stash:
            for _ in range(pieces):
                y = y.sin()
        (found,) = torch.autograd.grad(y.sum(), x)
        y = x
        for _ in range(pieces):
            y = y.sin()
        assert torch.equal(found, torch.autograd.grad(y.sum(), x)[0])


def test_a_change_in_place_is_found_in_what_is_left_alone(stash) -> None:
    step(stash, 10)
    with stash:
        x = torch.ones(MIB // 4, requires_grad=True)
        chain = [x.sin()]
        for _ in range(9):
            chain.append(chain[-1].sin())
    with torch.no_grad():
        chain[7].add_(1)
    with pytest.raises(RuntimeError, match=r"modified|changed"):
        chain[-1].sum().backward()


def test_what_small_backwards_leave_alone_in_a_large_step_does_not_add_up(stash) -> None:
    """Local losses go backward while the graph of the step is alive: each begins a pass of its own."""
    step(stash, 10)  # a small one, so that the next is taken for one
    with stash:
        x = torch.ones(MIB // 4, requires_grad=True)
        y = x
        for _ in range(12):
            for _ in range(6):
                y = y.sin()
            (torch.ones(MIB // 4, requires_grad=True) * 2).exp().exp().sum().backward()
    left = sum(each.nbytes for reason, each in stash.stats().left.items() if "too little" in reason)
    assert left <= 24 * MIB, "of 72 MiB that are alive"
    y.sum().backward()


def test_a_storage_that_is_saved_again_counts_once(stash) -> None:
    def twice() -> int:
        before = stash.stats().written_bytes
        with stash:
            x = torch.ones(MIB // 4, requires_grad=True)
            for _ in range(12):
                x = x.exp().clamp(max=1.0).sin()  # exp and clamp save its result, each
        x.sum().backward()
        return stash.stats().written_bytes - before

    stash._session.leave_small_steps(24 * MIB + 512 * 1024)
    assert [twice() for _ in range(5)] == [0] * 5


def test_set_keep_ends_it(stash) -> None:
    stash.set_keep(None)
    assert step(stash, 40) == 0 and left_alone(stash) == 0


@pytest.mark.parametrize(("pieces", "moves"), [(450, False), (600, True)])
def test_of_small_blocks_a_step_may_save_twice_as_much(stash, pieces, moves) -> None:
    """``pieces`` of 64 KiB: 28 and 37 MiB, where a small step of large blocks has 16."""
    for _ in range(3):
        with stash:
            x = torch.ones(16 << 10, requires_grad=True)
            for _ in range(pieces):
                x = x.sin()
        x.sum().backward()
    assert bool(stash.stats().written_bytes) is moves
