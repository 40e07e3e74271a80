"""Recomputing: what a module saves is let go, and computed again by replaying its operations."""

__all__: list[str] = []
