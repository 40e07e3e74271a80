"""The accelerator's tables, drawn from a results file and from nothing else."""

from __future__ import annotations

import statistics
from typing import Any

from ...units import format_bytes
from ._device_ways import WAYS
from ._markdown import markdown

__all__ = ["device_table"]


def device_table(section: dict[str, Any]) -> str:
    """The link, a table for each model, the largest sequence and the many steps, as markdown."""
    link = section["link"]
    about = (
        f"{section['device']}; link {link['down_bytes_per_second'] / 1e9:.1f} GB/s down, "
        f"{link['up_bytes_per_second'] / 1e9:.1f} up, {link['each_of_both_bytes_per_second'] / 1e9:.1f} "
        f"each while both run; bf16 matrix product {link['matmul_operations_per_second'] / 1e12:.0f} "
        f"TFLOP/s; {section['repeats']} repeats in turn, {section['steps']} steps each:"
    )
    models = [_model(name, found, link) for name, found in section["models"].items()]
    return "\n\n".join([about, *models, _largest(section["largest"]), _steady(section["steady"])])


def _model(name: str, found: dict[str, Any], link: dict[str, float]) -> str:
    if "failed" in found:
        return f"{name}: {found['failed']}"
    plain = found["rows"]["plain"]
    rows = [_row(key, row, plain, link) for key, row in found["rows"].items()]
    head = (
        "way",
        "step",
        "of plain's",
        "peak over start",
        "moved down, up",
        "floors: compute, link",
        "of the larger floor",
        "gradients",
    )
    saved = format_bytes(found["saved_bytes"])
    return f"{found['description']}; a step saves {saved}:\n\n{markdown(head, rows)}"


def _row(
    key: str, row: dict[str, Any], plain: dict[str, Any], link: dict[str, float]
) -> tuple[str, ...]:
    title = WAYS[key].title
    if "failed" in row:
        return (title, row["failed"], "", "", "", "", "", "")
    step = statistics.median(row["step_seconds"])
    peak = format_bytes(max(row["peaks"]))
    if "failed" in plain:
        return (title, f"{step:.3f} s", "", peak, _moved(row), "", "", "")
    compute = statistics.median(plain["step_seconds"])
    transfer = row.get("down_bytes", 0) / link["down_bytes_per_second"]
    transfer += row.get("up_bytes", 0) / link["up_bytes_per_second"]
    floors = f"{compute:.3f} s, {transfer:.3f} s" if "down_bytes" in row else ""
    exact = set(row["gradients"]) == set(plain["gradients"]) and len(set(plain["gradients"])) == 1
    return (
        title,
        f"{step:.3f} s",
        f"{step / compute:.2f}",
        peak,
        _moved(row),
        floors,
        f"{max(compute, transfer) / step:.2f}" if floors else "",
        "equal" if exact else "differ",
    )


def _moved(row: dict[str, Any]) -> str:
    if "down_bytes" not in row:
        return ""
    return f"{format_bytes(row['down_bytes'])}, {format_bytes(row['up_bytes'])}"


def _largest(found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"The longest sequence: {found['failed']}"
    rows = [
        (WAYS[key].title, str(row["tokens"]), str(row["next_that_failed"] or "not reached"))
        for key, row in found["rows"].items()
    ]
    size = format_bytes(found["budget_bytes"])
    head = ("way", "longest that trained", "shortest that did not")
    return f"The longest sequence of a Llama-like stack within {size}:\n\n{markdown(head, rows)}"


def _steady(found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"Many steps: {found['failed']}"
    held = found["device_host_resident_bytes"]
    first, last = (
        ", ".join(format_bytes(nbytes) for nbytes in each) for each in (held[0], held[-1])
    )
    return (
        f"{found['steps']} steps of changing shapes; on the device, pinned, resident: {first} after a "
        f"tenth of them, {last} after all."
    )
