"""A report as one HTML file that needs nothing else: no network, no library, no server."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from ._bounds import bounded

__all__ = ["render_page"]

# What could end the element that the data is in, or break a line of JavaScript.
_SCRIPTS = ("format.js", "chart.js", "table.js", "page.js")
_ESCAPES = str.maketrans(
    {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
)


def render_page(report: Mapping[str, Any]) -> str:
    """The page for ``report``, a mapping of plain values; text for one self-contained ``.html`` file.

    Every name and number is embedded as JSON and shown as text, never as markup, and the page's policy
    refuses any script but its own and any request. Long tables are cut and long curves thinned first, and
    the page says so, so that the file stays below about 10 MB.

    Args:
        report: ``title``, and any of these, each left out where it is not known:

            - ``subtitle``: a line under the title; ``command``: what to type, with a button to copy it;
              ``made``: where and when.
            - ``facts``: the headline, a list of ``{"label", "value", "unit", "note", "how"}``. ``unit`` is
              ``"bytes"``, ``"seconds"``, ``"ratio"``, ``"share"`` (1.0 is all), ``"count"`` or ``"text"``.
              A ``value`` of ``None`` shows "not measured", and ``how`` (a command) is how to get it.
            - ``split``: where the bytes went, ``{"label", "parts": [{"name", "bytes", "key"}]}``; ``key`` is a
              tier's (``"keep"``, ``"inflight"``, ``"ahead"``, ``"host"``, ``"disk"``) or ``"left"``.
            - ``curve``: what was held over time, ``{"seconds": [...], "tiers": [{"key", "name", "below",
              "bytes": [...]}], "marks": [{"label", "begin", "end"}], "phases": [...]}``: each tier's bytes are
              as many as ``seconds``; one that is ``below`` is drawn under the line.
            - ``modules``: ``{"columns": [{"label", "unit"}], "rows": [[path, ...], ...], "note"}``; the first
              column is a module's path, the second is what rows are sorted by and have bars of. ``"lives"``,
              from :meth:`Timeline.sections`, lets a row filter the curve.
            - ``stalls``: ``[{"seconds", "duration", "module", "what"}]``, the longest first.
            - ``advice``: ``[{"text", "code"}]``, ``code`` to copy; ``notes``: sentences.
            - ``graph``: SVG text, shown as an image, so that nothing in it can run.

    Raises:
        ValueError: the report holds something that is no plain value.

    >>> page = render_page({"title": "<b>train.py</b>", "facts": [
    ...     {"label": "Peak", "value": 1 << 30, "unit": "bytes"}]})
    >>> "<b>" in page
    False
    """
    data = dict(bounded(report))
    graph = data.pop("graph", None)
    if graph:
        data["graph"] = "data:image/svg+xml;base64," + base64.b64encode(graph.encode()).decode()
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)
    script = "".join(_part(name) for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    values = {"STYLE": _part("page.css"), "SCRIPT": script, "DATA": text, "DIGEST": digest}
    page = _part("page.html")
    pieces = page.split("%%")  # text, NAME, text, NAME, ..., text
    return "".join(values[piece] if at % 2 else piece for at, piece in enumerate(pieces))


def _part(name: str) -> str:
    return (resources.files(__package__) / "page" / name).read_text(encoding="utf-8")
