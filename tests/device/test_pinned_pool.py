"""The host tier's slabs: inside their budget, used again, and pinned or released as a whole."""

import pytest
import torch

from backstash._device import pinned_pool as _pinned_pool
from backstash._device.pinned_pool import PinnedPool
from backstash.stores import _buffer_pool

PAGE = 4096


class Pins:
    def __init__(self, refusal=""):
        self.refusal, self.locked, self.unpinned = refusal, [], []
        # Of PyTorch's allocator: what was asked of it, why it gives nothing, what it has back.
        self.asked, self.none, self.given_back = [], "none here", []

    def pool(self, budget):
        return PinnedPool(budget, self)

    def pin(self, memory):
        self.locked.append(memory.numel())
        return self.refusal

    def pinned(self, nbytes):
        self.asked.append(nbytes)
        return self.none or _buffer_pool.mapped(nbytes)

    def unpin(self, memory):
        self.unpinned.append(memory.numel())

    def give_back(self, memory):
        self.given_back.append(memory.numel())


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch):
    monkeypatch.setattr(_pinned_pool, "_SLAB_BYTES", 8 * PAGE)


def test_buffers_lie_side_by_side_in_a_slab():
    pins = Pins()
    pool = pins.pool(None)
    buffers = [pool.take(nbytes) for nbytes in (100, PAGE, PAGE + 1)]
    assert [buffer.offset for buffer in buffers] == [0, PAGE, 2 * PAGE]
    assert [buffer.memory.numel() for buffer in buffers] == [100, PAGE, PAGE + 1]
    assert all(buffer.memory.data_ptr() % PAGE == 0 for buffer in buffers)
    assert buffers[1].memory.dtype == torch.uint8
    assert (pool.used_bytes, pool.slab_bytes, pool.slab_peak_bytes) == (
        4 * PAGE,
        8 * PAGE,
        8 * PAGE,
    )
    pool.give(buffers[1])
    assert pool.used_bytes == 3 * PAGE
    assert pool.take(PAGE).offset == PAGE  # where that was
    assert pins.locked == [8 * PAGE] and pool.note == ""


def test_a_slab_is_as_large_as_what_asks_for_it():
    pins = Pins()
    pool = pins.pool(None)
    large = pool.take(20 * PAGE - 5)
    assert (pool.slab_bytes, large.memory.numel()) == (20 * PAGE, 20 * PAGE - 5)
    other = pool.take(PAGE)
    assert other.slab is not large.slab and pool.slab_bytes == 28 * PAGE
    assert pool.slab_peak_bytes == 28 * PAGE and pins.locked == [20 * PAGE, 8 * PAGE]


def test_a_slab_that_is_full_is_passed_over():
    pool = Pins().pool(None)
    first = [pool.take(8 * PAGE), pool.take(PAGE)]
    assert first[0].slab is not first[1].slab
    held = pool.take(7 * PAGE)
    assert held.slab is first[1].slab and held.offset == PAGE
    pool.give(first[0])
    assert pool.take(8 * PAGE).slab is first[0].slab
    assert pool.slab_bytes == 16 * PAGE


def test_bytes_in_pieces_are_no_buffer():
    """Enough is free in the slab, and nowhere in one piece: what was tried is put back."""
    pool = Pins().pool(8 * PAGE)
    buffers = [pool.take(2 * PAGE) for _ in range(4)]
    pool.give(buffers[0])
    pool.give(buffers[2])
    assert pool.take(4 * PAGE) is None
    assert pool.used_bytes == 4 * PAGE and buffers[0].slab.leases.extents.end_bytes == 8 * PAGE
    assert pool.take(2 * PAGE).offset in (0, 4 * PAGE)


def test_where_bytes_are_in_pieces_another_slab_is_asked():
    pool = Pins().pool(None)
    buffers = [pool.take(2 * PAGE) for _ in range(4)]
    pool.give(buffers[0])
    pool.give(buffers[2])
    buffer = pool.take(4 * PAGE)
    assert buffer.slab is not buffers[0].slab and buffer.memory.numel() == 4 * PAGE


