"""``backstash run``: an unmodified training script under a stash."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..launcher import Job
from ._allocator import CHOICES, choose, find
from ._arguments import (
    Parser,
    by_rank,
    directory,
    new_file,
    recompute_option,
    scratch_directory,
    size,
)
from ._launch import Script, check, read, replace_process
from ._rank_files import read as read_figures
from ._say import say

__all__ = ["main"]

_NOT_GIVEN = object()
_COMPARED = ("command", "resident", "stats", "steps", "devices")  # of another run
# Options that hardly any script has, and that users often write after it.
_OFTEN_MISPLACED = (
    "--budget",
    "--keep",
    "--host",
    "--disk",
    "--max-bytes",
    "--save-plan",
    "--malloc",
)
_USAGE = "backstash run [OPTION ...] (SCRIPT | -m MODULE) [ARG ...]"
_DESCRIPTION = """\
Run a Python training script, unmodified, with what autograd saves for backward held within a memory
budget. Gradients are the same to the last bit. The script's arguments, exit status, signals and
tracebacks are its own. On a terminal a line shows what is held. At the end three lines follow on
stderr: the peak and the budget, what a step took and moved, and what to do next (--verbose adds all
other figures). Where the script failed it is one line.

Options come before SCRIPT; all that follows SCRIPT belongs to it. A SIZE is bytes, or has a unit:
512MiB, 2GB. The stash holds what the script's forward passes save, in all its threads. Processes
that the script starts run under plain Python. Put a launcher in front (torchrun ... -m backstash run
... SCRIPT): each of its processes then has these budgets for itself. --json, --report and --save-plan
write a file for each rank (run.rank0.json). With --json the last rank of a machine prints one summary of
all; so does `backstash summary run.rank*.json` at any time. --budget, --keep, --host, --disk and
--max-bytes may differ by rank: --keep 0:4GiB,1-3:2GiB.
"""
_EXAMPLES = """\
examples:
  backstash run train.py
      within what the machine can spare: what fits stays in memory, and the rest goes to a disk
  backstash run --budget 6GiB --disk /scratch train.py
      the process holds 6 GiB at most; what is moved for it is planned from three measured steps
  backstash run --disk /scratch train.py --epochs 3
      what can move goes to an unnamed file in /scratch, in steps that save more than 96 MiB
  backstash run --keep 2GiB --disk /scratch train.py
      the newest 2 GiB stay in memory, older tensors go to disk
  backstash run --disk . --json run.json --quiet -m package.train
      no summary; the figures as JSON
  backstash run --keep unlimited --json plain.json train.py
  backstash run --disk /scratch --compare plain.json --report out.html train.py
      once with everything in memory, once on disk, and a page that compares the two
  torchrun --nproc-per-node 8 -m backstash run --host auto --disk /scratch train.py
      eight processes; "auto" is a share of the machine's memory for each

questions:
  Is my disk fast enough?  `backstash doctor /scratch` measures it.
  What is left on it?      Nothing: the file has no name and goes with the process, however it ends.
  What if it is full?      Tensors that do not fit stay in memory, and one warning says so.
  How much to keep?        As much as you can spare. Backward needs the newest tensors first, and what
                           stays in memory need not be read back.
  What does --report cost? The first 5 optimizer steps are recorded, which takes some memory and
                           time (benchmarks/recording_overhead.py); later steps cost nothing.
  Which allocator?         tcmalloc where it is installed, which reuses the memory of freed tensors. Else
                           the process's own: once 256 MiB were moved, glibc is set to do so, too.
                           `backstash doctor` compares those that are installed.
