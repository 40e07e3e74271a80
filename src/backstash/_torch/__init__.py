"""Every private call of PyTorch, each with what is done where a PyTorch lacks it. It knows no stash."""

from .mkl import resolve as _resolve

__all__: list[str] = []

_resolve()
