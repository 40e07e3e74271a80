"""Finding what PyTorch keeps private, by its full name, and saying so where a PyTorch lacks it.

What is found is the object itself, so that calling it costs nothing more than calling PyTorch.
"""

from __future__ import annotations

import importlib
from typing import Any, NoReturn

import torch

from ..errors import UsageError

__all__ = ["VERSIONS", "optional", "required"]

VERSIONS = "2.11 to 2.15"
"""The versions of PyTorch that were looked at."""


def optional(path: str, otherwise: Any) -> Any:
    """What PyTorch has at ``path`` (``"torch._C._name"``), or ``otherwise`` where it has nothing there."""
    name, *attributes = path.split(".")
    found: Any = torch
    for attribute in attributes:
        name += f".{attribute}"
        try:
            found = getattr(found, attribute)
        except AttributeError:
            try:
                found = importlib.import_module(name)
            except ImportError:
                return otherwise
    return found


def required(path: str, purpose: str) -> Any:
    """What PyTorch has at ``path``; where it has nothing there, a function that raises ``UsageError``.

    Args:
        path: its full name, ``"torch._C._name"``.
        purpose: completes "the call by which backstash ..." in the error's message.
    """

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise UsageError(
            f"torch {torch.__version__} has no {path}, by which backstash {purpose}; "
            f"use torch {VERSIONS}"
        )

    return optional(path, missing)