"""


def main(arguments: Sequence[str]) -> int:
    """Check the arguments, then replace this process by the interpreter that runs the script.

    Returns:
        2 after one line on stderr if the arguments cannot be used. Otherwise it does not return.
    """
    parser = _parser()
    options, script = read(parser, arguments)
    check(parser, script)
    _check(parser, options)
    if not options.quiet:
        _note_misplaced(script)
    try:
        allocator = choose(options.malloc, os.environ, find())
    except LookupError as error:
        parser.error(str(error.args[0]))
    plan = vars(options) | {"job": asdict(Job.now()), "allocator": asdict(allocator)}
    replace_process(plan, script, "_session.RunSession", allocator.environment)


def _note_misplaced(script: Script) -> None:
    """Warn about options of ours that came after SCRIPT."""
    target, *rest = script.words
    names = [word.partition("=")[0] for word in rest]
    if found := " and ".join(name for name in names if name in _OFTEN_MISPLACED):
        say(
            f"backstash: note: {found} after {target} goes to the script; options for backstash come before "
            f"{target}"
        )


def _parser() -> Parser:
    parser = Parser("backstash run", _DESCRIPTION, _EXAMPLES, _USAGE)
    add = parser.add_argument
    add(
        "--budget",
        metavar="SIZE",
        type=by_rank(size("auto", needs_unit=True)),
        help="the most memory at any moment of a step, of an accelerator's tensors or else of the process: a "
        "SIZE, or auto for what can be spared, which is the default where no budget is given",
    )
    add("--plan", metavar="FILE", help="follow a plan that an earlier run wrote by --save-plan")
    add(
        "--save-plan",
        metavar="FILE",
        type=new_file,
        help="write the plan that was followed to FILE",
    )
    add(
        "--strict",
        action="store_true",
        help="end the script with an error where a step exceeds a budget that cannot be kept, or three do",
    )
    recompute_option(parser)
    add(
        "--keep",
        metavar="SIZE",
        type=by_rank(size("auto", "unlimited", needs_unit=True)),
        default=_NOT_GIVEN,
        help="bytes that may stay in place: a SIZE, unlimited, or auto for half of the free memory (default: 0 "
        "with --disk or --host, but a step of the CPU that saves at most 96 MiB stays whole)",
    )
    add(
        "--host",
        metavar="SIZE",
        type=by_rank(size("auto", "unlimited")),
        help="bytes of pinned host memory for an accelerator's tensors (default auto)",
    )
    add(
        "--disk",
        metavar="DIR",
        type=by_rank(directory),
        help="an existing directory on a fast disk",
    )
    add(
        "--max-bytes",
        metavar="SIZE",
        type=by_rank(size("unlimited")),
        help="most bytes on disk at once (default unlimited)",
    )
    add(
        "--min-bytes",
        metavar="SIZE",
        type=size("auto"),
        default="auto",
        help="smaller tensors stay in place (default auto: 64KiB, or 16KiB where a budget needs it)",
    )
    for window, what in (
        ("--inflight", "most bytes being moved out of memory at once"),
        ("--prefetch", "most bytes read back before backward needs them"),
    ):
        add(
            window,
            metavar="SIZE",
            type=size("auto"),
            default="auto",
            help=f"{what}: a SIZE, or auto, an eighth of what a step saves, at most 128MiB (default auto)",
        )
    add(
        "--malloc",
        choices=CHOICES,
        default="auto",
        help="the process's memory allocator (default auto: tcmalloc, or its own)",
    )
    add("--json", metavar="FILE", type=new_file, help="write the summary's figures to FILE")
    add(
        "--report",
        metavar="OUT.html",
        type=new_file,
        help="write a page: memory over time, modules, waits, advice",
    )
    add(
        "--compare",
        metavar="FILE",
        type=_figures,
        help="compare peak memory and step time with another run, by the FILE of its --json",
    )
    add("--verbose", action="store_true", help="print all figures, not three lines of them")
    add("--quiet", action="store_true", help="print no summary and no live line")
    return parser


def _figures(text: str) -> dict[str, Any]:
    """Return the figures to compare with, from the JSON of another run."""
    try:
        found = read_figures(str(_own_file(os.path.expanduser(text))))
    except (OSError, ValueError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the figures of a run; allowed: a file that `backstash run --json` wrote"
        ) from None
    return {"file": text} | {name: found[name] for name in _COMPARED}


def _own_file(path: str) -> Path:
    """Return this rank's file if each rank of an earlier job wrote one; else the file itself."""
    own = Path(Job.now().file(path))
    return own if own.is_file() else Path(path)


def _check(parser: Parser, options: argparse.Namespace) -> None:
    """Refuse budgets that could not hold: those of missing tiers, or without a tier below."""
    options.scratch = None
    _check_planned(parser, options)
    options.leaves_small = options.keep is _NOT_GIVEN
    if options.keep is _NOT_GIVEN:
        options.keep = 0
    if options.disk is None and options.max_bytes is not None:
        parser.error("--max-bytes is for the disk; give --disk DIR as well")
    planned = options.budget is not None or options.plan is not None
    if options.disk is None and options.host is None and options.keep is not None and not planned:
        what = "nowhere to hold anything" if options.keep == 0 else "--keep alone bounds nothing"
        parser.error(
            f"{what}: give --disk DIR, for example --disk /scratch, or for the tensors of a GPU "
            "--host SIZE, for example --host 24GiB or --host auto"
        )
    options.host = "auto" if options.host is None else options.host


def _check_planned(parser: Parser, options: argparse.Namespace) -> None:
    """Check budgets and plans, and choose a directory for what moves if there is none."""
    given = [f"--{name}" for name in ("budget", "plan") if getattr(options, name) is not None]
    if options.keep is not _NOT_GIVEN:  # None is `unlimited`
        given.append("--keep")
    if len(given) > 1:
        parser.error(f"{' and '.join(given)} exclude one another; give one of them")
    if options.plan is not None:
        own = _own_file(options.plan)
        if not own.is_file():
            parser.error(
                f"--plan {options.plan}: no such file; allowed: one that --save-plan wrote"
            )
        options.plan = str(own)
    if options.strict and not {"--budget", "--plan"} & set(given):
        parser.error("--strict needs a budget; give --budget SIZE as well")
    if not given and options.disk is None and options.host is None:
        if options.recompute and "off" not in options.recompute:
            options.keep = None  # within a budget, nothing is recomputed if everything fits
        else:
            options.budget = "auto"
    if options.save_plan is not None and options.budget is None and options.plan is None:
        parser.error("--save-plan needs a budget; give --budget SIZE or --budget auto as well")
    if (options.budget is not None or options.plan is not None) and options.disk is None:
        options.disk, options.scratch = scratch_directory(parser)