def test_a_buffer_that_nobody_has_any_more_is_taken_back():
    pool = Pins().pool(None)
    buffers = [pool.take(PAGE) for _ in range(2)]
    del buffers[0]
    assert pool.used_bytes == 2 * PAGE
    pool.settle()
    assert pool.used_bytes == PAGE
    assert pool.take(PAGE).offset == 0


def test_memory_whose_pinning_was_interrupted_is_unpinned():
    pins = Pins()
    pool = pins.pool(None)

    def interrupted(memory):
        raise KeyboardInterrupt

    pins.pin = interrupted
    with pytest.raises(KeyboardInterrupt):
        pool.take(PAGE)
    assert pins.unpinned == [8 * PAGE] and pool.slab_bytes == 0
    del pins.pin
    assert pool.take(PAGE) is not None


def test_the_budget_is_never_exceeded():
    pins = Pins()
    pool = pins.pool(11 * PAGE + 100)
    first = pool.take(PAGE)
    second = pool.take(8 * PAGE)  # one slab of 8 pages is there, 3 pages are left: none
    assert second is None and pool.slab_bytes == 8 * PAGE
    held = pool.take(7 * PAGE)
    last = pool.take(3 * PAGE)
    assert pins.locked == [8 * PAGE, 3 * PAGE] and last.slab is not first.slab
    assert pool.take(1) is None and pool.slab_bytes == 11 * PAGE
    assert [pool.could_hold(n) for n in (11 * PAGE, 11 * PAGE + 1, 12 * PAGE)] == [
        True,
        False,
        False,
    ]
    assert pool.used_bytes == 11 * PAGE and held.offset == PAGE


def test_a_budget_that_follows_is_asked_for_each_slab_and_seldom_in_vain():
    pins, answers = Pins(), [16 * PAGE]
    asked = []

    def more():
        asked.append(answers[-1])
        return answers[-1]

    pool = pins.pool(more)
    assert (pool.budget, len(asked)) == (16 * PAGE, 1)
    first = pool.take(8 * PAGE)
    assert first is not None and (pool.budget, len(asked)) == (16 * PAGE, 2)
    answers.append(0)  # others took it meanwhile
    assert pool.take(8 * PAGE) is None
    assert (pool.budget, pool.slab_bytes, len(asked)) == (8 * PAGE, 8 * PAGE, 3)
    answers.append(8 * PAGE)
    assert [pool.take(PAGE) is None for _ in range(8)] == 7 * [True] + [False]
    assert (pool.budget, pool.slab_bytes, len(asked)) == (16 * PAGE, 16 * PAGE, 4)
    assert pool.take(7 * PAGE) is not None and len(asked) == 4  # there is room: nobody is asked


def test_a_budget_that_follows_grows_for_what_could_not_be_held():
    answers = [0]
    pool = Pins().pool(lambda: answers[-1])
    assert not pool.could_hold(8 * PAGE)
    answers.append(8 * PAGE)
    assert pool.could_hold(8 * PAGE) and pool.take(8 * PAGE) is not None
    answers.append(-1)
    assert not pool.could_hold(16 * PAGE) and pool.budget == 8 * PAGE


def test_a_budget_that_follows_is_asked_for_what_fits_and_for_what_is_beyond_it():
    asked = []
    pool = Pins().pool(lambda: asked.append(1) or PAGE)
    assert pool.could_hold(PAGE) and len(asked) == 1, "that much is known to be there"
    buffer = pool.take(PAGE)
    assert buffer is not None and len(asked) == 2, "what fits may have been taken by others"
    assert not pool.could_hold(9 * PAGE) and len(asked) == 3


def test_no_limit_holds_anything():
    pool = Pins().pool(None)
    assert pool.budget is None and pool.could_hold(1 << 60)
    exact = Pins().pool(2 * PAGE)
    assert exact.could_hold(2 * PAGE) and exact.take(2 * PAGE) is not None


