"""Who writes in the books: whoever was ended in the middle leaves them torn, and the next makes them anew."""

import threading

import pytest

from backstash._runtime.critical_section import CriticalSection
from backstash.errors import StashFullError


class Books:
    def __init__(self):
        self.section, self.mended, self.fails = CriticalSection(), 0, 0
        self.section.rebuilt_by(self.rebuild)

    def rebuild(self):
        if self.fails:
            self.fails -= 1
            raise KeyboardInterrupt
        self.mended += 1

    def tear(self, error=KeyboardInterrupt):
        with pytest.raises(error), self.section:
            raise error


@pytest.fixture
def session():
    return Books()


def test_whoever_leaves_in_good_order_leaves_nothing_to_mend(session):
    for _ in range(3):
        with session.section:
            assert session.mended == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_books_that_are_torn_are_mended_once_before_the_next_writes(session, error):
    session.tear(error)
    assert session.mended == 0
    for _ in range(2):
        with session.section:
            assert session.mended == 1


def test_errors_of_our_own_are_raised_in_good_order(session):
    session.tear(StashFullError)
    with session.section:
        assert session.mended == 0


def test_a_finalizer_in_the_middle_of_a_writer_mends_nothing(session):
    def finalizer():
        with session.section:
            pass

    with session.section:
        finalizer()
        finalizer()
    with session.section:
        assert session.mended == 0


def test_a_finalizer_that_fails_tears_what_its_writer_leaves(session):
    with session.section:
        session.tear()
        assert session.mended == 0
    with session.section:
        assert session.mended == 1


@pytest.mark.parametrize("by", ["a function that has ended", "this function", "another thread"])
def test_a_writer_that_never_left_was_interrupted(session, by):
    """The interrupt came between the guard's noting it and the first line inside."""
    if by == "this function":
        session.section.__enter__()
    elif by == "another thread":
        thread = threading.Thread(target=session.section.__enter__)
        thread.start()
        thread.join()
    else:
        (lambda: session.section.__enter__())()
    with session.section:
        assert session.mended == 1
    with session.section:
        assert session.mended == 1


def test_mending_that_is_interrupted_is_done_anew(session):
    session.tear()
    session.fails = 2
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), session.section:
            pytest.fail("what is inside must not write in torn books")
        assert session.mended == 0
    with session.section:
        assert session.mended == 1


def test_mending_that_is_interrupted_leaves_no_writer(session):
    """Else whoever is called by the same function would be taken for a finalizer in the middle of it."""

    def called():
        with session.section:
            assert session.mended == 1

    session.section.__enter__()
    session.fails = 1
    with pytest.raises(KeyboardInterrupt), session.section:
        pytest.fail("what is inside must not write in torn books")
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
        assert session.mended == 1


def test_nobody_is_kept_alive_to_mend():
    session = Books()
    guard = session.section
    session.tear()
    del session
    with guard:
        pass


def test_without_anybody_who_mends():
    guard = CriticalSection()
    with pytest.raises(KeyboardInterrupt), guard:
        raise KeyboardInterrupt
    with guard:
        pass


def test_a_forked_process_has_no_writer(session):
    session.tear()
    session.section.forget()
    with session.section:
        assert session.mended == 0
    session.section.__enter__()
    session.section.forget()
    with session.section:
        assert session.mended == 0
