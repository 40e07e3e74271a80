from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from backstash.stores._extents import Extents, _bin_of, _bin_that_fits

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
    """Let any of many equal blocks die; the file once grew to 1.6 times the bytes alive."""
    extents = Extents(unit_bytes=4096)
    nbytes = 33 * 4096  # shares its bin with 34 units, so not every extent there is large enough
    taken = [extents.take(nbytes) for _ in range(10)]
    end = extents.end_bytes
    for offset in taken[1::2]:
        extents.free(offset, nbytes)
    assert sorted(extents.take(nbytes) for _ in range(5)) == taken[1::2]
    assert extents.end_bytes == end


# The bins: sixteen for each power of two.


def test_an_extent_of_a_bin_that_fits_is_never_too_small():
    for asked in range(1, 400):
        fits = _bin_that_fits(asked)
        for size in range(1, 800):
            assert size >= asked or _bin_of(size) < fits


def test_bins_rise_with_size_and_none_is_wider_than_a_sixteenth():
    bins = [_bin_of(size) for size in range(1, 5000)]
    assert bins == sorted(bins) and min(bins) == 1
    assert bins[:15] == list(range(1, 16))
    for low in (16, 32, 256, 2048):
        inside = [_bin_of(size) for size in range(low, 2 * low)]
        assert len(set(inside)) == 16 and _bin_of(2 * low) not in inside
        assert all(inside.count(each) == low // 16 for each in set(inside))


def test_the_bin_that_fits_is_the_next_one_at_most():
    bins = sorted({_bin_of(each) for each in range(1, 4000)})
    following = dict(pairwise(bins))
    for size in range(1, 3000):
        own = _bin_of(size)
        begins_its_bin = size == 1 or _bin_of(size - 1) != own
        assert _bin_that_fits(size) == (own if begins_its_bin else following[own])


def test_an_extent_of_the_very_size_is_used_up():
    extents = Extents(unit_bytes=512)
    first, second, _last = (extents.take(1500) for _ in range(3))
    assert (first, second, extents.end_bytes, extents.used_bytes) == (0, 1536, 4608, 4608)
    extents.free(second, 1500)
    assert (extents.free_count, extents.used_bytes) == (1, 3072)
    assert extents.take(1500) == second
    assert (extents.free_count, extents.end_bytes, extents.used_bytes) == (0, 4608, 4608)


def test_a_larger_extent_is_split_and_the_rest_is_free():
    extents = Extents(unit_bytes=1)
    large, _last = extents.take(100), extents.take(1)
    extents.free(large, 100)
    assert extents.take(60) == 0 and extents.free_count == 1
    assert extents.take(40) == 60 and extents.free_count == 0


def test_the_smallest_bin_that_fits_is_taken_and_in_it_who_was_freed_first():
    extents = Extents(unit_bytes=1)
    sizes = [40, 12, 12, 30]
    places = []
    for size in sizes:
        places.append(extents.take(size))
        extents.take(1)  # so that neighbours do not join
    for number in (0, 2, 1, 3):
        extents.free(places[number], sizes[number])
    assert extents.take(12) == places[2]
    assert extents.take(12) == places[1]
    assert extents.take(12) == places[3]  # the smallest that is left
    assert extents.take(12 + 18) == places[0]
    assert extents.take(1000) == extents.end_bytes - 1000  # none fits


def test_who_is_left_in_a_bin_is_still_found():
    extents = Extents(unit_bytes=1)
    first, _, second, _ = extents.take(40), extents.take(1), extents.take(40), extents.take(1)
    extents.free(first, 40)
    extents.free(second, 40)
    assert extents.take(12) == first
    assert extents.take(35) == second


def test_nothing_takes_a_unit_too():
    extents = Extents(unit_bytes=4096)
    assert (extents.take(0), extents.take(0), extents.end_bytes) == (0, 4096, 8192)


def test_room_at_the_end_is_given_up_with_what_was_free_before_it():
    extents = Extents(unit_bytes=1)
    first, second, third = extents.take(10), extents.take(10), extents.take(10)
    extents.free(second, 10)
    extents.free(third, 10)
    assert (extents.end_bytes, extents.free_count) == (10, 0)
    extents.free(first, 10)
    assert (extents.end_bytes, extents.free_count, extents.used_bytes) == (0, 0, 0)


def test_free_lists_are_rebuilt_from_what_is_taken():
    extents = Extents(unit_bytes=4096)
    for _ in range(3):
        extents.take(20_000)
    extents.restore([(5 * 4096, 8000), (2 * 4096, 4096), (3 * 4096, 1)])
    assert (extents.used_bytes, extents.end_bytes, extents.free_count) == (4 * 4096, 7 * 4096, 2)
    assert [extents.take(4096), extents.take(8192), extents.take(1)] == [4 * 4096, 0, 7 * 4096]
    extents.restore([])
    assert (extents.used_bytes, extents.end_bytes, extents.free_count) == (0, 0, 0)
    extents.restore([(0, 4096), (4096, 4096)])
    assert (extents.used_bytes, extents.end_bytes, extents.free_count) == (8192, 8192, 0)
