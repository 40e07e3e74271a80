"""A lane: what one thread gave, and whose copies it may judge."""

import threading

from backstash._lanes import Counts, Lane


def test_what_threads_gave_adds_up():
    lane = Lane()
    assert lane.counts == Counts() == Counts(0, 0, 0)
    lane.saves, lane.small_saves, lane.small_bytes = 1, 20, 300
    assert lane.counts + Counts(4000, 50000, 600000) == Counts(4001, 50020, 600300)
    assert lane.operation == 0 and lane.scopes == [] and len(lane.waiting) == 0


def test_a_copy_is_judged_by_its_own_thread_or_when_that_has_ended():
    """Another one may still be in the middle of a change in place, whose version comes later."""
    mine, made, go_on = Lane(), threading.Event(), threading.Event()
    theirs = []

    def other():
        theirs.append(Lane())
        made.set()
        go_on.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    assert made.wait(30)
    (their,) = theirs
    assert mine.thread is threading.current_thread() and their.thread is thread
    assert mine.may_land(mine) is True and their.may_land(their) is True
    assert mine.may_land(their) is False
    assert their.may_land(mine) is False
    go_on.set()
    thread.join()
    assert mine.may_land(their) is True