def test_empty_slabs_give_way_to_another_size():
    pins = Pins()
    pool = pins.pool(10 * PAGE)
    buffer = pool.take(8 * PAGE)
    assert pool.take(10 * PAGE) is None and pins.unpinned == []
    pool.give(buffer)
    del buffer
    whole = pool.take(10 * PAGE)
    assert whole.memory.numel() == 10 * PAGE
    assert (pool.slab_bytes, pool.slab_peak_bytes) == (10 * PAGE, 10 * PAGE)
    assert pins.unpinned == [8 * PAGE]


def test_trim_releases_only_empty_slabs():
    pins = Pins()
    pool = pins.pool(None)
    first, second = pool.take(8 * PAGE), pool.take(8 * PAGE)
    pool.give(first)
    pool.trim()
    assert (pool.slab_bytes, pins.unpinned) == (8 * PAGE, [8 * PAGE])
    pool.trim()
    assert len(pins.unpinned) == 1
    pool.give(second)
    pool.trim()
    assert (pool.slab_bytes, pool.used_bytes, len(pins.unpinned)) == (0, 0, 2)
    assert pool.slab_peak_bytes == 16 * PAGE


def test_a_pool_that_dies_unpins_and_a_buffer_keeps_its_slab():
    pins = Pins()
    pool = pins.pool(None)
    buffer = pool.take(PAGE)
    del pool
    assert pins.unpinned == []
    buffer.memory.fill_(7)
    del buffer
    assert pins.unpinned == [8 * PAGE]


def test_a_refused_pin_is_noted_once_and_its_copies_are_waited_for_too():
    pins = Pins("ulimit -l")
    pool = pins.pool(None)
    first = pool.take(8 * PAGE)
    pins.refusal = "something else"
    pool.give(pool.take(8 * PAGE))
    pool.give(first)
    assert pool.note == (
        "host memory is not pinned (ulimit -l; PyTorch's allocator: none here): "
        "copies do not overlap with compute"
    )
    pool.trim()
    assert pool.slab_bytes == 0 and pins.unpinned == [8 * PAGE] * 2


@pytest.mark.parametrize(
    "budget, wanted, asked",
    [
        (None, 1, 8),
        (None, 8, 8),
        (None, 9, 16),
        (16, 9, 16),
        (15, 9, None),
        (15, 8, 8),
        (7, 1, 4),
        (7, 4, 4),
        (7, 5, None),
        (1, 1, 1),
    ],
)
def test_what_cannot_be_registered_is_pinned_when_it_is_made(budget, wanted, asked):
    """By PyTorch's allocator: a power of two, in the budget, and no smaller than what is wanted."""
    pins = Pins("only CUDA does")
    pins.none = ""
    pool = pins.pool(None if budget is None else budget * PAGE)
    buffer = pool.take(wanted * PAGE)
    assert buffer.memory.numel() == wanted * PAGE
    assert pins.asked == ([] if asked is None else [asked * PAGE])
    if asked is None:
        assert "not pinned (only CUDA does; PyTorch's allocator: the budget allows no" in pool.note
    else:
        assert pool.note == "host memory is pinned by PyTorch's allocator (only CUDA does)"
        assert pool.slab_bytes == pool.slab_peak_bytes == asked * PAGE
        buffer = None
        pool.settle()
        pool.trim()
        assert (pins.given_back, pins.unpinned) == ([asked * PAGE], [])


def test_what_other_slabs_take_of_the_budget_is_not_asked_for():
    pins = Pins("only CUDA does")
    pins.none = ""
    pool = pins.pool(20 * PAGE)
    held = [pool.take(8 * PAGE) for _ in range(3)]
    assert held[2] is None and pins.asked == [8 * PAGE, 8 * PAGE]
    pins.refusal = "something else"
    held.append(pool.take(3 * PAGE))
    assert pool.note == "host memory is pinned by PyTorch's allocator (only CUDA does)"
    assert pins.asked[2:] == [4 * PAGE] and pool.slab_bytes == 20 * PAGE


