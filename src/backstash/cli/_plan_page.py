"""Show the plan on the page of a run: the choices for each class, and predicted and measured figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..places import label_of
from ..units import format_bytes

__all__ = ["moved_by_choice", "plan_section"]

_KEYS = {
    **{key: key for key in ("keep", "host", "disk")},
    "recompute": "recomputed",
    "pack": "packed",
    "region": "recomputed",
    "left": "keep",
}
_WORDS = {choice: label_of(key) for choice, key in _KEYS.items()} | {
    "region": "to be recomputed with its module",
    "left": "left in place",
}
_RUNS = {"region": "recomputed", "once": "held", "left": "left"}
_OF_CLASSES = {
    "class": "text",
    "blocks": "count",
    "bytes": "bytes",
    "in the order of their saves": "text",
    "adds": "seconds",
    "why": "text",
}
_FIGURES = {
    "plain": "with everything in place, by the simulation",
    "predicted": "predicted, under the plan",
    "measured": "measured, under the plan",
    "bound": "the budget; no choice is faster, by the figures measured",
}


def plan_section(plan: dict[str, Any]) -> dict[str, Any]:
    """Return the ``plan`` section for :func:`backstash.report.render_page`, from ``Plan.as_dict()``."""
    sums = moved_by_choice(plan["classes"])
    return {
        "note": _state(plan),
        "figures": {
            "columns": _columns(
                {"": "text", "peak of a step": "bytes", "time of a step": "seconds"}
            ),
            "rows": [
                [words, plan[name]["peak_bytes"], plan[name]["step_seconds"]]
                for name, words in _FIGURES.items()
                if plan[name] is not None
            ],
        },
        "parts": [
            {"name": _WORDS[choice], "bytes": nbytes, "key": _KEYS[choice]}
            for choice, nbytes in sums.items()
            if nbytes
        ],
        "classes": {
            "columns": _columns(_OF_CLASSES),
            "rows": [
                *(_row(each, each["name"], each["blocks"], _WORDS) for each in plan["classes"]),
                *(
                    _row(each, f"{each['name']}, the module as a whole", each["forwards"], _RUNS)
                    for each in plan.get("regions", ())
                ),
            ],
        },
    }


def _columns(units: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"label": label, "unit": unit} for label, unit in units.items()]


def _row(each: dict[str, Any], name: str, count: int, words: Mapping[str, str]) -> list[Any]:
    choices = ", ".join(f"{blocks} {words[choice]}" for choice, blocks in each["choices"])
    return [name, count, each["nbytes"], choices, each["seconds"], each["reason"]]


def moved_by_choice(classes: Any) -> dict[str, int]:
    """Return how many of a step's saved bytes each choice has; ``classes`` is from ``Plan.as_dict()``. What is
    left in place by calls that are not managed counts as kept."""
    sums = dict.fromkeys(_KEYS, 0)
    for each in classes:
        for choice, count in each["choices"]:
            sums["keep" if choice == "left" else choice] += each["nbytes"] * count // each["blocks"]
    return sums


def _whose(plan: dict[str, Any]) -> str:
    device = plan.get("device", "cpu")
    return "the process" if device == "cpu" else f"tensors on {device}"


def _state(plan: dict[str, Any]) -> str:
    budget = format_bytes(plan["budget_bytes"])
    smallest = plan["smallest_budget_bytes"]
    at_least = f": the smallest that can is about {format_bytes(smallest)}" if smallest else ""
    return {
        "measuring": f"Within {budget}: there were too few steps to plan for; all that can move was moved.",
        "left alone": f"Everything fits within {budget}, and stays in memory.",
        "planned": f"Within a budget of {budget} for the memory of {_whose(plan)}.",
        "loaded": f"A plan from a file, for a budget of {budget}.",
        "too small": f"A budget of {budget} cannot be kept{at_least}.",
    }[plan["state"]]
