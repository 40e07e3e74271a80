"""``backstash profile``: what a training script's forward saves, and what it would cost to keep less of it."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence

from ._arguments import Parser, directory, new_file
from ._launch import check, read, replace_process

__all__ = ["main"]

_USAGE = "backstash profile [OPTION ...] (SCRIPT | -m MODULE) [ARG ...]"
_DESCRIPTION = """\
Run a Python training script, unmodified, for a few steps, and say what autograd saved for backward: by
module, how often, how many bytes, and what could be smaller. Then: what it would cost to keep all, half,
a tenth or nothing of it in memory. Nothing is moved.

A step ends when an optimizer has stepped. After N steps the script ends as if it had called sys.exit().
Options come before SCRIPT; all that follows SCRIPT belongs to it. Only what the main thread saves is seen.
"""
_EXAMPLES = """\
examples:
  backstash profile train.py --epochs 3
      three steps; the report and the budgets on stdout, after the script's own output
  backstash profile --steps 1 --disk /scratch train.py
      one step; budgets at the speed of the disk that /scratch is on
  backstash profile --json profile.json -m package.train
      the figures as JSON too

questions:
  How are the seconds found?   The disk is written and read for a moment, as `backstash doctor` does. They
                               are the time of the disk alone: `backstash run` moves bytes while the
                               processor computes, and waits less.
  What do I do with it?        Choose the most memory that the process may take: `backstash run --budget SIZE`,
                               or Stash(budget=SIZE, disk=DIR) around the forward pass. `backstash plan` says
                               what each size would cost.
  My script has no optimizer.  Then no step is seen: the script runs to its end, and the report is of all of it.
"""


def main(arguments: Sequence[str]) -> int:
    """Check the arguments, then replace this process by the interpreter that runs the script.

    Returns:
        2 after one line on stderr if the arguments cannot be used. Otherwise it does not return.
    """
    parser = _parser()
    options, script = read(parser, arguments)
    check(parser, script)
    options.disk = options.disk or tempfile.gettempdir()
    replace_process(vars(options), script, "_profile_session.ProfileSession")


def _parser() -> Parser:
    parser = Parser("backstash profile", _DESCRIPTION, _EXAMPLES, _USAGE)
    add = parser.add_argument
    add("--steps", metavar="N", type=_steps, default=3, help="how many steps (default 3)")
    add(
        "--disk",
        metavar="DIR",
        type=directory,
        help="a directory on the disk to measure (default: the system's temporary directory)",
    )
    add("--json", metavar="FILE", type=new_file, help="write all figures to FILE")
    add("--html", metavar="FILE", type=new_file, help="write the report as a page to FILE")
    return parser


def _steps(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of steps; allowed: 1, 2, 3, ..."
        )
    return int(text)
