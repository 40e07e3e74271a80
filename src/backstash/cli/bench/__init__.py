"""``backstash bench``: step time and memory beside the alternatives, measured here and now."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Measure, or draw the table of an earlier measurement.

    Returns:
        0; 1 where plain itself failed, so that there is nothing to compare with.
    """
    from ._command import main as command  # here: a worker imports this package, not the command

    return command(arguments)
