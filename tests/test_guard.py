"""Who writes in the books: whoever was ended in the middle leaves them torn, and the next makes them anew."""

import threading

import pytest

from backstash._guard import Guard
from backstash.errors import StashFullError


class Books:
    def __init__(self):
        self.guard, self.mended, self.fails = Guard(), 0, 0
        self.guard.mended_by(self.mend)

    def mend(self):
        if self.fails:
            self.fails -= 1
            raise KeyboardInterrupt
        self.mended += 1

    def tear(self, error=KeyboardInterrupt):
        with pytest.raises(error), self.guard:
            raise error


@pytest.fixture
def books():
    return Books()


def test_whoever_leaves_in_good_order_leaves_nothing_to_mend(books):
    for _ in range(3):
        with books.guard:
            assert books.mended == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_books_that_are_torn_are_mended_once_before_the_next_writes(books, error):
    books.tear(error)
    assert books.mended == 0
    for _ in range(2):
        with books.guard:
            assert books.mended == 1


def test_errors_of_our_own_are_raised_in_good_order(books):
    books.tear(StashFullError)
    with books.guard:
        assert books.mended == 0


def test_a_finalizer_in_the_middle_of_a_writer_mends_nothing(books):
    def finalizer():
        with books.guard:
            pass

    with books.guard:
        finalizer()
        finalizer()
    with books.guard:
        assert books.mended == 0


def test_a_finalizer_that_fails_tears_what_its_writer_leaves(books):
    with books.guard:
        books.tear()
        assert books.mended == 0
    with books.guard:
        assert books.mended == 1


@pytest.mark.parametrize("by", ["a function that has ended", "this function", "another thread"])
def test_a_writer_that_never_left_was_interrupted(books, by):
    """The interrupt came between the guard's noting it and the first line inside."""
    if by == "this function":
        books.guard.__enter__()
    elif by == "another thread":
        thread = threading.Thread(target=books.guard.__enter__)
        thread.start()
        thread.join()
    else:
        (lambda: books.guard.__enter__())()
    with books.guard:
        assert books.mended == 1
    with books.guard:
        assert books.mended == 1


def test_mending_that_is_interrupted_is_done_anew(books):
    books.tear()
    books.fails = 2
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), books.guard:
            pytest.fail("what is inside must not write in torn books")
        assert books.mended == 0
    with books.guard:
        assert books.mended == 1


def test_mending_that_is_interrupted_leaves_no_writer(books):
    """Else whoever is called by the same function would be taken for a finalizer in the middle of it."""

    def called():
        with books.guard:
            assert books.mended == 1

    books.guard.__enter__()
    books.fails = 1
    with pytest.raises(KeyboardInterrupt), books.guard:
        pytest.fail("what is inside must not write in torn books")
    called()


def test_a_writer_is_still_known_after_a_finalizer_in_the_middle_of_it(books):
    def finalizer():
        with books.guard:
            pass

    def interrupted():
        books.guard.__enter__()
        finalizer()

    interrupted()
    with books.guard:
        assert books.mended == 1


def test_nobody_is_kept_alive_to_mend():
    books = Books()
    guard = books.guard
    books.tear()
    del books
    with guard:
        pass


def test_without_anybody_who_mends():
    guard = Guard()
    with pytest.raises(KeyboardInterrupt), guard:
        raise KeyboardInterrupt
    with guard:
        pass


def test_a_forked_process_has_no_writer(books):
    books.tear()
    books.guard.forget()
    with books.guard:
        assert books.mended == 0
    books.guard.__enter__()
    books.guard.forget()
    with books.guard:
        assert books.mended == 0
