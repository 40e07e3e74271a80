"""What `backstash bench --device` runs: an accelerator's models, ways and tables. Not part of the wheel.

``bench`` finds this folder next to ``src`` and imports it as the package ``device``.
"""

from __future__ import annotations

__all__: list[str] = []
