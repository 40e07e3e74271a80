"""Read and check the commands' arguments. A mistake is reported in one line.

The line says what is wrong, what is allowed, and what to type next.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar

from ..errors import SizeError
from ..launcher import this_rank
from ..scratch import scratch
from ..units import parse_bytes

__all__ = [
    "Parser",
    "alike",
    "by_rank",
    "directory",
    "new_file",
    "recompute_option",
    "scratch_directory",
    "size",
]

_Value = TypeVar("_Value")
_LEAST_BARE_BYTES = 4096  # a smaller number probably lacks its unit
_OF_RANKS = re.compile(r"(\d+)(?:-(\d+))?:(.+)")


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
        """Print ``message`` as one line on stderr, with a command to type next, and exit with status 2."""
        if "`" not in message:
            message = f"{message.removeprefix('argument ')}; `{self.prog} --help` has examples"
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse ``arguments``; the error for an unknown option lists the known ones."""
        options, unknown = self.parse_known_args(list(arguments))
        if unknown:
            names = self.options()
            meant = alike(unknown[0].partition("=")[0].lstrip("-"), [name[2:] for name in names])
            meant = f"did you mean --{meant}? " if meant else ""
            self.error(f"unknown argument {unknown[0]!r}; {meant}options: {', '.join(names)}")
        return options

    def options(self) -> list[str]:
        """Return the long names of all options."""
        names = [name for action in self._actions for name in action.option_strings]
        return [name for name in names if name.startswith("--")]

    def takes_value(self, option: str) -> bool:
        """Whether ``option`` is followed by a value."""
        action = self._option_string_actions.get(option)
        return action is not None and action.nargs != 0


def alike(word: str, known: Sequence[str]) -> str:
    """Return the one of ``known`` that is most like a misspelt ``word``; ``""`` if none is.

    >>> alike("rnu", ["run", "plan"]), alike("train", ["run", "plan"])
    ('run', '')
    """
    return next(iter(get_close_matches(word, known, n=1, cutoff=0.6)), "")


def size(*words: str, needs_unit: bool = False) -> Callable[[str], Any]:
    """Return a parser of a size, such as ``"512MiB"``, in bytes.

    Args:
        words: returned as they are, but ``"unlimited"`` as ``None``.
        needs_unit: refuse a small number without a unit.
    """

    def parse(text: str) -> int | str | None:
        if text in words:
            return None if text == "unlimited" else text
        try:
            nbytes = parse_bytes(text)
        except SizeError as error:
            others = "".join(f', or "{word}"' for word in words)
            raise argparse.ArgumentTypeError(f"{error}{others}") from None
        if needs_unit and text.isdigit() and 0 < nbytes < _LEAST_BARE_BYTES:
            raise argparse.ArgumentTypeError(f"{text} is {nbytes} bytes; with a unit: `{text}GiB`")
        return nbytes

    return parse


def directory(text: str) -> str:
    """Return an option's value as the path of a directory that exists and can be written to."""
    path = os.path.abspath(os.path.expanduser(text))
    if not text or not os.path.isdir(path):
        make = "" if os.path.exists(path) else f"; `mkdir -p {shlex.quote(text)}` makes it"
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a directory; allowed: an existing, writable directory{make}"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not writable; allowed: an existing, writable directory"
        )
    return path


def scratch_directory(parser: Parser) -> tuple[str, str]:
    """Return a directory for what moves where none was given, and a sentence about it."""
    found = scratch()
    if found is None:
        parser.error(
            "no directory on a disk was found to move to ($TMPDIR or /tmp, /scratch, /var/tmp and the working "
            "directory were tried); give --disk DIR"
        )
    path, why = found
    return path, f"what moves goes to {path} ({why}); --disk DIR names another"


def new_file(text: str) -> str:
    """Return an option's value as the path of a file that can be written."""
    path = os.path.abspath(os.path.expanduser(text))
    folder = os.path.dirname(path)
    if os.path.isdir(path) or not os.path.isdir(folder):
        make = "" if os.path.exists(folder) else f"; `mkdir -p {shlex.quote(folder)}` makes it"
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be written; allowed: a file in an existing directory{make}"
        )
    return path


def by_rank(parse: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """Return a parser of one value for all ranks, or of ``0:4GiB,1-3:2GiB``, from which it takes this
    process's.

    Args:
        parse: parse one value.
    """

    def read(text: str) -> _Value:
        parts = [_OF_RANKS.fullmatch(part.strip()) for part in text.split(",")]
        if parts[0] is None:
            return parse(text)
        rank = this_rank()
        if rank is None:
            raise argparse.ArgumentTypeError(
                f"{text!r} is by rank, and this process has no rank; allowed: one value, or a launcher "
                "in front (torchrun ... -m backstash run ...)"
            )
        for part in parts:
            if part is None:
                raise argparse.ArgumentTypeError(
                    f"{text!r} has values with and without a rank; allowed: RANK:VALUE or "
                    "FIRST-LAST:VALUE, with commas between"
                )
            if int(part[1]) <= rank <= int(part[2] or part[1]):
                return parse(part[3])
        raise argparse.ArgumentTypeError(f"{text!r} has nothing for rank {rank}")

    return read


def recompute_option(parser: Parser) -> None:
    """Add the option ``--recompute PATTERN``, which may be repeated."""
    parser.add_argument(
        "--recompute",
        metavar="PATTERN",
        action="append",
        default=[],
        help="modules whose operations may be called again in backward, by path: 'model.layers.*'; as many are "
        "as pay within the budget, and without one all. 'off': nothing is recomputed",
    )
