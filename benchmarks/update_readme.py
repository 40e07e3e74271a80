"""Draws README's tables again from the committed results.

    python benchmarks/update_readme.py           write them
    python benchmarks/update_readme.py --check   say whether they are what the results give

A table stands between `<!-- table: benchmarks/results/NAME.json -->` and `<!-- end of table -->`.
"""

import json
import re
import sys
from pathlib import Path

from backstash.cli.bench._table import table

__all__ = ["main", "updated"]

ROOT = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def updated(text: str, root: Path = ROOT) -> str:
    """``text`` with each table drawn from the file that its marker names, relative to ``root``."""

    def draw(match: re.Match[str]) -> str:
        results = json.loads((root / match[2]).read_text(encoding="utf-8"))
        return f"{match[1]}{table(results)}\n{match[3]}"

    return _BLOCK.sub(draw, text)


def main() -> int:
    """Write README, or with ``--check`` return 1 where it would change."""
    readme = ROOT / "README.md"
    before = readme.read_text(encoding="utf-8")
    after = updated(before)
    if "--check" in sys.argv[1:]:
        return int(before != after)
    readme.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
