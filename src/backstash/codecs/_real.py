"""The input of lossy codecs."""

from __future__ import annotations

from torch import Tensor

__all__ = ["reals"]


def reals(values: Tensor) -> Tensor | str:
    """Return ``values`` as real numbers (two for each complex one), or why they cannot be rounded."""
    if values.dtype.is_complex:
        return values.view(values.dtype.to_real())
    if not values.dtype.is_floating_point:
        return "its dtype is not floating point"
    return values
