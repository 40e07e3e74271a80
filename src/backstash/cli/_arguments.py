"""How the commands read their arguments: each is checked at once, and a mistake is one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from ..errors import SizeError
from ..units import parse_bytes

__all__ = ["Parser", "directory", "limit", "new_file", "size", "words"]


class Parser(argparse.ArgumentParser):
    """An ``argparse`` parser whose errors are one line, with exit status 2."""

    def __init__(
        self, prog: str, description: str, examples: str, usage: str | None = None
    ) -> None:
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Print ``message`` as one line on stderr and leave with status 2."""
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse ``arguments``; an option that is not known is answered with those that are."""
        options, unknown = self.parse_known_args(list(arguments))
        if unknown:
            self.error(f"unknown argument {unknown[0]!r}; options: {', '.join(self.options())}")
        return options

    def options(self) -> list[str]:
        """The long names of all options."""
        names = [name for action in self._actions for name in action.option_strings]
        return [name for name in names if name.startswith("--")]

    def takes_value(self, option: str) -> bool:
        """Whether ``option`` is followed by a value."""
        action = self._option_string_actions.get(option)
        return action is not None and action.nargs != 0


def size(text: str) -> int:
    """An option's value in bytes: ``"512MiB"``."""
    try:
        return parse_bytes(text)
    except SizeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def limit(text: str) -> int | None:
    """Like :func:`size`; ``"unlimited"`` is ``None``."""
    if text == "unlimited":
        return None
    try:
        return parse_bytes(text)
    except SizeError as error:
        raise argparse.ArgumentTypeError(f'{error}, or "unlimited"') from None


def directory(text: str) -> str:
    """An option's value as the path of a directory that exists and can be written."""
    path = os.path.abspath(os.path.expanduser(text))
    if not os.path.isdir(path):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a directory; allowed: an existing, writable directory"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not writable; allowed: an existing, writable directory"
        )
    return path


def new_file(text: str) -> str:
    """An option's value as the path of a file that can be written."""
    path = os.path.abspath(os.path.expanduser(text))
    if os.path.isdir(path) or not os.path.isdir(os.path.dirname(path)):
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be written; allowed: a file in an existing directory"
        )
    return path


def words(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """A parser of comma-separated words, each one of ``allowed``."""

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(word.strip() for word in text.split(",") if word.strip())
        for word in chosen:
            if word not in allowed:
                raise argparse.ArgumentTypeError(f"{word!r}; allowed: {', '.join(allowed)}")
        return chosen

    return parse
