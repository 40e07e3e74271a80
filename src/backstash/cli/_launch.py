"""Start the interpreter that runs a script, with a plan of what to do around it.

One environment variable holds the plan, with at most 128 KiB. So the script's own arguments are not in it, but
only on the command line.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ._arguments import Parser

__all__ = [
    "Script",
    "check",
    "command_of",
    "interpreter_options",
    "read",
    "replace_process",
    "script_of",
]

_SCRIPT = Path(__file__).with_name("_importlib_bootstrap.py")
_PLAN_VARIABLE = "BACKSTASH_RUN"
# torch reads it at its first allocation. The script and the processes that it starts always see the value from
# before.
_READ_LATER = ("THP_MEM_ALLOC_ENABLE",)
_LONG_WITH_VALUE = "--check-hash-based-pycs"


@dataclass(frozen=True, slots=True)
class Script:
    """The part of a command line that belongs to the script."""

    words: list[str]
    """The script or module, and its arguments; empty if there is none."""
    is_module: bool
    """Whether ``-m`` was given."""
    command: str
    """The command line as far as the script."""


def read(parser: Parser, arguments: Sequence[str]) -> tuple[argparse.Namespace, Script]:
    """Split a command line into the command's own options and the script."""
    at = 0
    while (
        at < len(arguments)
        and arguments[at].startswith("-")
        and arguments[at] not in ("-m", "--", "-")
    ):
        at += 2 if parser.takes_value(arguments[at]) else 1
    words = list(arguments[at:])
    is_module = words[:1] == ["-m"]
    if words[:1] in (["-m"], ["--"]):
        del words[0]
    before = arguments[: len(arguments) - len(words) + 1]
    command = f"{parser.prog} {shlex.join(before)}"
    return parser.read(arguments[:at]), Script(words, is_module, command)


def check(parser: Parser, script: Script) -> None:
    """Refuse a target that is not a script or module."""
    if not script.words:
        what = f"{parser.prog} {'-m package.train' if script.is_module else 'train.py'}"
        parser.error(f"no script given, as in `{what}`; allowed: {parser.usage}")
    target = script.words[0]
    if script.is_module:
        return
    allowed = "allowed: a Python file, or -m MODULE"
    if re.fullmatch(r"python[\d.]*", os.path.basename(target)):
        parser.error(
            f"leave out {target!r}: the script runs in the Python that runs backstash; {allowed}"
        )
    if not os.path.exists(target):
        launcher = f"a launcher goes in front (`torchrun ... -m {parser.prog} ... SCRIPT`)"
        parser.error(f"no script {target!r}; {allowed}; {launcher}")
    if os.path.isdir(target) and not os.path.exists(os.path.join(target, "__main__.py")):
        parser.error(f"{target!r} is a directory without a __main__.py; {allowed}")


def replace_process(
    options: Mapping[str, Any],
    script: Script,
    session: str,
    variables: Mapping[str, str] | None = None,
) -> NoReturn:
    """Replace this process by an interpreter that runs ``_importlib_bootstrap.py`` with a plan.

    Args:
        options: the command's options, as plain values.
        script: what to run.
        session: names a module of this package and its class, which gets the plan once torch has been imported:
            the options, and what :func:`command_of` and :func:`script_of` read.
        variables: added to the environment until the script starts.
    """
    for stream in (sys.stdout, sys.stderr):
        if (
            stream is not None
        ):  # a stream may be missing, or a pipe that no one reads: run the script anyway
            with suppress(OSError, ValueError):
                stream.flush()
    variables = variables or {}
    target, *arguments = script.words
    python = interpreter_options(sys.orig_argv[1:])
    plan = {
        **options,
        "session": session,
        "target": target,
        "is_module": script.is_module,
        "command": script.command,
        "restore": {name: os.environ.get(name) for name in variables},
        "read_later": {name: variables[name] for name in _READ_LATER if name in variables},
        "root": str(Path(__file__).resolve().parents[2]),
        "started": [sys.orig_argv[0], *python, *["-m"] * script.is_module, target],
    }
    command = [sys.executable, *python, str(_SCRIPT), *arguments]
    environ = {**os.environ, **variables, _PLAN_VARIABLE: json.dumps(plan)}
    os.execve(sys.executable, command, environ)


def script_of(plan: Mapping[str, Any]) -> list[str]:
    """Return the script or module with its arguments, as on the command line."""
    return [*["-m"] * plan["is_module"], plan["target"], *plan["arguments"]]


def command_of(plan: Mapping[str, Any]) -> str:
    """Return the whole command line."""
    return " ".join([plan["command"], shlex.join(plan["arguments"])]).rstrip()


def interpreter_options(arguments: Sequence[str]) -> list[str]:
    """Return the options of ``python`` itself, from the arguments that the interpreter was started with.

    They exclude ``-x``, which would skip a line of our own file, which runs instead of the script.

    >>> interpreter_options(["-um", "backstash", "run", "-v"])
    ['-u']
    """
    options = []
    rest = iter(arguments)
    for argument in rest:
        if argument.startswith("--"):
            options += [argument, *([next(rest, "")] if argument == _LONG_WITH_VALUE else ())]
            continue
        if not argument.startswith("-") or argument == "-":
            break
        flags, ends, value = _read(argument[1:])
        if flags:
            options.append(f"-{flags}")
        if ends in "mc" and ends:
            break
        if ends:
            options += [f"-{ends}{value}"] if value else [f"-{ends}", next(rest, "")]
    return options


def _read(letters: str) -> tuple[str, str, str]:
    """Split one argument: its flags; the letter that takes a value, if any; the part of that value in it."""
    at = next((at for at, letter in enumerate(letters) if letter in "cmWX"), len(letters))
    return letters[:at].replace("x", ""), letters[at : at + 1], letters[at + 1 :]
