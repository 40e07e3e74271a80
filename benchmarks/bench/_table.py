"""Markdown tables, drawn from nothing but the contents of a results file."""

from __future__ import annotations

import statistics
from typing import Any

from backstash.units import format_bytes

from ._markdown import markdown
from ._step_table import step_rows

__all__ = ["table"]

_STEP_HEAD = (
    "way",
    "step",
    "of plain's (least to most)",
    "of plain's with the same allocator",
    "peak over start",
    "of plain's",
    "on disk",
    "gradients",
    "left to hold or move",
)


def table(results: dict[str, Any]) -> str:
    """The sections of a results file as markdown, each with what was run, and the machine at the end.

    Raises:
        LookupError: a section has no run of plain PyTorch to compare with.
    """
    draw = {
        "step": _step,
        "overhead": _overhead,
        "alive": _alive,
        "limit": _limit,
        "limits": _limits,
        "gradients": _gradients,
        "device": _device,
    }
    parts = [draw[section["kind"]](section) for section in results["sections"]]
    machine, disk = results["machine"], results["disk"]
    about = (
        f"{machine['processor']}, {machine['cores']} cores, "
        f"{format_bytes(machine['memory_bytes'])}; {results['file_system']} that writes "
        f"{disk['write_bytes_per_second'] / 1e9:.1f} and reads "
        f"{disk['read_bytes_per_second'] / 1e9:.1f} GB/s; {machine['kernel']}, {machine['libc']}, "
        f"torch {results['versions']['torch']}; {results['date']}; `{results['command']}`"
    )
    return "\n\n".join([*parts, about])


def _step(section: dict[str, Any]) -> str:
    times = f"{section['repeats']} processes each, interleaved, {section['steps']} steps in each"
    found = step_rows(section)
    head = _STEP_HEAD if any(row.left is not None for row in found) else _STEP_HEAD[:-1]
    rows = [
        (
            row.title,
            f"{row.step_seconds:.2f} s",
            f"{row.ratio.median:.2f} ({row.ratio.least:.2f} to {row.ratio.most:.2f})",
            f"{row.same_allocator.median:.2f}" if row.same_allocator else "",
            format_bytes(row.peak_bytes),
            f"{row.peak_share:.0%}",
            "" if row.on_disk is None else f"{row.on_disk:.0%}",
            "equal" if row.exact else "differ",
            "" if row.left is None else f"{row.left:.0%}",
        )[: len(head)]
        for row in found
    ]
    failed = [
        f"`{run['variant']}` failed: {run['failed']}" for run in section["runs"] if "failed" in run
    ]
    skipped = [f"`{key}` skipped: {why}" for key, why in section["skipped"].items()]
    title = f"{section['description']}; {times}:"
    return "\n\n".join([title, markdown(head, rows), *failed, *skipped])


def _overhead(section: dict[str, Any]) -> str:
    good = [run for run in section["runs"] if "failed" not in run]
    if not good:
        return "overhead failed: " + "; ".join(run["failed"] for run in section["runs"])
    names = list(good[0]["seconds_per_operation"])
    medians = {
        name: statistics.median(
            value for run in good for value in run["seconds_per_operation"][name]
        )
        for name in names
    }
    nothing, empty = medians["no hooks"], medians["empty hooks"]
    rows = [
        (
            name,
            f"{seconds * 1e6:.2f} us",
            f"{(seconds - nothing) * 1e6:.2f} us",
            f"{seconds / empty:.2f}",
            "" if name == "no hooks" else f"{(seconds - nothing) / (empty - nothing):.2f}",
        )
        for name, seconds in medians.items()
    ]
    head = ("hooks", "per operation", "more than none", "of empty hooks', gross", "net")
    count = good[0]["operations"]
    return f"A chain of {count} small operations, forward and backward:\n\n{markdown(head, rows)}"


def _alive(section: dict[str, Any]) -> str:
    rows = [
        (
            f"{run['mode']}, {run['alive']}",
            run.get("failed") or f"{run['pack_seconds'] * 1e6:.2f} us",
            "" if "failed" in run else f"{run['unpack_seconds'] * 1e6:.2f} us",
        )
        for run in section["runs"]
    ]
    head = ("saved tensors alive", "a pack", "an unpack")
    return f"With many saved tensors alive:\n\n{markdown(head, rows)}"


def _limit(section: dict[str, Any]) -> str:
    if section["skipped"]:
        return f"Work larger than its memory: skipped, {section['skipped']}"
    first = section["runs"][0]
    rows = [
        (
            f"{run['variant']}, {'inside' if run['inside'] else 'outside'}",
            _ended(run["status"]),
            format_bytes(run["resident_peak_bytes"]) if run["status"] == 0 else "",
            "equal" if run.get("losses") == first["losses"] else "",
        )
        for run in section["runs"]
    ]
    title = (
        f"{first['description']}: a step saves {format_bytes(section['saved_bytes'])}; the control "
        f"group's limit is {format_bytes(section['limit_bytes'])}:"
    )
    return f"{title}\n\n{markdown(('run', 'end', 'resident peak', 'losses'), rows)}"


def _limits(section: dict[str, Any]) -> str:
    if section["skipped"]:
        return f"Work several times its memory: skipped, {section['skipped']}"
    first = section["runs"][0]
    rows = [
        (
            run["variant"],
            format_bytes(run["limit_bytes"]) if run["inside"] else "none",
            f"{section['saved_bytes'] / run['limit_bytes']:.1f}" if run["inside"] else "",
            _ended(run["status"]),
            format_bytes(run["resident_peak_bytes"]) if run["status"] == 0 else "",
            format_bytes(run["group_peak_bytes"]) if run["inside"] else "",
            "equal" if run.get("losses") == first["losses"] else "",
        )
        for run in section["runs"]
    ]
    title = f"{first['description']}: a step saves {format_bytes(section['saved_bytes'])}"
    head = ("run", "limit", "saved over limit", "end", "resident peak", "group's peak", "losses")
    return f"{title}:\n\n{markdown(head, rows)}"


def _gradients(section: dict[str, Any]) -> str:
    rows, first = [], section["runs"][0]
    for way in dict.fromkeys(run["way"] for run in section["runs"]):
        good = [run for run in section["runs"] if run["way"] == way and "failed" not in run]
        if not good:
            rows.append((way, "failed", "", ""))
            continue
        exact = all(run["weights"] == first.get("weights") for run in good)
        rows.append(
            (
                way,
                format_bytes(int(statistics.median(run["over_start_bytes"] for run in good))),
                f"{statistics.median(run['step_seconds'] for run in good):.2f} s",
                "equal" if exact else "differ",
            )
        )
    size = format_bytes(section["gradient_bytes"])
    title = f"{section['description']}; its gradients are {size}:"
    head = ("optimizer", "peak over start", "step", "weights after")
    return f"{title}\n\n{markdown(head, rows)}"


def _device(section: dict[str, Any]) -> str:
    from device.table import device_table

    text: str = device_table(section)
    return text


def _ended(status: int) -> str:
    if status == 0:
        return "finished"
    killed = status in (-9, 137)
    return "killed (out of memory)" if killed else f"status {status}"
