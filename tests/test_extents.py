from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from backstash.stores._extents import Extents

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 200_000)),
        st.tuples(st.just("free"), st.integers(0, 10**6)),
    ),
    max_size=200,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(STEPS)
def test_extents_never_overlap_and_room_is_counted(steps):
    extents = Extents(unit_bytes=4096)
    taken: list[tuple[int, int]] = []
    for what, number in steps:
        if what == "take":
            taken.append((extents.take(number), number))
        elif taken:
            offset, nbytes = taken.pop(number % len(taken))
            extents.free(offset, nbytes)
        spans = sorted((offset, offset + -(-nbytes // 4096) * 4096) for offset, nbytes in taken)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert extents.used_bytes == sum(end - start for start, end in spans)
        assert extents.end_bytes == (spans[-1][1] if spans else 0)


def test_neighbours_join_whatever_the_order_of_freeing():
    extents = Extents(unit_bytes=4096)
    first, second, third, last = (extents.take(8192) for _ in range(4))
    for offset in (second, first, third):
        extents.free(offset, 8192)
    assert extents.free_count == 1
    assert extents.take(3 * 8192) == first
    assert extents.end_bytes == last + 8192


def test_the_same_sizes_step_after_step_take_no_more_room():
    extents = Extents(unit_bytes=4096)
    sizes = [n * 5000 for n in range(1, 60)]
    ends = set()
    for _ in range(20):
        taken = [(extents.take(n), n) for n in sizes]
        ends.add(extents.end_bytes)
        for offset, n in reversed(taken):
            extents.free(offset, n)
    assert len(ends) == 1
    assert extents.end_bytes == 0


def test_changing_sizes_do_not_fragment_without_bound():
    extents = Extents(unit_bytes=4096)
    alive: list[tuple[int, int]] = []
    most = 0
    for number in range(20_000):
        nbytes = 4096 * (1 + (number * 7919) % 97)
        alive.append((extents.take(nbytes), nbytes))
        if len(alive) > 200:
            extents.free(*alive.pop((number * 31) % len(alive)))
        most = max(most, extents.used_bytes)
    assert extents.end_bytes < 1.5 * most


def test_a_hole_of_the_very_size_is_used_again():
    extents = Extents(unit_bytes=4096)
    nbytes = 33 * 4096  # shares its bin with 34 units, so not every extent there is large enough
    taken = [extents.take(nbytes) for _ in range(10)]
    end = extents.end_bytes
    for offset in taken[1::2]:
        extents.free(offset, nbytes)
    assert sorted(extents.take(nbytes) for _ in range(5)) == taken[1::2]
    assert extents.end_bytes == end
