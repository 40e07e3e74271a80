"""Saved tensors as blocks of bytes, the views that autograd holds of them, and the order of their use."""

__all__: list[str] = []
