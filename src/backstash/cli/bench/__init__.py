"""``backstash bench``: step time and memory beside the alternatives, measured here and now."""

from __future__ import annotations

from collections.abc import Sequence

from .._arguments import Parser

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status, as :func:`backstash.cli.bench._command.main` does."""
    # Not at the top: a worker process imports this package, and does not need the command.
    from ._command import main as command

    return command(arguments)


def _parser() -> Parser:
    from ._command import _parser as parser

    return parser()
