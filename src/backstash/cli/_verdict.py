"""Whether it was worth it: the first line of a summary, and at times the only one."""

from __future__ import annotations

from typing import Any

from ..units import format_bytes

__all__ = ["CHILDREN", "GOOD_ENDS", "NO_TORCH", "largest", "only_line", "verdict"]

_WORTH_MOVING = 0.05  # of the peak: less is within what two runs of one script differ by
GOOD_ENDS = ("finished", "exit 0", "SIGTERM")
"""How a script ends where nothing failed; the last is no error of the script's."""
NO_TORCH = "no torch"
"""The outcome of a script that has ended and did not import torch."""
CHILDREN = (
    "processes that the script starts are not held; if they do the training, put the launcher in front: "
    "torchrun ... -m backstash run ... SCRIPT"
)
"""What there is to say about processes that the script starts."""


def only_line(figures: dict[str, Any]) -> str:
    """What is said instead of a summary where that would hide a traceback, or say nothing; else ``""``."""
    stats, outcome = figures["stats"], figures["outcome"]
    peak = format_bytes(figures["resident"]["peak_bytes"])
    if outcome not in GOOD_ENDS:
        moved = stats["written_bytes"]
        until = f"; until then {format_bytes(moved)} were moved out of memory" if moved else ""
        return f"the script ended by {outcome} after {figures['seconds']:.1f} s{until}; peak {peak}"
    if not stats["saves"] and not stats["left"]:
        return f"nothing was saved for backward in this process (peak {peak}): {CHILDREN}"
    if stats["eligible_bytes"] or stats["notes"] or figures["notes"]:
        return ""
    if any(not each["nbytes"] or each["nbytes"] > 1 << 20 for each in stats["left"].values()):
        return ""  # there is something to say about what stayed
    return verdict(figures, None)


def verdict(figures: dict[str, Any], other: dict[str, Any] | None) -> str:
    """The measured peak, what was moved for it, and what that cost.

    What the peak would have been without backstash is said only in comparison with another run. A plan's figure
    for it is called an estimate.

    Args:
        figures: as the JSON of ``backstash run`` has them.
        other: the figures of another run; then those are what it is compared with.
    """
    stats = figures["stats"]
    where, peak = largest(figures)
    away = stats["host_peak_bytes"] + stats["disk_peak_bytes"]
    if other is not None:
        return _compared(figures, other)
    plan = figures.get("plan")
    if plan is not None and plan["state"] == "left alone":
        return (
            f"everything fits within {format_bytes(plan['budget_bytes'])} and was left in place, but for a "
            f"first step that was measured; peak {format_bytes(peak)}{where}"
        )
    held = f"peak {format_bytes(peak)}{where}"
    if plan is not None:
        return f"{held} {_beside_budget(plan, peak)}{_planned(plan)}; {_cost(figures)}"
    if away < _WORTH_MOVING * peak and stats["notes"]:
        return f"hardly anything was moved: {stats['notes'][0]}; {held}"
    at_once = format_bytes(stats["keep_peak_bytes"])
    if not stats["written_bytes"] and stats["keep_peak_bytes"]:
        return f"nothing was moved: at most {at_once} was saved at once, which may stay in place; {held}"
    if away < _WORTH_MOVING * peak:
        return (
            f"little was moved: {format_bytes(away)} at once at most, less than a twentieth of the peak of "
            f"{format_bytes(peak)}{where}"
        )
    return f"{held}; {format_bytes(away)} at once at most was moved out of memory; {_cost(figures)}"


def _planned(plan: dict[str, Any]) -> str:
    """What is known beside the peak of a step under a plan, and whether it was measured."""
    if plan["state"] == "measuring":
        return ", with too few steps to make a plan: all that could move was moved"
    if plan["plain"] is None:
        return ""
    return f", where the plan estimates {format_bytes(plan['plain']['peak_bytes'])} with everything in place"


def _beside_budget(plan: dict[str, Any], peak: int) -> str:
    budget, measured = plan["budget_bytes"], plan["measured"]
    if peak <= budget:
        return f"within a budget of {format_bytes(budget)}"
    over = f"over a budget of {format_bytes(budget)}"
    if measured is not None and measured["peak_bytes"] <= budget:
        return f"{over}, which was kept in the steps measured under the plan"
    return over


def largest(figures: dict[str, Any]) -> tuple[str, int]:
    """Where memory is what matters, and the most bytes there: on an accelerator that was planned for, or whose
    tensors were moved."""
    devices, plan = figures["devices"], figures.get("plan") or {}
    if plan.get("device") in devices:
        return f" on {plan['device']}", devices[plan["device"]]
    if devices and figures["stats"]["host_peak_bytes"]:
        name = max(devices, key=lambda each: int(devices[each]))
        return f" on {name}", devices[name]
    return "", figures["resident"]["peak_bytes"]


def _cost(figures: dict[str, Any]) -> str:
    waited, steps = figures["stats"]["stall_seconds"], figures["steps"]
    if steps["median_seconds"]:
        a_step = waited / steps["count"]
        return f"a step took {steps['median_seconds']:.3g} s, {a_step:.2g} s of it waiting for tensors to move"
    return f"{waited:.2g} s of {figures['seconds']:.1f} s were spent waiting for tensors to move"


def _compared(figures: dict[str, Any], other: dict[str, Any]) -> str:
    own, theirs = figures["resident"]["over_start_bytes"], other["resident"]["over_start_bytes"]
    memory = (
        f"{format_bytes(own)} over the start where {other['file']} has {format_bytes(theirs)}, "
        f"{own / theirs:.0%} of its memory over the start"
        if theirs
        else f"the memory of {other['file']} is not known"
    )
    step, its = figures["steps"]["median_seconds"], other["steps"]["median_seconds"]
    pace = f"{step / its:.2f} of its step" if step and its else "steps were not seen in both runs"
    return f"{memory}; {pace}"
