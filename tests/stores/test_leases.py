"""Leases: an extent goes back with its owner, and what an interrupt left half done is rebuilt."""

from collections import deque

import pytest

from backstash.stores._leases import Leases


class Owner:
    pass


def test_an_extent_goes_back_when_it_is_freed_or_its_owner_dies():
    leases, first, second = Leases(unit_bytes=4096), Owner(), Owner()
    assert [leases.take(each, 5000) for each in (first, second)] == [0, 8192]
    assert (leases.extents.used_bytes, leases.extents.end_bytes, leases.in_order) == (
        16384,
        16384,
        True,
    )
    leases.free(0)
    leases.free(0)  # a second time is nothing
    assert leases.extents.used_bytes == 8192
    del second
    assert not leases.in_order
    leases.settle()
    assert (leases.extents.used_bytes, leases.extents.end_bytes, leases.in_order) == (0, 0, True)


@pytest.mark.parametrize("call", ["take", "free"])
@pytest.mark.parametrize("before", [True, False])
def test_free_lists_that_were_left_half_done_are_rebuilt(monkeypatch, call, before):
    leases = Leases(unit_bytes=4096)
    owners = [Owner() for _ in range(4)]
    offsets = [leases.take(each, 4096) for each in owners]
    leases.free(offsets[1])
    whole = getattr(leases.extents, call)

    def interrupted(*arguments):
        if not before:
            whole(*arguments)
        raise KeyboardInterrupt

    class Extents:
        pass

    extents, leases.extents = leases.extents, Extents()
    setattr(leases.extents, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        leases.take(Owner(), 4096) if call == "take" else leases.free(offsets[2])
    leases.extents = extents
    assert not leases.in_order
    leases.settle()
    assert leases.in_order
    taken = {0, offsets[3]} | ({offsets[2]} if call == "take" else set())
    again = [Owner() for _ in range(4 - len(taken))]
    more = {leases.take(each, 4096) for each in again}
    assert not more & taken  # nobody is given what another has
    assert leases.extents.end_bytes == 4 * 4096
    assert leases.extents.used_bytes == 4 * 4096


def test_taking_or_freeing_settles_first():
    leases = Leases(unit_bytes=4096)
    first, second, third = (Owner() for _ in range(3))
    offsets = [leases.take(each, 4096) for each in (first, second, third)]
    del first
    fourth = Owner()
    assert leases.take(fourth, 4096) == offsets[0]
    del second, fourth
    leases.free(offsets[2])
    assert (leases.extents.used_bytes, leases.extents.end_bytes, leases.in_order) == (0, 0, True)


def test_the_dead_are_taken_from_once_however_often_that_is_interrupted():
    class Interrupted(deque):
        def popleft(self):
            raise KeyboardInterrupt

    leases, first = Leases(unit_bytes=4096), Owner()
    leases.dropped = dropped = Interrupted()
    leases._drops = dropped.append
    assert leases.take(first, 4096) == 0
    del first
    with pytest.raises(KeyboardInterrupt):
        leases.settle()
    leases.dropped = again = deque(dropped)
    leases._drops = again.append
    second = Owner()
    assert leases.take(second, 4096) == 0
    assert (leases.extents.used_bytes, leases.in_order) == (4096, True)
    del second
    leases.settle()
    assert (leases.extents.used_bytes, leases.in_order) == (0, True)
