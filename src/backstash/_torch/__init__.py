"""Every private call of PyTorch that the library uses, with a fallback for versions that lack it."""

from .mkl import resolve as _resolve

__all__: list[str] = []

_resolve()
