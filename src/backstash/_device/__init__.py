"""Accelerators: streams, copies, free memory, and pinned host memory."""

__all__: list[str] = []
