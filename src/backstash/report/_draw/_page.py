"""A drawing as a page of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._svg import to_svg
from ._text import xml
from ._words import headline

if TYPE_CHECKING:
    from ._drawing import Drawing

__all__ = ["to_page"]


def to_page(drawing: Drawing) -> str:
    """The text of one HTML file without scripts and without requests."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{xml(headline(drawing)[0])}</title>
<style>
body{{margin:0;background:#eef1f5}}
main{{padding:16px;overflow:auto}}
svg{{display:block;margin:0 auto}}
@media (prefers-color-scheme:dark){{body{{background:#0b0e12}}}}
</style>
</head>
<body>
<main>
{to_svg(drawing)}</main>
</body>
</html>
"""
