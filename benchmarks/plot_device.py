"""Draws the accelerator's results: what a step takes and holds in each way, next to plain and the floor.

    python benchmarks/plot_device.py benchmarks/results/device.json docs/gpu.svg

For each model two bars a way: the step's time and the device's peak, both of plain's. A tick in the first is
the larger of the two floors, what computing alone or moving the bytes alone would take.
"""

import json
import sys
from html import escape
from pathlib import Path
from typing import Any

from device.table import DeviceRow, device_rows
from device.ways import WAYS

__all__ = ["main", "picture"]

WIDTH, LABEL, BAR, GAP, ROW = 900, 300, 240, 40, 22
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.h{font-weight:600}.s{fill:#777;font-size:11px}"
    ".t{fill:#4878a8}.m{fill:#c08840}.f{stroke:#222;stroke-width:2}.p{stroke:#999;stroke-dasharray:3 3}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.s{fill:#999}.f{stroke:#eee}}"
)


def picture(section: dict[str, Any]) -> str:
    """The section of a results file as SVG; models that failed are left out."""
    parts: list[str] = []
    top = 24
    for group in ("models", "peers"):
        for found in section.get(group, {}).values():
            rows = [row for row in device_rows(found, section.get("link", {})) if row.ratio]
            if rows:
                parts.append(_panel(found["description"], rows, top))
                top += 44 + ROW * len(rows) + 20
    about = f'<text class="s" x="0" y="{top}">{escape(str(section["device"]))}</text>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 12}" role="img">'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, about, "</svg>"]) + "\n"


def _panel(title: str, rows: list[DeviceRow], top: int) -> str:
    plain_peak = next((row.peak_bytes for row in rows if row.key == "plain"), 0)
    slowest = max(max(row.ratio or 0 for row in rows), 1.0)
    largest = max([row.peak_bytes / plain_peak for row in rows] if plain_peak else [1.0])
    second = LABEL + BAR + GAP + 40
    lines = [
        f'<text class="h" x="0" y="{top}">{escape(title)}</text>',
        f'<text class="s" x="{LABEL}" y="{top + 20}">step, of plain\'s; | the larger floor</text>',
        f'<text class="s" x="{second}" y="{top + 20}">device peak, of plain\'s</text>',
    ]
    for number, row in enumerate(rows):
        y = top + 28 + ROW * number
        ratio = row.ratio or 0.0
        name = WAYS[row.key].title.replace("`", "")
        lines.append(f'<text x="{LABEL - 10}" y="{y + 13}" text-anchor="end">{escape(name)}</text>')
        lines.append(_bar("t", LABEL, y, BAR * ratio / slowest, f"{ratio:.2f}"))
        if row.of_floor is not None:
            x = LABEL + BAR * ratio * row.of_floor / slowest
            lines.append(f'<line class="f" x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 16}"/>')
        if plain_peak:
            share = row.peak_bytes / plain_peak
            lines.append(_bar("m", second, y, BAR * share / largest, f"{share:.0%}"))
    return "\n".join(lines)


def _bar(kind: str, x: int, y: int, length: float, words: str) -> str:
    return (
        f'<rect class="{kind}" x="{x}" y="{y}" width="{max(length, 1):.1f}" height="16" rx="2"/>'
        f'<text class="s" x="{x + max(length, 1) + 4:.1f}" y="{y + 12}">{words}</text>'
    )


def main() -> int:
    """Read the results that the first argument names and write the second."""
    if len(sys.argv) != 3:
        print(__doc__)
        return 2
    results = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    (section,) = (each for each in results["sections"] if each["kind"] == "device")
    if section["tiny"]:
        print(f"{sys.argv[1]}: of a tiny run, whose figures mean nothing", file=sys.stderr)
        return 1
    Path(sys.argv[2]).write_text(picture(section), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
