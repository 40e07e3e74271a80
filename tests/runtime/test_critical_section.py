"""The critical section: a thread that was ended in the middle leaves it dirty, and the next rebuilds."""

import threading
import weakref

import pytest

from backstash._runtime.critical_section import CriticalSection
from backstash.errors import StashFullError


class Session:
    def __init__(self):
        self.section, self.rebuilt, self.fails = CriticalSection(), 0, 0
        self.section.rebuilt_by(self.rebuild)

    def rebuild(self):
        if self.fails:
            self.fails -= 1
            raise KeyboardInterrupt
        self.rebuilt += 1

    def interrupt(self, error=KeyboardInterrupt):
        with pytest.raises(error), self.section:
            raise error


@pytest.fixture
def session():
    return Session()


def test_a_section_left_in_good_order_leaves_nothing_to_rebuild(session):
    for _ in range(3):
        with session.section:
            assert session.rebuilt == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_what_is_dirty_is_rebuilt_once_before_the_next_goes_in(session, error):
    session.interrupt(error)
    assert session.rebuilt == 0
    for _ in range(2):
        with session.section:
            assert session.rebuilt == 1


def test_errors_of_our_own_are_raised_in_good_order(session):
    session.interrupt(StashFullError)
    with session.section:
        assert session.rebuilt == 0


def test_a_finalizer_in_the_middle_of_a_writer_rebuilds_nothing(session):
    def finalizer():
        with session.section:
            pass

    with session.section:
        finalizer()
        finalizer()
    with session.section:
        assert session.rebuilt == 0


def test_a_finalizer_that_fails_makes_dirty_what_its_writer_leaves(session):
    with session.section:
        session.interrupt()
        assert session.rebuilt == 0
    with session.section:
        assert session.rebuilt == 1


@pytest.mark.parametrize("by", ["a function that has ended", "this function", "another thread"])
def test_a_writer_that_never_left_was_interrupted(session, by):
    """The interrupt came between the section's noting it and the first line inside."""
    if by == "this function":
        session.section.__enter__()
    elif by == "another thread":
        thread = threading.Thread(target=session.section.__enter__)
        thread.start()
        thread.join()
    else:
        (lambda: session.section.__enter__())()
    with session.section:
        assert session.rebuilt == 1
    with session.section:
        assert session.rebuilt == 1


def test_a_rebuild_that_is_interrupted_is_done_again(session):
    session.interrupt()
    session.fails = 2
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), session.section:
            pytest.fail("what is inside must not run before it is rebuilt")
        assert session.rebuilt == 0
    with session.section:
        assert session.rebuilt == 1


def test_a_rebuild_that_is_interrupted_leaves_no_writer(session):
    """Else a caller in the same function would be taken for a finalizer in the middle of it."""

    def called():
        with session.section:
            assert session.rebuilt == 1

    session.section.__enter__()
    session.fails = 1
    with pytest.raises(KeyboardInterrupt), session.section:
        pytest.fail("what is inside must not run before it is rebuilt")
    called()


def test_a_writer_is_still_known_after_a_finalizer_in_the_middle_of_it(session):
    def finalizer():
        with session.section:
            pass

    def interrupted():
        session.section.__enter__()
        finalizer()

    interrupted()
    with session.section:
        assert session.rebuilt == 1


def test_nobody_is_kept_alive_to_rebuild():
    session = Session()
    section = session.section
    session.interrupt()
    gone = weakref.ref(session)
    del session
    assert gone() is None
    with section:
        assert not section._dirty


def test_without_anybody_who_rebuilds():
    section = CriticalSection()
    with pytest.raises(KeyboardInterrupt), section:
        raise KeyboardInterrupt
    with section:
        pass


def test_a_forked_process_has_no_writer(session):
    session.interrupt()
    session.section.forked()
    with session.section:
        assert session.rebuilt == 0


def test_what_a_call_counts_that_was_inside_at_the_fork_is_put_in_order(session):
    """A signal's handler forks in its middle, and both processes go on with it."""
    with session.section:
        session.section.forked()
    with session.section:
        assert session.rebuilt == 1


def test_a_forked_process_has_a_lock_of_its_own(session):
    section, lock = session.section, session.section.lock
    with section.lock, section.lock, section:  # a finalizer may take it again
        section.forked()
        assert section.lock is not lock
    taken = []
    thread = threading.Thread(target=lambda: taken.append(section.lock.acquire(timeout=10)))
    thread.start()
    thread.join()
    assert taken == [True]  # nobody has it


def test_the_lock_is_one_of_c():
    """Taken by ``with``, it lets no interrupt come between its taking and what is inside."""
    assert type(CriticalSection().lock).__module__ == "_thread"
