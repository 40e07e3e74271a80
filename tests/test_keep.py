"""What stays in place, piece by piece: what is counted, how much may stay, and the books made anew."""

from types import SimpleNamespace

import pytest
import torch

from backstash._blocks import Block, Source
from backstash._keep import Keep, is_kept
from backstash._remains import Grave

GRAVE = Grave()


class Told:
    """A tape that somebody listens to, or nobody."""

    def __init__(self, on=True):
        self.on, self.told = on, []

    def tell(self, kind, *facts, cause=""):
        self.told.append((kind, facts, cause))


class Memory:
    """An accelerator's: short of so many bytes, each time somebody asks."""

    def __init__(self, *short):
        self.short, self.asked, self.capturing = list(short), [], False
        self.device = SimpleNamespace(is_capturing=lambda: self.capturing)
        self.failed, self.forgotten = False, 0

    def shortage(self, nbytes):
        self.asked.append(nbytes)
        return self.short.pop(0)

    def forget_failures(self):
        self.failed, self.forgotten = False, self.forgotten + 1


def block_of(nbytes=100):
    side = SimpleNamespace(number=0, grave=GRAVE, stream=lambda: None)
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    return Block(Source(tensor, tensor.untyped_storage()), tensor.detach(), side)


def test_what_comes_leaves_and_returns_is_counted_once():
    tape = Told()
    keep = Keep(tape, limit=None)
    one, two = block_of(100), block_of(30)
    assert (keep.nbytes, keep.peak_bytes, is_kept(one)) == (0, 0, 0)
    keep.admit(one)
    keep.admit(two)
    assert keep.nbytes == 130 and is_kept(one) == 100
    keep.measure()
    keep.leave(one)
    keep.leave(one)  # as often as it likes
    assert keep.nbytes == 30 and is_kept(one) == 0
    one.parcel = "carries it"
    keep.take_back(one)
    assert keep.nbytes == 130 and is_kept(one) == 100 and one.parcel is None
    keep.take_back(one)
    assert keep.nbytes == 130
    keep.leave(two)
    keep.measure()
    assert (keep.nbytes, keep.peak_bytes) == (100, 130)
    assert tape.told == [
        ("save", one.facts, ""),
        ("save", two.facts, ""),
        ("return", one.facts, ""),
        ("return", one.facts, ""),
    ]


def test_a_lost_block_says_which_versions():
    tape = Told()
    keep = Keep(tape, limit=None)
    block = block_of()
    keep.admit(block)
    block.parcel = "carries it"
    block.alias.add_(1).add_(1)
    keep.lose(block)
    assert block.lost == "is at version 2; expected version 0 instead"
    assert block.alias is block.parcel is None and keep.nbytes == is_kept(block) == 0
    assert tape.told[1:] == [("lose", block.facts, "")]


def test_nobody_is_told_where_nobody_records():
    tape = Told(on=False)
    keep = Keep(tape, limit=None)
    block = block_of()
    keep.admit(block)
    keep.take_back(block)
    keep.lose(block)
    assert tape.told == []


def test_a_save_in_a_backward_is_told_apart():
    tape = Told()
    keep = Keep(tape, limit=None)
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: keep.admit(block_of()))
    y.sum().backward()
    assert [cause for _, _, cause in tape.told] == ["backward"]


def test_what_may_stay_on_the_cpu_is_the_limit():
    keep = Keep(Told(), limit=70, early=20)
    assert keep.most(50, 50) == 70
    keep.limit = None
    assert keep.most(50, 50) is None
    assert keep.wants_room(0), "there is no other use for the memory"


@pytest.mark.parametrize(
    "limit, short, most",
    [
        (None, 0, None),
        (None, 8, None),  # as much is leaving
        (None, 38, 70),
        (None, 138, 0),
        (80, 0, 60),
        (80, 38, 60),
        (80, 68, 40),
        (25, 0, 5),
    ],
)
def test_what_may_stay_on_an_accelerator_is_less_where_it_runs_short(limit, short, most):
    memory = Memory(short)
    keep = Keep(Told(), limit=limit, early=20, memory=memory)
    keep.admit(block_of(100))
    assert keep.most(7, 8) == most and memory.asked == [7]
    keep.limit = None
    assert keep.wants_room(0) is (short > 0)


