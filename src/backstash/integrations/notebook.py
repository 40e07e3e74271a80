"""Cell magics for IPython and Jupyter: ``%load_ext backstash``.

``%%stash --keep 1GiB --disk /scratch``    run the cell under a stash
``%%saved_report [MODEL]``                 report what the cell saves, by module
"""

from __future__ import annotations

import argparse
import shlex
import tempfile
from typing import Any, NoReturn

from torch import nn

from ..errors import UsageError
from ..report import SavedReport
from ..report import saved_report as record
from ..stash import Stash

__all__ = ["Magics"]


class Magics:
    """The cell magics of one shell. This class imports nothing of IPython: it gets the shell.

    Args:
        shell: IPython's shell, as passed to ``load_ipython_extension``.
    """

    def __init__(self, shell: Any) -> None:
        self.shell = shell

    def register(self) -> None:
        """Register the magics with the shell; it may be called again."""
        for magic in (self.stash, self.saved_report):
            self.shell.register_magic_function(magic, "cell", magic.__name__)

    def stash(self, line: str, cell: str) -> Stash:
        """Run the cell under a stash, and return the stash, which shows its figures.

        ``%%stash [--keep SIZE] [--host SIZE] [--disk DIR] [--budget SIZE] [--name NAME]``

        The options are those of ``Stash``. By default ``--disk`` is the system's directory for temporary files.
        The stash is also assigned to the variable NAME, by default ``stash``. A later cell may run backward
        through a graph of this cell.
        """
        given = vars(_OPTIONS.parse_args(shlex.split(line)))
        name = given.pop("name")
        if not name.isidentifier():
            raise UsageError(f"%%stash --name {name}: allowed is the name of a variable")
        options = {option: value for option, value in given.items() if value is not None}
        held = Stash(**{"disk": tempfile.gettempdir(), **options})
        self.shell.user_ns[name] = held
        with held:
            self.shell.run_cell(cell)
        return held

    def saved_report(self, line: str, cell: str) -> SavedReport:
        """Run the cell, and return the report of what it saved for backward.

        ``%%saved_report [MODEL]``: MODEL is a variable or another expression; its modules are named by path.
        """
        model = self.shell.ev(line) if line.strip() else None
        if model is not None and not isinstance(model, nn.Module):
            raise UsageError(f"%%saved_report {line.strip()}: allowed is an nn.Module, or nothing")
        with record(model) as saved:
            self.shell.run_cell(cell)
        return saved


class _Options(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%%stash: {message}; {self.format_usage().strip()}")


_OPTIONS = _Options(prog="%%stash", add_help=False, allow_abbrev=False)
for _option in ("--keep", "--host", "--budget"):
    _OPTIONS.add_argument(_option, metavar="SIZE")
_OPTIONS.add_argument("--disk", metavar="DIR")
_OPTIONS.add_argument("--name", default="stash")
