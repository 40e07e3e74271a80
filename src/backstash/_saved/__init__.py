"""What is saved: blocks of bytes, the views that autograd holds of them, and the order they are used in."""

__all__: list[str] = []
