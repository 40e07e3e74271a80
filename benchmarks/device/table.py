"""The accelerator's tables, drawn from nothing but a results file, complete or cut off."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from backstash.units import format_bytes
from bench._markdown import markdown

from .ways import WAYS

__all__ = ["DeviceRow", "device_rows", "device_table"]

_HEAD = (
    "way",
    "step",
    "of plain's",
    "peak over start",
    "moved down, up",
    "floors: compute, link",
    "of the larger floor",
    "gradients",
)


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """The time and memory of one way, compared with plain PyTorch and with what the link allows."""

    key: str
    """The way's key in ``WAYS``."""
    step_seconds: float
    """Median seconds of a step."""
    samples: int
    """How many steps the median is of."""
    ratio: float | None
    """The step over plain's; ``None`` where plain failed."""
    peak_bytes: int
    """Peak bytes on the device, over those before the step."""
    moved: tuple[int, int] | None
    """Bytes moved off the device and back in a step; ``None`` where the way does not count them."""
    compute_seconds: float | None
    """The compute floor: seconds of plain's step."""
    link_seconds: float | None
    """The link floor: seconds that the link needs for the bytes off the device, then for those back."""
    gradients: str
    """``"equal"`` to plain's, ``"differ"``, ``"plain's own vary"``, or ``""`` where plain failed."""

    @property
    def of_floor(self) -> float | None:
        """The larger floor over the step's seconds: 1 is as fast as possible."""
        floors = [floor for floor in (self.compute_seconds, self.link_seconds) if floor is not None]
        return float(max(floors) / self.step_seconds) if len(floors) == 2 else None


def device_rows(found: dict[str, Any], link: dict[str, Any]) -> Iterator[DeviceRow]:
    """The rows of one model, without those that failed."""
    plain = found.get("rows", {}).get("plain", {})
    compute = float(statistics.median(plain["step_seconds"])) if plain.get("step_seconds") else None
    for key, row in found.get("rows", {}).items():
        if "failed" in row or not row.get("step_seconds"):
            continue
        step = statistics.median(row["step_seconds"])
        moved = (row["down_bytes"], row["up_bytes"]) if "down_bytes" in row else None
        yield DeviceRow(
            key=key,
            step_seconds=step,
            samples=len(row["step_seconds"]),
            ratio=step / compute if compute else None,
            peak_bytes=max(row["peaks"]),
            moved=moved,
            compute_seconds=compute,
            link_seconds=_link_seconds(moved, link),
            gradients=_compared(row.get("gradients", []), plain.get("gradients", [])),
        )


def _link_seconds(moved: tuple[int, int] | None, link: dict[str, Any]) -> float | None:
    rates = [link.get(f"{way}_bytes_per_second") for way in ("down", "up")]
    if moved is None or not all(rates):
        return None
    return sum(nbytes / float(rate) for nbytes, rate in zip(moved, rates, strict=True) if rate)


def _compared(gradients: list[str], plain: list[str]) -> str:
    if not plain:
        return ""
    if len(set(plain)) > 1:
        return "plain's own vary"
    return "equal" if set(gradients) == set(plain) else "differ"


def device_table(section: dict[str, Any]) -> str:
    """The link, a table for each model, the largest sequence and batch, and the many steps, as markdown."""
    link = section.get("link", {})
    parts = [_about(section, link)]
    for group in ("models", "peers"):
        for name, found in section.get(group, {}).items():
            parts.append(_model(name, found, link))
    parts += [_largest(what, found) for what, found in section.get("largest", {}).items()]
    parts += [_steady(section.get("steady", {})), _sanitizer(section.get("sanitizer", {}))]
    return "\n\n".join(filter(None, parts))


def _about(section: dict[str, Any], link: dict[str, Any]) -> str:
    def rate(name: str, unit: float, digits: int) -> str:
        return f"{link[name] / unit:.{digits}f}" if name in link else "not measured"

    name = section["device"] + (f", CUDA {section['cuda']}" if section.get("cuda") else "")
    return (
        f"{name}; link {rate('down_bytes_per_second', 1e9, 1)} GB/s down, "
        f"{rate('up_bytes_per_second', 1e9, 1)} up, "
        f"{rate('each_of_both_bytes_per_second', 1e9, 1)} each while both run; bf16 matrix product "
        f"{rate('matmul_operations_per_second', 1e12, 0)} TFLOP/s; up to {section['repeats']} repeats in "
        f"turn, {section['steps']} steps each:"
    )


def _model(name: str, found: dict[str, Any], link: dict[str, Any]) -> str:
    if "rows" not in found:
        return f"{name}: {found.get('failed', 'not measured')}"
    good = {row.key: row for row in device_rows(found, link)}
    lines = []
    for key, row in found["rows"].items():
        if key in good:
            lines.append(_line(good[key]))
        else:
            why = row.get("failed", "no time was left").replace("|", "/").replace("\n", " ")
            lines.append((WAYS[key].title, why, *[""] * (len(_HEAD) - 2)))
    saved = format_bytes(found["saved_bytes"]) if "saved_bytes" in found else "an unknown amount"
    title = f"{found.get('description', name)}; a step saves {saved}:"
    notes = []
    if found.get("not_deterministic"):
        notes.append(
            f"Not every kernel has a deterministic form here: {found['not_deterministic']}."
        )
    if "failed" in found:
        notes.append(f"Cut off: {found['failed'].splitlines()[0]}")
    return "\n\n".join([title, markdown(_HEAD, lines), *notes])


def _line(row: DeviceRow) -> tuple[str, ...]:
    floors = ""
    if row.compute_seconds is not None and row.link_seconds is not None:
        floors = f"{row.compute_seconds:.3f} s, {row.link_seconds:.3f} s"
    return (
        WAYS[row.key].title,
        f"{row.step_seconds:.3f} s" + (" (once)" if row.samples == 1 else ""),
        "" if row.ratio is None else f"{row.ratio:.2f}",
        format_bytes(row.peak_bytes),
        "" if row.moved is None else ", ".join(map(format_bytes, row.moved)),
        floors,
        "" if row.of_floor is None else f"{row.of_floor:.2f}",
        row.gradients,
    )


def _largest(what: str, found: dict[str, Any]) -> str:
    if "rows" not in found:
        return f"The largest {what}: {found.get('failed', 'not measured')}"
    rows = [
        (
            WAYS[key].title,
            str(row["most"]) if row["most"] else "none",
            str(row["least_that_failed"] or "not reached"),
            row.get("why", ""),
        )
        for key, row in found["rows"].items()
    ]
    size = format_bytes(found["budget_bytes"])
    head = ("way", "largest that trained", "smallest that did not", "why")
    words = (
        f"The largest {what} within {size} of device memory (at the least: {found['description']}):"
    )
    return f"{words}\n\n{markdown(head, rows)}"


def _steady(found: dict[str, Any]) -> str:
    if "device_host_resident_bytes" not in found:
        return f"Many steps: {found.get('failed', 'not measured')}"
    held = found["device_host_resident_bytes"]
    first, last = (
        ", ".join(format_bytes(nbytes) for nbytes in each) for each in (held[0], held[-1])
    )
    return (
        f"{found['steps']} steps of changing shapes; on the device, pinned, resident: {first} after a "
        f"tenth of them, {last} after all."
    )


def _sanitizer(found: dict[str, Any]) -> str:
    if not found:
        return ""
    if "skipped" in found:
        return f"compute-sanitizer: {found['skipped']}."
    said = "nothing found" if found["clean"] else f"found something: {found['said'][:400]}"
    return f"compute-sanitizer: {said}."