def test_pinned_memory_that_does_not_begin_on_a_page_is_not_taken(monkeypatch):
    pins = Pins("only CUDA does")
    pool = pins.pool(None)
    pins.pinned = lambda nbytes: _buffer_pool.mapped(nbytes + PAGE)[64 : 64 + nbytes]
    assert pool.take(PAGE).memory.data_ptr() % PAGE == 0
    assert "PyTorch's allocator: its memory is not page-aligned" in pool.note


def test_a_system_without_memory_has_no_buffer(monkeypatch):
    def none(nbytes):
        raise MemoryError(f"no memory for {nbytes} bytes")

    monkeypatch.setattr(_pinned_pool, "mapped", none)
    pool = Pins().pool(None)
    assert pool.refusal == ""
    assert pool.take(PAGE) is None
    assert (pool.slab_bytes, pool.used_bytes, pool.slab_peak_bytes) == (0, 0, 0)
    assert pool.refusal == f"no memory for {8 * PAGE} bytes"
    monkeypatch.undo()
    assert pool.take(PAGE) is not None and pool.refusal == ""


@pytest.mark.parametrize("budget", [28 * PAGE, 100 * PAGE, None])
def test_an_empty_slab_stays_while_the_budget_has_room(budget):
    """It is pinned already, and its size may be asked for again."""
    pins = Pins()
    pool = pins.pool(budget)
    pool.give(pool.take(8 * PAGE))
    large = pool.take(20 * PAGE)
    assert pins.unpinned == [] and pool.slab_bytes == 28 * PAGE
    del large


def test_a_pool_that_may_not_grow_gives_what_it_has():
    pins = Pins()
    pool = pins.pool(None)
    assert pool.take(PAGE, may_grow=False) is None and pins.locked == []
    buffer = pool.take(PAGE)
    assert pool.take(7 * PAGE, may_grow=False).slab is buffer.slab
    assert pool.take(PAGE, may_grow=False) is None and pins.locked == [8 * PAGE]


@pytest.mark.parametrize("refusal", ["", "only CUDA does"])
def test_an_interrupt_after_a_slab_was_pinned_leaves_nothing_pinned(monkeypatch, refusal):
    pins = Pins(refusal)
    pins.none = ""

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("backstash._device.pinned_pool.Leases", interrupt)
    pool = pins.pool(None)
    with pytest.raises(KeyboardInterrupt):
        pool.take(4096)
    assert (pins.given_back if refusal else pins.unpinned) == [8 * PAGE]


def test_a_released_buffer_is_handed_out_again_for_its_size():
    pool = Pins().pool(None)
    first, second = pool.take(PAGE), pool.take(PAGE)
    pool.give(first)
    pool.give(second)
    assert pool.used_bytes == 0 and pool.take(PAGE) is second and pool.take(PAGE) is first
    assert pool.used_bytes == 2 * PAGE


def test_released_buffers_make_way_for_other_sizes_before_a_slab_is_added():
    pins = Pins()
    pool = pins.pool(None)
    for buffer in [pool.take(PAGE) for _ in range(8)]:
        pool.give(buffer)
    assert pool.take(8 * PAGE).offset == 0 and pins.locked == [8 * PAGE]
    assert pool.used_bytes == 8 * PAGE and pool.take(PAGE, may_grow=False) is None


def test_after_an_interrupt_released_buffers_are_counted_as_free(monkeypatch):
    pool = Pins().pool(None)
    kept, released = pool.take(PAGE), pool.take(2 * PAGE)

    def interrupt(nbytes):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(_pinned_pool, "_pages", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.give(released)
    assert pool.used_bytes == 3 * PAGE, "it was released, and is not counted so yet"
    pool.restore()
    assert pool.used_bytes == PAGE and pool.take(2 * PAGE).offset == PAGE
    del kept
