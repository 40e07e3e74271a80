"""What `backstash bench` runs: workloads, ways to hold what is saved, tables of results."""

from __future__ import annotations

__all__: list[str] = []
