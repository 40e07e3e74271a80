"""Write the first lines of a summary: whether the run was worth it. Sometimes this is the only line."""

from __future__ import annotations

from typing import Any

from ..units import format_bytes

__all__ = ["CHILDREN", "GOOD_ENDS", "largest", "only_line", "step_line", "verdict"]

_KEPT_ITS_SIZE = ("not packed: ", "not recomputed: ")  # such a tensor may have moved
GOOD_ENDS = ("finished", "exit 0", "SIGTERM")
"""Outcomes of a script that did not fail; SIGTERM is not an error of the script."""
CHILDREN = (
    "processes that the script starts are not held; if they do the training, put the launcher in front: "
    "torchrun ... -m backstash run ... SCRIPT"
)
"""The note about processes that the script starts."""


def only_line(figures: dict[str, Any]) -> str:
    """Return the only line of a summary if more lines would hide a traceback or add nothing; else ``""``."""
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
        return ""  # the summary has something to say about tensors that stayed
    return verdict(figures, None)


def verdict(figures: dict[str, Any], other: dict[str, Any] | None) -> str:
    """Return the first line: the measured peak, and the budget or what was moved.

    Only a comparison with another run says what the peak is without backstash. A plan's figure for that is
    called an estimate.

    Args:
        figures: as in the JSON of ``backstash run``.
        other: the figures of another run, to compare with.
    """
    stats = figures["stats"]
    where, peak = largest(figures)
    away = stats["host_peak_bytes"] + stats["disk_peak_bytes"]
    if other is not None:
        return _compared(figures, other)
    plan = figures.get("plan")
    held = f"peak {format_bytes(peak)}{where}"
    if plan is not None:
        return f"{held}, {_compared_with_budget(plan, peak)}{_plain(plan)}"
    freed = [name for name in ("recomputed", "packed") if stats[f"{name}_bytes"]]
    if not stats["written_bytes"] and freed:
        return f"{held}; saved tensors were {' and '.join(freed)}, and none was moved"
    if not stats["written_bytes"]:
        return f"{held}; nothing was moved: {_why_nothing(figures)}"
    return f"{held}; {format_bytes(away)} at once at most was moved out of memory"


def _why_nothing(figures: dict[str, Any]) -> str:
    stats = figures["stats"]
    if figures.get("leaves_small"):
        return "a step saves too little for that to free memory"
    if notes := sorted(stats["notes"], key=lambda note: "kept in memory" not in note):
        return str(notes[0])
    if stats["keep_peak_bytes"]:
        return f"{format_bytes(stats['keep_peak_bytes'])} were saved at once at most, which --keep allows"
    return "nothing that is saved could move"


def _plain(plan: dict[str, Any]) -> str:
    """Return a plan's estimate for a step with everything in place."""
    if plan["plain"] is None or plan["state"] in ("measuring", "left alone"):
        return ""
    return f"; everything in place takes an estimated {format_bytes(plan['plain']['peak_bytes'])}"


def _compared_with_budget(plan: dict[str, Any], peak: int) -> str:
    """Return whether the whole run kept the budget; if not, whether the steps under the plan did."""
    budget, measured = format_bytes(plan["budget_bytes"]), plan["measured"]
    more = peak - plan["budget_bytes"]
    # Both may have the same three digits.
    over = f"over the budget of {budget}" + (
        f" by {format_bytes(more)}" if more < 0.01 * peak else ""
    )
    if plan["state"] == "measuring":
        kept = "within" if peak <= plan["budget_bytes"] else "over"
        return f"{kept} the budget of {budget}, in too few steps to make a plan"
    if peak <= plan["budget_bytes"]:
        rest = ": everything fits and stays in memory" if plan["state"] == "left alone" else ""
        return f"within the budget of {budget}{rest}"
    if measured is not None and measured["peak_bytes"] <= plan["budget_bytes"]:
        step = format_bytes(measured["peak_bytes"])
        return (
            f"{over}, which a step keeps with a peak of {step}: the first steps, or "
            "other parts of the run, take more"
        )
    smallest = plan["smallest_budget_bytes"]
    if plan["state"] == "too small" and smallest:
        return f"{over}: the smallest that can be kept is about {format_bytes(smallest)}"
    return over


def largest(figures: dict[str, Any]) -> tuple[str, int]:
    """Return which memory matters and its peak in bytes: an accelerator's if it was planned for or its tensors
    moved, else the process's."""
    devices, plan = figures["devices"], figures.get("plan") or {}
    if plan.get("device") in devices:
        return f" on {plan['device']}", devices[plan["device"]]
    if devices and figures["stats"]["host_peak_bytes"]:
        name = max(devices, key=lambda each: int(devices[each]))
        return f" on {name}", devices[name]
    return "", figures["resident"]["peak_bytes"]


def _of_first(moved_bytes: int) -> str:
    """Return the bytes that the first, measured steps moved before a plan left everything in place."""
    return f" but for {format_bytes(moved_bytes)} in the first steps" if moved_bytes else ""


def step_line(figures: dict[str, Any]) -> str:
    """Return the second line: the time of a step, how much of it was waiting, and what it moved."""
    stats, steps = figures["stats"], figures["steps"]
    count = steps["count"] if steps["median_seconds"] else 0
    waited = stats["stall_seconds"] / (count or 1)
    if count:
        time = f"a step took {steps['median_seconds']:.3g} s, {waited:.2g} s of it waiting"
    else:
        time = f"{figures['seconds']:.1f} s, {waited:.2g} s of them waiting"
    if (figures.get("plan") or {}).get("state") == "left alone":
        return f"{time}; everything stays in memory{_of_first(stats['written_bytes'])}"
    parts = {
        "moved": stats["written_bytes"],
        "recomputed": stats["recomputed_bytes"],
        "packed": stats["packed_bytes"],
        "stayed in memory": stats.get("stayed_bytes", 0)
        + sum(
            each["nbytes"]
            for reason, each in stats["left"].items()
            if "parameter" not in reason and not reason.startswith(_KEPT_ITS_SIZE)
        ),
    }
    shown = [f"{format_bytes(each // (count or 1))} {name}" for name, each in parts.items() if each]
    what = f"; {', '.join(shown)}" if shown else ""
    return f"{time}{what}{' a step' * bool(count and shown)}"


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
