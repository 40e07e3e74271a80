"""The stash that a script runs under, from the script's import of torch to the script's end."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import torch

from .. import Disk, Stash
from ._allocator import is_loaded
from ._machine import machine, versions
from ._resident import resident_bytes, resident_peak_bytes
from ._summary import Resident, outcome, summary

__all__ = ["Session"]


class Session:
    """A stash, entered. Its figures are printed and written when the script has ended.

    Args:
        plan: what ``backstash run`` was asked for, as plain values.

    Raises:
        StashError: the directory or a size cannot be used.
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        torch.empty(1)  # torch reads THP_MEM_ALLOC_ENABLE at its first allocation, and then no more
        self._plan = plan
        self._notes = list(_notes(plan["allocator"]["kind"]))
        self._started = time.perf_counter()
        self._resident_start_bytes = resident_bytes()
        disk = plan["disk"]
        self._stash = Stash(
            keep=plan["keep"],
            host=plan["host"],
            disk=None if disk is None else Disk(disk, max_bytes=plan["max_bytes"]),
            min_bytes=plan["min_bytes"],
            inflight=plan["inflight"],
            prefetch=plan["prefetch"],
            name="backstash run",
        )
        self._stash.__enter__()

    def end(self, error: BaseException | None) -> None:
        """Leave the stash; print the summary on stderr and write the JSON, as far as the plan says.

        Args:
            error: what the script raised, which is not handled here.
        """
        seconds = time.perf_counter() - self._started
        self._stash.__exit__(None, None, None)
        stats = self._stash.stats()
        if stats.saves == 0:
            self._notes.append("nothing was saved for backward in the main thread")
        figures = {
            "command": self._plan["command"],
            "outcome": outcome(error),
            "seconds": seconds,
            "stats": stats.as_dict(),
            "resident": Resident(self._resident_start_bytes, resident_peak_bytes()).as_dict(),
            "allocator": self._plan["allocator"],
            "notes": self._notes,
            "versions": versions() | {"torch": torch.__version__},
            "machine": machine().as_dict(),
        }
        if not self._plan["quiet"]:
            print(summary(figures), file=sys.stderr)
        if self._plan["json"] is not None:
            self._write(figures)

    def _write(self, figures: dict[str, Any]) -> None:
        try:
            with open(self._plan["json"], "w", encoding="utf-8") as file:
                json.dump(figures, file, indent=2)
                file.write("\n")
        except OSError as error:
            print(f"backstash run: --json: {error}", file=sys.stderr)


def _notes(allocator: str) -> list[str]:
    notes = []
    if allocator not in ("glibc", "none") and not is_loaded(allocator):
        notes.append(f"{allocator} was asked of the loader and is not in this process")
    if threading.current_thread() is not threading.main_thread():
        notes.append(
            "torch was first imported in another thread than the main one: only that thread is held"
        )
    return notes
