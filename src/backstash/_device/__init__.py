"""Accelerators: their streams and copies, the memory they have free, and pinned host memory."""

__all__: list[str] = []
