"""Recompute saved tensors: discard what a module saves and replay its operations in backward."""

__all__: list[str] = []
