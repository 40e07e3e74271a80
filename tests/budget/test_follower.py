"""What a plan's follower answers, given what it knows of the step."""

from types import SimpleNamespace

import pytest

from backstash._budget.follower import Follower
from backstash._budget.shape import StepShape
from backstash.plan import Plan, StepFigures
from counted_memory import MIB


def follower_of(state="left alone", *, is_recorded=False, has_regions=False, larger=None):
    """Of a step that fits, whose guard finds space for all that is saved."""
    shape = StepShape(begins_as_known=True)
    if larger is not None:
        setattr(shape, larger, True)
    return Follower(
        Plan(100 * MIB, state, predicted=StepFigures(50 * MIB, 1.0), left_after=0),
        tier="disk",
        regions=SimpleNamespace(has_any=has_regions),
        limits=SimpleNamespace(),
        guard=SimpleNamespace(fits_unseen=lambda *_, **__: True),
        look_bytes=MIB,
        shape=shape,
        recording=SimpleNamespace(is_on=is_recorded),
        first_steps=SimpleNamespace(mode="all"),
        begin_larger=lambda *_: None,
    )


def test_a_step_that_fits_needs_no_hooks():
    assert follower_of().fits_unseen()


@pytest.mark.parametrize(
    "given",
    [
        {"state": "planned"},
        {"is_recorded": True},
        {"has_regions": True},
        {"larger": "is_larger"},
        {"larger": "expects_larger"},
    ],
)
def test_a_step_that_is_planned_or_measured_or_larger_or_tries_modules_has_hooks(given):
    assert not follower_of(**given).fits_unseen()


def test_after_a_step_that_exceeded_the_budget_all_have_hooks():
    follower = follower_of()
    follower.has_exceeded = True
    assert not follower.fits_unseen()
