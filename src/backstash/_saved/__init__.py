"""Saved tensors as blocks of bytes, the views that autograd holds of them, and the order in which they are
used."""

__all__: list[str] = []
