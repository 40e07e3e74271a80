"""What a plan's follower answers, given what it knows of the step."""

from types import SimpleNamespace

import pytest

from backstash._budget.follower import Follower
from backstash._budget.shape import StepShape
from backstash._plan.regions import Regions
from backstash._plan.table import REGION
from backstash.plan import Plan, PlannedClass, PlannedRegion, StepFigures
from counted_memory import MIB


def follower_of(state="left alone", *, is_recorded=False, has_regions=False, larger=None, **given):
    """Of a step that fits, whose guard finds space for all that is saved; ``given``: its other parts."""
    shape = StepShape(begins_as_known=True)
    if larger is not None:
        setattr(shape, larger, True)
    parts = {
        "tier": "disk",
        "regions": SimpleNamespace(has_any=has_regions),
        "limits": SimpleNamespace(),
        "guard": SimpleNamespace(
            fits_unseen=lambda *_, **__: True,
            part_of_what_is_left=lambda *_: 8 * MIB,
            over=lambda: 0,
        ),
        "look_bytes": MIB,
        "shape": shape,
        "recording": SimpleNamespace(is_on=is_recorded, is_shared=False),
        "first_steps": SimpleNamespace(mode="all"),
        "begin_larger": lambda *_: None,
    }
    plan = Plan(100 * MIB, state, predicted=StepFigures(50 * MIB, 1.0), left_after=0)
    return Follower(plan, **{**parts, **given})


def left_bytes(follower):
    """What may be saved without a block, once the first blocks of a step were saved."""
    return [follower.may_leave_bytes(1) for _ in range(5)][-1]


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


@pytest.mark.parametrize("larger", ["is_larger", "expects_larger"])
def test_what_a_larger_step_computes_may_have_to_be_recomputed(larger):
    follower = follower_of(larger=larger, regions=Regions())
    assert not follower.recomputes, "there is no plan yet"
    follower.follow(Plan(100 * MIB, "left alone"))
    assert follower.recomputes


def test_where_no_space_is_left_the_memory_is_read_at_each_block_and_for_no_part_again():
    parts = []
    guard = SimpleNamespace(part_of_what_is_left=lambda *given: parts.append(given) or -1)
    follower = follower_of(guard=guard)
    assert left_bytes(follower) == -1 and len(parts) == 1
    assert left_bytes(follower) == -1 and len(parts) == 1
    follower.begin_step()
    assert left_bytes(follower) == -1 and len(parts) == 2


def test_a_step_that_is_found_to_be_larger_leaves_no_more_alone():
    shape = StepShape(begins_as_known=True)
    shape.begin_plan(10 * MIB)
    shape.follow([MIB] * 10, 0)
    follower = follower_of(shape=shape, begin_larger=lambda *_: shape.begin_larger())
    assert left_bytes(follower) == 8 * MIB
    shape.count_saved(12 * MIB)
    assert follower.may_leave_bytes(1) == -1 and shape.is_larger


def test_until_a_call_is_recomputed_as_planned_nothing_is_left_alone():
    """Else what it saves would stay, if it is refused. The next step begins without that."""
    regions = Regions()
    follower = follower_of(regions=regions)
    region = PlannedRegion("m", 1, MIB, ((REGION, 1),), 0.0, "", (), (0,))
    follower.follow(Plan(100 * MIB, "planned", regions=(region,), left_after=0))
    assert left_bytes(follower) == 8 * MIB
    assert follower.begin_forward("m", ()) == ("m", 0)
    assert left_bytes(follower) == -1
    assert follower.way_of("m", 0) == REGION and left_bytes(follower) == 8 * MIB
    regions.begin_step()
    follower.begin_step()
    assert follower.begin_forward("m", ()) == ("m", 0)
    assert left_bytes(follower) == -1, "it was refused"
    follower.begin_step()
    assert left_bytes(follower) == 8 * MIB


def following(*choices, **given):
    """One whose plan knows a module's first, second, ... save, and a function that saves one."""
    follower = follower_of(**given)
    classes = [
        PlannedClass(f"m no operation #{at} 1.00 MiB", 2, 2 * MIB, ((name, 2),), 0.0, "")
        for at, name in enumerate(choices)
    ]
    follower.follow(Plan(100 * MIB, "planned", classes=tuple(classes)))

    def save(module="m"):
        block = SimpleNamespace(nbytes=MIB, cleanup=SimpleNamespace(module=module, serial=0))
        return follower.choose(block, SimpleNamespace(grad_fn=None), ())

    return follower, save


def test_a_block_that_the_plan_does_not_know_lowers_the_limit_of_its_step():
    """What else the step holds when backward needs it is unknown."""
    limits, lowered = SimpleNamespace(unplanned=7 * MIB), []
    limits.lower_resident = lowered.append
    shape = StepShape(begins_as_known=True)
    _, save = following("keep", limits=limits, shape=shape, regions=None)
    assert save() == "" and not lowered and not shape.is_unknown
    assert save("other") == "" and lowered == [7 * MIB] and shape.is_unknown


def test_the_saves_of_a_module_are_numbered_again_each_time_it_runs():
    follower, save = following("keep", "disk", regions=Regions())
    follower.begin_forward("m", ())
    found = [save()]
    follower.begin_forward("m", ())
    assert [*found, save(), save()] == ["", "", "disk"]
