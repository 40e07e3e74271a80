"""Show the plan on the page of a run: the choices for each class, and predicted and measured figures."""

from __future__ import annotations

from typing import Any

from ..places import label_of
from ..units import format_bytes

__all__ = ["choices_in_words", "moved_by_choice", "plan_section"]

_KEYS = {
    **{key: key for key in ("keep", "host", "disk")},
    "recompute": "recomputed",
    "pack": "packed",
    "region": "recomputed",
}
_WORDS = {choice: label_of(key) for choice, key in _KEYS.items()} | {
    "region": "to be recomputed with its module"
}
_RUNS = {"region": "recomputed", "once": "held", "left": "left"}
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
        "note": " ".join([_state(plan), *_difference(plan)]),
        "figures": {
            "columns": [
                {"label": "", "unit": "text"},
                {"label": "peak of a step", "unit": "bytes"},
                {"label": "time of a step", "unit": "seconds"},
            ],
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
            "columns": [
                {"label": "class", "unit": "text"},
                {"label": "blocks", "unit": "count"},
                {"label": "bytes", "unit": "bytes"},
                {"label": "in the order of their saves", "unit": "text"},
                {"label": "adds", "unit": "seconds"},
                {"label": "why", "unit": "text"},
            ],
            "rows": [
                [
                    each["name"],
                    each["blocks"],
                    each["nbytes"],
                    choices_in_words(each["choices"]),
                    each["seconds"],
                    each["reason"],
                ]
                for each in plan["classes"]
            ]
            + [
                [
                    f"{each['name']}, the module as a whole",
                    each["forwards"],
                    each["nbytes"],
                    ", ".join(f"{count} {_RUNS[choice]}" for choice, count in each["choices"]),
                    each["seconds"],
                    each["reason"],
                ]
                for each in plan.get("regions", ())
            ],
        },
    }


def moved_by_choice(classes: Any) -> dict[str, int]:
    """Return how many of a step's saved bytes each choice has; ``classes`` is from ``Plan.as_dict()``."""
    sums = dict.fromkeys(_KEYS, 0)
    for each in classes:
        for choice, count in each["choices"]:
            sums[choice] += each["nbytes"] * count // each["blocks"]
    return sums


def choices_in_words(choices: Any) -> str:
    """Return choices as text: ``"8 on disk, 4 kept"``."""
    return ", ".join(f"{count} {_WORDS[choice]}" for choice, count in choices)


def _whose(plan: dict[str, Any]) -> str:
    device = plan.get("device", "cpu")
    return "the process" if device == "cpu" else f"tensors on {device}"


def _state(plan: dict[str, Any]) -> str:
    budget = format_bytes(plan["budget_bytes"])
    smallest = plan["smallest_budget_bytes"]
    at_least = f": the smallest that can is {format_bytes(smallest)}" if smallest else ""
    return {
        "measuring": f"Within {budget}: there were too few steps to plan for; all that can move was moved.",
        "left alone": f"Everything fits within {budget}, and stays in memory.",
        "planned": f"Within a budget of {budget} for the memory of {_whose(plan)}.",
        "loaded": f"A plan from a file, for a budget of {budget}.",
        "too small": f"A budget of {budget} cannot be kept{at_least}.",
    }[plan["state"]]


def _difference(plan: dict[str, Any]) -> list[str]:
    """Return a sentence that compares the measured figures with the prediction and the budget."""
    predicted, measured = plan["predicted"], plan["measured"]
    if measured is None:
        return [] if predicted is None else ["No step under the plan was measured."]
    budget = plan["budget_bytes"]
    against_budget = _compared(measured["peak_bytes"], budget, "the budget")
    if predicted is None:
        return [f"The measured peak was {against_budget}."]
    peak = _compared(measured["peak_bytes"], predicted["peak_bytes"], "the predicted one")
    step = _compared(measured["step_seconds"], predicted["step_seconds"], "the predicted one")
    return [f"The measured peak was {peak} and {against_budget}; the time of a step was {step}."]


def _compared(value: float, other: float, name: str) -> str:
    share = value / other - 1 if other else 0.0
    if abs(share) < 0.0005:
        return f"{name} to 0.1%" if name != "the budget" else "at the budget"
    return f"{abs(share):.1%} {'above' if share > 0 else 'below'} {name}"
