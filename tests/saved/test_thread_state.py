"""The state of a thread: what it gave, and whose copies it may judge."""

import threading

from backstash._saved.thread_state import Counts, ThreadState


def test_what_threads_gave_adds_up():
    thread_state = ThreadState()
    assert thread_state.counts == Counts() == Counts(0, 0, 0)
    thread_state.saves, thread_state.small_saves, thread_state.small_bytes = 1, 20, 300
    assert thread_state.counts + Counts(4000, 50000, 600000) == Counts(4001, 50020, 600300)
    assert (thread_state.operation, thread_state.scopes) == (0, [])
    assert len(thread_state.waiting) == 0


def test_a_copy_is_judged_by_its_own_thread_or_when_that_has_ended():
    """Another one may still be in the middle of a change in place, whose version comes later."""
    mine, made, go_on = ThreadState(), threading.Event(), threading.Event()
    theirs = []

    def other():
        theirs.append(ThreadState())
        made.set()
        go_on.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    assert made.wait(30)
    (their,) = theirs
    assert mine.thread() is threading.current_thread() and their.thread() is thread
    assert mine.may_judge(mine) is True and their.may_judge(their) is True
    assert mine.may_judge(their) is False
    assert their.may_judge(mine) is False
    go_on.set()
    thread.join()
    assert mine.may_judge(their) is True
