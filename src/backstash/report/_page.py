"""Render a report as one HTML file that needs no network, no library and no server."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from ..places import PLACES
from ._bounds import bounded

__all__ = ["render_page"]

_SCRIPTS = ("format.js", "chart.js", "table.js", "page.js")
# Characters that could end the element with the data, or break a line of JavaScript.
_ESCAPES = str.maketrans(
    {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
)


def render_page(report: Mapping[str, Any]) -> str:
    """Render ``report``, a mapping of plain values, as the text of one self-contained HTML file.

    Every name and number is embedded as JSON and shown as text, never as markup. The page's policy allows only
    its own script, and no requests. To keep the file below about 10 MB, long tables are cut and long curves
    thinned out, and the page says so.

    Args:
        report: ``title``, and any of the following; leave out unknown values:

            - ``subtitle``: a line under the title; ``command``: a command line, with a button to copy it;
              ``made``: where and when the report was made.
            - ``facts``: the headline, a list of ``{"label", "value", "unit", "note", "how"}``. ``unit`` is
              ``"bytes"``, ``"seconds"``, ``"ratio"``, ``"share"`` (1.0 is all), ``"count"`` or ``"text"``.
              A ``value`` of ``None`` shows "not measured", and ``how`` is a command that measures it.
            - ``split``: where the bytes are: ``{"label", "parts": [{"name", "bytes", "key"}]}``; ``key`` is
              one of :data:`backstash.places.PLACES`.
            - ``curve``: the bytes held over time: ``{"seconds": [...], "tiers": [{"key", "name", "below",
              "bytes": [...]}], "marks": [{"label", "begin", "end"}], "phases": [...]}``. ``bytes`` has
              a value for each of ``seconds``; a tier that is ``below`` is drawn under the line.
            - ``modules``: ``{"columns": [{"label", "unit"}], "rows": [[path, ...], ...], "note"}``; the first
              column is a module's path; rows are sorted by the second, which has bars. With ``"lives"``, from
              :meth:`Timeline.sections`, a row filters the curve.
            - ``plan``: ``{"note", "figures": {"columns", "rows"}, "parts": [...], "classes": {"columns",
              "rows"}}``: the predicted and the measured figures, where the plan puts the bytes (as in
              ``split``), and what it does with each class.
            - ``stalls``: ``[{"seconds", "duration", "module", "what"}]``, longest first.
            - ``advice``: ``[{"text", "code"}]``, with a button to copy ``code``; ``notes``: sentences.
            - ``graph``: SVG text, shown as an image, so that no script in it can run.
            - ``graph_text``: the graph as text, where there is no SVG.

    Raises:
        ValueError: a number in the report is not finite.
        TypeError: a value in the report is not a plain value.

    >>> page = render_page({"title": "<b>train.py</b>", "facts": [
    ...     {"label": "Peak", "value": 1 << 30, "unit": "bytes"}]})
    >>> "<b>" in page
    False
    """
    data = bounded(report)
    graph = data.pop("graph", None)
    if graph:
        data["graph"] = "data:image/svg+xml;base64," + base64.b64encode(graph.encode()).decode()
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)
    labels = json.dumps({key: place.label for key, place in PLACES.items()})
    script = f"const PLACES = {labels};\n" + "".join(_part(name) for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    values = {
        "STYLE": _colors() + _part("page.css"),
        "SCRIPT": script,
        "DATA": text,
        "DIGEST": digest,
    }
    page = _part("page.html")
    pieces = page.split("%%")  # text, NAME, text, NAME, ..., text
    return "".join(values[piece] if at % 2 else piece for at, piece in enumerate(pieces))


def _colors() -> str:
    """Return the style sheet's rules that colour places."""
    light = "".join(f"--{key}:{place.light};" for key, place in PLACES.items())
    dark = "".join(f"--{key}:{place.dark};" for key, place in PLACES.items())
    rules = [
        f"i.{key}{{background:var(--{key})}}.tier.{key}{{fill:var(--{key})}}\n" for key in PLACES
    ]
    themes = f":root{{{light}}}\n@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
    return themes + "".join(rules)


def _part(name: str) -> str:
    return (resources.files(__package__) / "page" / name).read_text(encoding="utf-8")
