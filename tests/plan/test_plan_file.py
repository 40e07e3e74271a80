"""What is in a plan's file is checked as it is read, and not in the first forward."""

import json

import pytest

from backstash.errors import UsageError
from backstash.plan import Plan, PlannedClass, PlannedRegion

DAMAGED = {
    "a window that is null": {"inflight_bytes": None},
    "a limit that is null": {"resident_bytes": None},
    "a device that is a number": {"device": -1},
    "a time before now": {"seconds": -1.0},
    "less than no bytes": {"nbytes": -1},
}


def plan():
    held = PlannedClass("exp", 1, 4096, (("disk", 1),), 0.1, "")
    return Plan(1 << 30, "planned", classes=(held,))


def test_a_plan_without_its_smallest_budget_is_one():
    assert Plan.from_dict(json.loads(plan().text())).as_dict() == plan().as_dict()


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_value_is_refused(name, tmp_path):
    path = tmp_path / "plan.json"
    values = json.loads(plan().text())
    for key, value in DAMAGED[name].items():
        of = values if key in values else values["classes"][0]
        assert key in of
        of[key] = value
    path.write_text(json.dumps(values))
    with pytest.raises(UsageError, match="not a plan"):
        Plan.load(path)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(bytes(range(256)))
    with pytest.raises(UsageError, match="not a plan"):
        Plan.load(path)


@pytest.mark.parametrize("choices", [[["disk", 2]], [["region", 3]], []])
def test_a_module_s_damaged_choices_are_refused(choices):
    region = PlannedRegion("m", 2, 4096, (("region", 1), ("once", 1)), 0.1, "")
    values = json.loads(Plan(1 << 30, "planned", regions=(region,)).text())
    assert Plan.from_dict(values).regions == (region,)
    values["regions"][0]["choices"] = choices
    with pytest.raises(UsageError, match="not a plan"):
        Plan.from_dict(values)
