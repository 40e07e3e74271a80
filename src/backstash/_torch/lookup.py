"""Find private objects of PyTorch by their full names, with a fallback for versions that lack them.

The functions return the object itself, so calling it costs no more than calling PyTorch.
"""

from __future__ import annotations

import importlib
from typing import Any, NoReturn

import torch

from ..errors import UsageError

__all__ = ["VERSIONS", "optional", "required"]

VERSIONS = "2.11 to 2.15"
"""The versions of PyTorch that were checked."""


def optional(path: str, otherwise: Any) -> Any:
    """Return PyTorch's object at ``path`` (``"torch._C._name"``), or ``otherwise`` if it does not exist."""
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
    """Return PyTorch's object at ``path``, or a function that raises ``UsageError`` if it does not exist.

    Args:
        path: its full name, such as ``"torch._C._name"``.
        purpose: completes "the call by which backstash ..." in the error message.
    """

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise UsageError(
            f"torch {torch.__version__} has no {path}, by which backstash {purpose}; "
            f"use torch {VERSIONS}"
        )

    return optional(path, missing)
