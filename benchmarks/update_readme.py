"""Draw the tables of the pages in ``PAGES`` again from the committed results.

    python benchmarks/update_readme.py           write them
    python benchmarks/update_readme.py --check   say whether they are what the results give

A table stands between `<!-- table: benchmarks/results/NAME.json -->` and `<!-- end of table -->`; one that
begins with `<!-- summary: ... -->` has a line for each way of holding what is saved, and few columns.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from backstash.units import format_bytes
from bench._markdown import markdown
from bench._step_table import step_rows
from bench._table import table

__all__ = ["PAGES", "main", "updated"]

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/explanation/measured.md", "benchmarks/README.md")
_BLOCK = re.compile(r"(<!-- (table|summary): (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def summary(results: dict[str, Any]) -> str:
    """Of each step that a results file has: the ways, how long they take and how much memory, next to plain."""
    parts = []
    for section in results["sections"]:
        rows = [
            (
                row.title,
                f"{row.ratio.median:.2f}",
                format_bytes(row.peak_bytes),
                f"{row.peak_share:.0%}",
            )
            for row in step_rows(section)
        ]
        head = ("way", "step, of plain's", "peak over start", "of plain's")
        parts.append(f"{section['description']}, on the CPU:\n\n{markdown(head, rows)}")
    return "\n\n".join(parts)


def updated(text: str, root: Path = ROOT) -> str:
    """``text`` with each table drawn from the file that its marker names, relative to ``root``."""

    def draw(match: re.Match[str]) -> str:
        results = json.loads((root / match[3]).read_text(encoding="utf-8"))
        drawn = (table if match[2] == "table" else summary)(results)
        return f"{match[1]}{drawn}\n{match[4]}"

    return _BLOCK.sub(draw, text)


def main() -> int:
    """Write the pages, or with ``--check`` return 1 where one would change."""
    differ = 0
    for page in PAGES:
        path = ROOT / page
        before = path.read_text(encoding="utf-8")
        after = updated(before)
        differ |= before != after
        if "--check" not in sys.argv[1:]:
            path.write_text(after, encoding="utf-8")
    return int(differ) if "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
