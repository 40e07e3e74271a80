"""What backward holds, who saved it, where it lives: as table, picture, timeline and page.

It imports nothing of the stash: it reads descriptions and events by their attributes.
"""

from __future__ import annotations

from ._page import render_page
from ._timeline import Timeline, timeline

__all__ = [
    "Timeline",
    "render_page",
    "timeline",
]
