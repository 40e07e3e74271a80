"""``backstash plan``: what each budget would cost a training script, from a few real steps."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ._arguments import Parser, directory, new_file, recompute_option, scratch_directory, size
from ._launch import check, read, replace_process
from ._say import say

__all__ = ["main"]

_USAGE = (
    "backstash plan [OPTION ...] (SCRIPT | -m MODULE) [ARG ...]   or   backstash plan --trace FILE"
)
_DESCRIPTION = """\
Run a Python training script, unmodified, for a few steps, and say what each budget for its memory would cost:
the predicted peak and step time, and how much stays and how much moves. Twelve steps are measured, with
everything, half of it or, where the machine has memory for that, nothing moved; when that is planned for, about
two steps later, the script ends as if it had called sys.exit(). Of one that ends before, what was measured
counts, if its fourth step had begun. A step ends where an optimizer of torch.optim steps: a script that has
none runs to its end.

A step begins at the first tensor that is saved after a backward. The plan is for the tensors of an
accelerator, where the script has some there, else for the process. Options come before SCRIPT; all that follows
SCRIPT belongs to it.

--trace FILE writes the measured step. Without SCRIPT it reads the file, of this machine or of another one, and
plans for the step in it; nothing is run.
"""
_EXAMPLES = """\
examples:
  backstash plan train.py --epochs 3
      budgets between the smallest that can be kept and what everything in place takes
  backstash plan --budget 4GiB,6GiB,8GiB --disk /scratch train.py
      these budgets, at the speed of the disk that /scratch is on
  backstash plan --fake train.py
      what the tensors of a step would take, computed without their memory
  backstash plan --json plans.json --trace step.json train.py
      the figures as JSON, and the measured step
  backstash plan --trace step.json --budget 20GiB
      what this budget would cost where the step was measured
"""


def main(arguments: Sequence[str]) -> int:
    """Check the arguments, then replace this process by the interpreter that runs the script.

    Returns:
        2 after one line on stderr if the arguments cannot be used. Otherwise it does not return.
    """
    parser = _parser()
    options, script = read(parser, arguments)
    if not script.words and options.trace is not None:
        return _plan_elsewhere(parser, options)
    check(parser, script)
    if options.recompute and options.fake:
        parser.error(
            "--recompute with --fake: whether modules are recomputed is planned from real steps alone"
        )
    if options.disk is None and not options.fake:
        options.disk, why = scratch_directory(parser)
        say(f"backstash plan: {why}")
    session = "_fake_session.FakeSession" if options.fake else "_plan_session.PlanSession"
    replace_process(vars(options), script, session)


def _plan_elsewhere(parser: Parser, options: argparse.Namespace) -> int:
    """Plan for a step that was written to a file."""
    if options.disk is not None or options.fake or options.recompute:
        parser.error(
            "--trace FILE without a script reads the measured step; allowed with it: --budget and --json"
        )
    from ..errors import UsageError
    from ._plan_table import plan_for_trace

    if options.json == options.trace:
        parser.error(
            f"--json would be written over the step in {options.trace!r}; give another FILE"
        )
    try:
        plan_for_trace(vars(options))
    except UsageError as error:
        parser.error(str(error))
    return 0


def _parser() -> Parser:
    parser = Parser("backstash plan", _DESCRIPTION, _EXAMPLES, _USAGE)
    add = parser.add_argument
    add(
        "--budget",
        metavar="A,B,...",
        type=_budgets,
        action="extend",
        help="the budgets (default: five)",
    )
    add(
        "--disk",
        metavar="DIR",
        type=directory,
        help="where what moves goes to (default: the directory on a disk with the most free space)",
    )
    recompute_option(parser)
    add(
        "--fake",
        action="store_true",
        help="predict memory alone, for a model that this machine could not hold: two steps with tensors "
        "that have shapes and no memory (FakeTensorMode); loss.item() is given 1",
    )
    add("--json", metavar="FILE", type=new_file, help="write all plans to FILE")
    add(
        "--trace",
        metavar="FILE",
        type=new_file,
        help="write the measured step to FILE; without SCRIPT: plan for that in FILE",
    )
    return parser


def _budgets(text: str) -> list[int]:
    try:
        return [size(needs_unit=True)(each) for each in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
