"""``backstash doctor``: what this machine offers, and the ``Stash(...)`` line that suits it."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..advice import Advice, advise
from ..memory import memory_group
from ..scratch import IN_MEMORY, file_system
from ..units import format_bytes
from ._allocator import INSTALL_HINT, choose, find
from ._arguments import Parser, directory, size
from ._disk_speed import measure
from ._machine import machine, versions
from ._say import say

__all__ = ["main", "remarks", "start"]

_DESCRIPTION = """\
Measure what this machine offers a stash: the disk under DIR (written and read for some seconds;
nothing is left on it), memory and its limits, torch, the memory allocators that are installed.
Ends with the Stash(...) line to paste.
"""
_EXAMPLES = """\
examples:
  backstash doctor /scratch
  backstash doctor /scratch --bytes 256MiB --json > machine.json

questions:
  Which directory?  One on a local disk. A directory in memory (tmpfs) saves no memory, one on a
      network is as slow as the network.
  How fast is fast enough?  A training step that saves 2 GB writes 2 GB and reads 2 GB. If the disk
      does that within the step's own time, the step takes hardly longer.
"""
_DEFAULT_BYTES = 1 << 30


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and return 0.

    Raises:
        StashIOError: the directory cannot hold the bytes to measure with.
    """
    options = _parser().read(arguments)
    facts = _facts(options)
    line, command = start(facts)
    if options.json:
        print(json.dumps(facts | {"advice": line.code, "remarks": remarks(facts)}, indent=2))
    else:
        print("\n".join([_text(facts), "", line.text, line.code, command.text, command.code]))
    return 0


def _parser() -> Parser:
    parser = Parser(
        "backstash doctor", _DESCRIPTION, _EXAMPLES, "backstash doctor [OPTION ...] [DIR]"
    )
    add = parser.add_argument
    add("directory", metavar="DIR", nargs="?", type=directory, help="where the disk tier would be")
    add(
        "--bytes",
        metavar="SIZE",
        type=size(),
        default=_DEFAULT_BYTES,
        help="most bytes to write (default 1GiB)",
    )
    add("--json", action="store_true", help="print the figures as JSON")
    return parser


def _facts(options: argparse.Namespace) -> dict[str, Any]:
    where = options.directory or tempfile.gettempdir()
    kind, free_bytes = file_system(where), _free_bytes(where)
    nbytes = min(options.bytes, free_bytes // 2)
    say(f"backstash doctor: measuring the disk under {where} with up to {format_bytes(nbytes)}")
    group, installed = memory_group(), find()
    return {
        "directory": where,
        "file_system": kind,
        "free_bytes": free_bytes,
        "machine": machine().as_dict(),
        "limit_bytes": group.limit_bytes if group else None,
        "spare_bytes": group.spare_bytes if group else None,
        "control_group_version": group.version if group else None,
        "versions": versions(),
        "accelerator": _accelerator(),
        "allocator": asdict(choose("auto", os.environ, installed)),
        "allocators": sorted(installed),
        "disk": asdict(measure(where, nbytes)),
    }


def _free_bytes(path: str) -> int:
    counts = os.statvfs(path)
    return counts.f_bavail * counts.f_frsize


def _accelerator() -> str:
    import torch

    if not torch.accelerator.is_available():
        return ""
    device = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    return f"{count} x {device.type if device else 'unknown'}"


def start(facts: dict[str, Any]) -> tuple[Advice, Advice]:
    """Return the line of code and the command that suit the machine.

    Args:
        facts: the figures that ``backstash doctor --json`` prints.
    """
    available = facts["machine"]["available_bytes"]
    spare = facts["spare_bytes"]
    memory = available if spare is None else min(available, spare)
    line, command = advise(
        "start",
        {
            "accelerator": facts["accelerator"],
            "host": _round_size(memory // 2),
            "budget": _round_size(memory - memory // 20),  # as budget="auto" leaves
            "directory": facts["directory"],
            "quoted": json.dumps(facts["directory"]),
        },
    )
    return line, command


def _round_size(nbytes: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes >= factor:
            return f"{nbytes // factor}{unit}"
    return "auto"


def remarks(facts: dict[str, Any]) -> list[str]:
    """Return what limits the figures that ``backstash doctor --json`` prints, and what would help."""
    disk = facts["disk"]
    slowest = min(disk["write_bytes_per_second"], disk["read_bytes_per_second"])
    found = advise(
        "machine",
        {
            "is_in_memory": facts["file_system"] in IN_MEMORY,
            "bytes_per_second": slowest,
            "gigabytes_per_second": slowest / 1e9,
            "allocators": facts["allocators"],
            "install": INSTALL_HINT,
            "huge_pages": facts["machine"]["huge_pages"],
        },
    )
    return [*disk["notes"], *(f"{each.text} {each.code}".rstrip() for each in found)]


def _text(facts: dict[str, Any]) -> str:
    machine_, disk = facts["machine"], facts["disk"]
    limit = facts["limit_bytes"]
    group = f"control group version {facts['control_group_version']}, limit "
    rows = {
        "directory": f"{facts['directory']} ({facts['file_system'] or 'unknown file system'}), "
        f"{format_bytes(facts['free_bytes'])} free",
        "write": f"{_speed(disk['write_bytes_per_second'])} over old bytes, "
        f"{_speed(disk['first_write_bytes_per_second'])} the first time "
        f"({format_bytes(disk['nbytes'])})",
        "read": _speed(disk["read_bytes_per_second"]),
        "direct I/O": f"{_yes(disk['direct'])}, unnamed files: {_yes(disk['unnamed'])}",
        "memory": f"{format_bytes(machine_['memory_bytes'])}, "
        f"{format_bytes(machine_['available_bytes'])} available, "
        + (group + format_bytes(limit) if limit is not None else "no control-group limit"),
        "huge pages": machine_["huge_pages"] or "none",
        "processor": f"{machine_['processor']}, {machine_['cores']} cores",
        "system": f"{machine_['kernel']}, {machine_['libc'] or 'unknown C library'}",
        "versions": ", ".join(f"{name} {text}" for name, text in facts["versions"].items() if text),
        "accelerator": facts["accelerator"] or "none",
        "allocator": f"{facts['allocator']['kind']} for `backstash run`: "
        f"{facts['allocator']['reason']}",
        "allocators": ", ".join(facts["allocators"]) or "none but the C library's",
    }
    lines = [f"{name:<12} {text}" for name, text in rows.items()]
    lines += [f"{'remark':<12} {remark}" for remark in remarks(facts)]
    return "\n".join(lines)


def _speed(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.2f} GB/s"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
