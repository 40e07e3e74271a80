"""Start the interpreter that runs a script, with a plan of what to do around it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ._arguments import Parser

__all__ = ["interpreter_options", "replace_process", "split"]

_SCRIPT = Path(__file__).with_name("_script.py")
_PLAN_VARIABLE = "BACKSTASH_RUN"


def split(parser: Parser, arguments: list[str]) -> tuple[list[str], bool, list[str]]:
    """Split a command line into the command's own options and the script.

    Returns:
        The command's options; whether ``-m`` was given; the script or module, and its arguments.
    """
    at = 0
    while (
        at < len(arguments)
        and arguments[at].startswith("-")
        and arguments[at] not in ("-m", "--", "-")
    ):
        at += 2 if parser.takes_value(arguments[at]) else 1
    own, rest = arguments[:at], arguments[at:]
    is_module = rest[:1] == ["-m"]
    return own, is_module, rest[1:] if rest[:1] in (["-m"], ["--"]) else rest


def replace_process(
    plan: dict[str, Any], arguments: list[str], variables: Mapping[str, str]
) -> NoReturn:
    """Replace this process by an interpreter that runs ``_script.py`` with ``plan``.

    Args:
        plan: plain values. ``target`` and ``is_module`` say what to run. ``session`` names the module
            beside this one whose ``Session`` is made from the plan once torch has been imported.
        arguments: the script's own arguments.
        variables: added to the environment.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    plan = {**plan, "root": str(Path(__file__).resolve().parents[2])}
    command = [sys.executable, *interpreter_options(sys.orig_argv[1:]), str(_SCRIPT), *arguments]
    environ = {**os.environ, **variables, _PLAN_VARIABLE: json.dumps(plan)}
    os.execve(sys.executable, command, environ)


def interpreter_options(arguments: Sequence[str]) -> list[str]:
    """The options of ``python`` itself, among the arguments that the interpreter was started with."""
    options = []
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-") or argument.startswith(("-m", "-c")) or argument == "-":
            break
        options.append(argument)
        if argument in ("-X", "-W", "--check-hash-based-pycs"):
            options.append(next(rest, ""))
    return options
