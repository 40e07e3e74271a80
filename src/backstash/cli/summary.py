"""``backstash summary``: show the ranks of a job side by side, from the files that each has written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..launcher import Job, numbers
from ._arguments import Parser
from ._job_summary import job_summary
from ._rank_files import ran_together, read
from ._summary import summary

__all__ = ["main"]

_USAGE = "backstash summary [OPTION ...] FILE ..."
_DESCRIPTION = """\
Print one summary of the ranks of a job, from the files that they have written: whose peak is the largest,
which is the slowest, and a line for each. `backstash run --json run.json` under a launcher writes
run.rank0.json, run.rank1.json, ... Files of ranks on several machines may be given together. Of one
file alone the summary of that process is printed.
"""
_EXAMPLES = """\
examples:
  torchrun --nproc-per-node 8 -m backstash run --json run.json --disk /scratch train.py
  backstash summary run.rank*.json
      the eight ranks side by side
  backstash summary --verbose run.rank3.json
      all figures of one rank

questions:
  A rank is missing?  It was killed, or had not imported torch when it ended: then it has written no file.
"""
_ALLOWED = "files that `backstash run --json` wrote"


def main(arguments: Sequence[str]) -> int:
    """Print the summary and return 0; 2 after one line on stderr for files that cannot be used."""
    parser = Parser("backstash summary", _DESCRIPTION, _EXAMPLES, _USAGE)
    parser.add_argument(
        "files", metavar="FILE", nargs="*", help="written by `backstash run --json`"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="print what stayed in memory and all notes as well"
    )
    options = parser.read(arguments)
    found = _read(parser, list(dict.fromkeys(options.files)))
    if len(found) == 1:
        (figures,) = found.values()
        print(summary(figures, label=Job(**figures["job"]).label, verbose=options.verbose))
        return 0
    print(job_summary(found, verbose=options.verbose))
    for note in _notes(found):
        print(f"backstash: note: {note}")
    return 0


def _read(parser: Parser, files: list[str]) -> dict[int, dict[str, Any]]:
    """Return, by rank and in order, the figures in ``files``, which must be from one job."""
    if not files:
        parser.error("no file given; for example `backstash summary run.rank*.json`")
    found: dict[int, dict[str, Any]] = {}
    names: dict[int, str] = {}
    for file in files:
        try:
            figures = read(file)
        except OSError as error:
            parser.error(f"{file!r} cannot be read: {error.strerror}; allowed: {_ALLOWED}")
        except ValueError as error:
            parser.error(f"{file!r} {error}; allowed: {_ALLOWED}")
        rank, processes = figures["job"]["rank"], figures["job"]["processes"]
        if rank in found:
            parser.error(
                f"{names[rank]!r} and {file!r} are both of rank {rank}; allowed: one file for each rank"
            )
        found[rank], names[rank] = figures, file
        first = next(iter(found))
        if processes != (expected := found[first]["job"]["processes"]):
            parser.error(
                f"{names[first]!r} is of a job of {expected} processes, and {file!r} of one of {processes}; "
                "allowed: files of one job"
            )
    return dict(sorted(found.items()))


def _notes(found: dict[int, dict[str, Any]]) -> list[str]:
    """Return which ranks have no file, and whose file seems to be from another run."""
    notes = []
    processes = next(iter(found.values()))["job"]["processes"]
    if missing := [rank for rank in range(processes) if rank not in found]:
        notes.append(
            f"no file of rank{'s'[: len(missing) > 1]} {numbers(missing)} was given; a rank that is killed "
            "writes none"
        )
    last = max(found, key=lambda rank: float(found[rank]["ended_unix_seconds"]))
    old = [rank for rank in found if not ran_together(found[rank], found[last])]
    if old:
        notes.append(
            f"rank{'s'[: len(old) > 1]} {numbers(old)} ended before rank {last} began: an earlier run's?"
        )
    return notes