@pytest.mark.parametrize("limit", [0, 10, 20])
def test_a_device_is_not_asked_where_all_goes_anyway(limit):
    memory = Memory()
    keep = Keep(Told(), limit=limit, early=20, memory=memory)
    assert keep.most(7, 8) == 0 and memory.asked == []


def test_copies_begin_at_the_limit_where_nothing_else_was_said():
    assert Keep(Told(), limit=80, memory=Memory(0)).most(7, 8) == 80


def test_nothing_is_asked_of_a_device_that_captures():
    memory = Memory()
    keep = Keep(Told(), limit=50, memory=memory)
    memory.capturing = True
    assert keep.most(7, 8) is None and memory.asked == []


def test_memory_is_let_go_beyond_the_limit_and_no_earlier():
    keep = Keep(Told(), limit=150, early=50, memory=Memory(10, 0))
    keep.admit(block_of(100))
    assert not keep.wants_room(50) and keep.wants_room(51)
    keep.limit = None
    assert not keep.wants_room(1000)
    keep.most(1, 0)
    assert keep.wants_room(0), "the device is short"
    keep.most(1, 0)
    assert not keep.wants_room(0), "and is not any more"


def test_half_of_what_was_kept_stays_when_the_device_had_no_memory():
    memory = Memory()
    keep = Keep(Told(), limit=None, memory=memory)
    assert not keep.ran_out()
    memory.failed = True
    assert keep.ran_out()
    assert keep.halve() is None and keep.limit is None, "nothing was kept"
    assert not keep.ran_out() and memory.forgotten == 1, "answered, or it would be halved again"
    keep.admit(block_of(101))
    keep.measure()
    assert keep.halve() == keep.limit == 50
    assert keep.halve() == keep.limit == 25
    keep.limit = 1000  # more than there ever was
    assert keep.halve() == 50
    keep.limit = 1
    assert keep.halve() == 0
    assert keep.halve() is None and keep.limit == 0
    cpu = Keep(Told(), limit=100)
    cpu.admit(block_of(100))
    cpu.measure()
    assert cpu.halve() is None and cpu.limit == 100 and not cpu.ran_out()


def test_a_limit_that_follows_stays_below_what_once_was_too_much():
    keep = Keep(Told(), limit=0, memory=Memory())
    keep.follow(400)
    assert keep.limit == 200
    keep.admit(block_of(100))
    keep.measure()
    keep.follow(400)
    assert keep.limit == 250, "with what is kept"
    assert keep.halve() == 50
    keep.follow(400)
    assert keep.limit == 50
    keep.follow(-60)
    assert keep.limit == 20
    keep.set_limit(300)
    assert keep.limit == 300
    keep.follow(400)
    assert keep.limit == 250, "the caller's word is newer"


def test_the_books_anew_count_what_is_in_place():
    keep = Keep(Told(), limit=None)
    blocks = [block_of(nbytes) for nbytes in (1, 2, 4, 8, 16)]
    landed, leaving, first, waits, second = blocks
    for block in blocks:
        keep.admit(block)
    unborn = block_of(32)
    landed.alias, leaving.parcel = None, "carries it"
    dead = SimpleNamespace(kept=64)
    keep.queue.append(landed)
    keep.nbytes = 12345
    remains = [*(each.remains for each in blocks), unborn.remains, dead]
    keep.restore([*blocks, unborn], {id(waits)}, remains)
    assert is_kept(landed) == is_kept(leaving) == 0
    assert keep.nbytes == 4 + 8 + 16 + 64
    assert [keep.queue.popleft() for _ in range(len(keep.queue))] == [first, second]
    for block in (waits, first):  # what has left since is not asked again
        keep.queue.append(block)
    keep.leave(first)
    assert [keep.queue.popleft() for _ in range(2)] == [waits, None]
