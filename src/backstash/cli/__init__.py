"""The command line: ``backstash run``, ``summary``, ``profile``, ``plan``, ``doctor`` and ``bench``.

Each command is a module that is imported only when it runs, so that ``--help`` does not wait for torch.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

__all__ = ["main"]

_COMMANDS = {
    "run": "a training script, unmodified, under a stash",
    "summary": "the ranks of a job side by side, from the files that `run --json` wrote",
    "profile": "what a training script saves for backward, and what each budget would cost",
    "plan": "what each budget for a training script's memory would cost, from a few real steps",
    "doctor": "what this machine offers, and the Stash(...) line that suits it",
    "bench": "step time and memory compared with the alternatives, measured here",
}
_OPTIONS = ("-h", "--help", "-V", "--version")

_HELP = """\
usage: backstash COMMAND [OPTION ...]

What PyTorch saves for backward, kept within a memory budget: in place, then on disk,
with gradients exact to the last bit.

commands:
{commands}

options:
  -h, --help     this text; `backstash COMMAND --help` is about one command
  -V, --version  the versions of backstash, torch and python

examples:
  backstash doctor /scratch                   is this disk fast enough, and what should I write?
  backstash profile train.py                  what does it save, and which budget suits it?
  backstash plan train.py                     what would each budget for its memory cost?
  backstash run --budget 6GiB train.py        run train.py within 6 GiB of memory
  backstash run --disk /scratch train.py      run train.py with its saved tensors on disk
  backstash summary run.rank*.json            the ranks of a job side by side
  backstash run --keep 2GiB --disk /scratch -m package.train --epochs 3
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: the arguments after the program's name; ``None`` takes them from ``sys.argv``.

    Returns:
        0, or the command's own status; 2 after one line on stderr for arguments that cannot be used.
        ``backstash run``, ``profile`` and ``plan`` do not return: they replace the process by the interpreter
        that runs the script.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "--help"
    if command == "help" and len(arguments) > 1:
        command, arguments = arguments[1], [arguments[1], "--help"]
    if command in ("-h", "--help", "help"):
        print(_help(), end="")
        return 0 if arguments else 2
    if command in ("-V", "--version"):
        print(_versions())
        return 0
    if command not in _COMMANDS:
        print(f"backstash: {_unknown(arguments)}", file=sys.stderr)
        return 2
    # torch warns where NumPy is not installed, and no command uses it.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    from ..errors import StashError

    try:
        status = import_module(f".{command}", __name__).main(arguments[1:])
    except StashError as error:
        print(f"backstash {command}: {error}", file=sys.stderr)
        return 2
    except SystemExit as request:
        status = request.code
    return status if isinstance(status, int) else 0


def _unknown(arguments: list[str]) -> str:
    """Return what is wrong with a first word that is not a command, and what to type instead."""
    import os
    import shlex

    from ._arguments import alike

    word, *rest = arguments
    said = f"unknown command {word!r}; "
    if meant := alike(word, [*_COMMANDS, *_OPTIONS, "help"]):
        said += f"did you mean `{shlex.join(['backstash', meant, *rest])}`? "
    elif os.path.isfile(word) or word.startswith("-"):
        said += f"a command comes first: `{shlex.join(['backstash', 'run', *arguments])}`; "
    else:
        said += "`backstash --help` says what each does; "
    return f"{said}allowed: {', '.join(_COMMANDS)}"


def _help() -> str:
    commands = "\n".join(f"  {name:<10}  {what}" for name, what in _COMMANDS.items())
    return _HELP.format(commands=commands)


def _versions() -> str:
    from ._machine import versions

    return ", ".join(f"{name} {version}" for name, version in versions().items() if version)
