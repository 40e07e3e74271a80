"""Which steps are reported to have exceeded a budget, and once."""

import warnings

import pytest

from backstash._budget.budget_reports import BudgetReports
from backstash.errors import BudgetError, StashWarning


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def reports(*, strict=False):
    return BudgetReports(100, "the budget", strict=strict)


@pytest.mark.parametrize("strict", [False, True])
def test_a_fiftieth_more_is_no_excess_unless_it_is_to_be_an_error(strict):
    found = reports(strict=strict)
    counts = []
    for each in (100, 102, 103):
        found.count(each, is_loaded=False)
        counts.append(found.exceeding)
    assert counts == [0, strict, 1 + strict]


def test_the_third_excess_is_an_error_if_one_is_asked_for():
    found = reports(strict=True)
    for _ in range(2):
        found.count(101, is_loaded=False)
        found.check()
    found.count(101, is_loaded=False)
    with pytest.raises(BudgetError, match="exceeded in 3 steps"):
        found.check()
    found.check()
    assert len(found.notes) == 1


def test_the_first_excess_is_an_error_where_the_budget_is_known_to_be_too_small():
    found = reports(strict=True)
    with pytest.warns(StashWarning, match="cannot be kept: so it is"):
        found.warn_too_small("so it is")
    found.count(101, is_loaded=False)
    with pytest.raises(BudgetError, match="cannot be kept: so it is"):
        found.check()


def test_a_budget_that_cannot_be_kept_is_said_once_and_no_excess_after_that():
    found = reports()
    with pytest.warns(StashWarning, match="a little"):
        found.warn_too_small("a little")
    for _ in range(2):
        found.warn_too_small("by much")
    assert list(found.notes) == ["the budget cannot be kept: by much"]
    for _ in range(4):
        found.count(200, is_loaded=False)
    assert found.exceeding == 4 and len(found.notes) == 1
    found.forget_too_small()
    assert not found.notes and not found.is_too_small


def test_the_most_that_a_step_held_whose_hooks_were_off_is_noted():
    found = reports()
    for held in (102, 300, 200, 400):
        found.note_unseen(held)
    (note,) = found.notes
    assert "held up to 400 B" in note
    for _ in range(2):
        found.count(200, is_loaded=False)
    with pytest.warns(StashWarning, match="exceeded in 3 steps"):
        found.count(200, is_loaded=False)
