"""The limits that a planner sets on a device's tiers, and sets back."""

from types import SimpleNamespace

from backstash._budget.limits import Limits
from backstash._plan.simulate import Windows


def tiers(inflight=1, prefetch=2):
    """With what they hold: 10 bytes in place, 20 in flight, and 40 that were read ahead."""
    resident = SimpleNamespace(limit=None, nbytes=10, is_planned=False)
    resident.set_limit = lambda limit: setattr(resident, "limit", limit)
    return SimpleNamespace(
        evictor=SimpleNamespace(
            resident=resident,
            inflight=SimpleNamespace(window_bytes=inflight, nbytes=20),
            ran_out=None,
        ),
        prefetcher=SimpleNamespace(
            ahead=SimpleNamespace(window_bytes=prefetch, nbytes=40, has_room=None)
        ),
        packer=SimpleNamespace(has_room=None),
        device=None,
    )


def windows(of):
    return of.evictor.inflight.window_bytes, of.prefetcher.ahead.window_bytes


def begun(of, given=(None, None)):
    limits = Limits(given)
    assert limits.held_bytes() == 0
    limits.begin_step(of, bool, str)
    return limits


def test_all_that_the_stash_holds_on_a_device_is_counted():
    of = tiers()
    limits = begun(of)
    assert limits.held_bytes() == 70
    of.device = SimpleNamespace(unfinished_bytes=lambda: 80)
    assert limits.held_bytes() == 150


def test_a_window_that_was_given_stays():
    of = tiers()
    begun(of, (5, None)).set_windows(Windows(100, 200))
    assert windows(of) == (5, 200)


def test_a_step_lowers_its_limit_and_never_raises_it():
    of = tiers()
    limits = begun(of)
    found = []
    for limit in (50, 60, 40):
        limits.lower_resident(limit)
        found.append(of.evictor.resident.limit)
    assert found == [50, 50, 40] and limits.resident is None, "the next one has its own"


def test_a_forked_process_has_the_same_limits_on_its_own_tiers():
    limits, forked = begun(tiers()), tiers()
    limits.set_windows(Windows(100, 200))
    limits.set_resident(300)
    limits.begin_step(forked, bool, str)
    assert windows(forked) == (100, 200) and forked.evictor.resident.limit == 300


def test_a_planner_that_is_replaced_leaves_a_device_as_it_was():
    of = tiers()
    limits = begun(of)
    limits.set_windows(Windows(100, 200))
    assert of.evictor.resident.is_planned and of.evictor.ran_out is str
    assert of.prefetcher.ahead.has_room is of.packer.has_room is bool
    limits.end()
    assert windows(of) == (1, 2) and not of.evictor.resident.is_planned
    assert of.evictor.ran_out is of.prefetcher.ahead.has_room is of.packer.has_room is None
