"""Render a drawing by Graphviz as SVG, one self-contained element with its own style sheet; and as a page."""

from __future__ import annotations

import re
import shutil
import subprocess

from ...errors import UsageError
from ._colors import CSS
from ._dot import FONT, to_dot
from ._records import DrawnGraph, DrawnNode
from ._text import headline, row_lines, size_line, xml

__all__ = ["to_page", "to_svg"]

_FAMILY = "ui-monospace,'SF Mono',Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"


def to_svg(drawing: DrawnGraph) -> str:
    """Return the text of one ``<svg>`` element.

    Raises:
        UsageError: Graphviz is not installed.
    """
    text = _rendered(to_dot(drawing))
    start = re.search(
        r'<svg width="([\d.]+)pt" height="([\d.]+)pt"\s+viewBox="([^"]*)"[^>]*>', text
    )
    assert start is not None, text[:400]
    width, height, box = start.groups()
    body = re.sub(r"<!--.*?-->\n?", "", text[start.end() :], flags=re.DOTALL)
    body = re.sub(r"<title>(.*?)</title>\n", lambda found: _title(found[1], drawing), body)
    body = re.sub(rf' font-family="{FONT}[^"]*"', "", body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="bs-graph" width="{width}" height="{height}" '
        f'viewBox="{box}" font-family="{_FAMILY}" role="img" '
        f'aria-label="{xml(headline(drawing)[0])}" xml:space="preserve">\n<style>{CSS}</style>{body}'
    )


def _rendered(dot: str) -> str:
    if shutil.which("dot") is None:
        raise UsageError(
            "no command dot: a picture of the graph needs Graphviz (apt, brew or conda install graphviz). "
            "print(drawing) and save('graph.txt') need nothing"
        )
    done = subprocess.run(["dot", "-Tsvg"], input=dot.encode(), capture_output=True)
    if done.returncode:
        raise UsageError(
            f"dot failed with {done.returncode}: {done.stderr.decode(errors='replace')[:300]}"
        )
    return done.stdout.decode()


def _title(of: str, drawing: DrawnGraph) -> str:
    """Return the tooltip of a box or a frame; nothing for an edge, or for the whole."""
    found = re.fullmatch(r"(n|cluster_)(\d+)", of)
    if found is None:
        return ""
    index = int(found[2])
    text = _tooltip(drawing.nodes[index]) if found[1] == "n" else drawing.groups[index].title
    return f"<title>{xml(text)}</title>\n"


def _tooltip(node: DrawnNode) -> str:
    module = f"module {node.module}" if node.module and node.module != node.label else ""
    lines = [node.name or node.label, module, size_line(node, show_dtype=True), node.detail]
    return "\n".join(filter(None, [*lines, *row_lines(node, show_dtype=True)]))


def to_page(drawing: DrawnGraph) -> str:
    """Return the text of one HTML file without scripts and without requests."""
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
