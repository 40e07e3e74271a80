"""The command ``backstash bench``: its options, what it measures, and the file and table it writes."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backstash.cli._arguments import Parser, directory
from backstash.cli._disk_speed import measure
from backstash.cli._machine import machine, versions
from backstash.errors import SizeError
from backstash.scratch import file_system
from backstash.units import parse_bytes

from ._gradients import gradients
from ._limit import limit, limits
from ._progress import progress
from ._small import alive, overhead
from ._step import step
from ._table import table
from ._variants import DEFAULT, VARIANTS

__all__ = ["main"]

_KINDS = ("gpt", "llama", "resnet", "unet", "overhead", "alive", "limit", "limits", "gradients")
_DISK_BYTES = 256 << 20  # written and read to say how fast the disk is
_USAGE = "backstash bench [OPTION ...] [WHAT ...]"
_DESCRIPTION = """\
Measure what training costs with a stash and with the alternatives. All variants run in turn, then all
of them again. Each run is a process of its own, so that its peak memory is the operating system's
figure. Prints a markdown table; --out writes every figure to a file.

WHAT is one or more of:
  gpt       a step of 12 transformer blocks: time, resident peak, gradients compared to the bit
  llama     the same for 12 blocks as in Llama
  resnet    the same for a ResNet of Bottlenecks
  unet      the same for a U-Net
  overhead  the cost of each save, in a chain of 10,000 operations that save small tensors
  alive     the cost of a pack and an unpack while up to a million saved tensors are alive
  limit     training in a control group with half the memory that a step saves
  limits    the same with a third to a sixth of it
  gradients the peak memory when each gradient is freed as soon as its parameter is updated
Without WHAT, all of them. An accelerator has a benchmark of its own (--device), in a clone of the
repository only.
"""
_VARIANTS = "\n".join(
    f"  {variant.key:<20} {variant.title.replace('`', '')}" for variant in VARIANTS.values()
)
_EXAMPLES = f"""\
examples:
  backstash bench gpt --disk /scratch --repeats 5 --out gpt.json
  backstash bench gpt --only plain,stash,run
  backstash bench --table gpt.json

variants of the models, for --only:
{_VARIANTS}
"""


def main(arguments: Sequence[str]) -> int:
    """Measure, or draw the table of an earlier measurement.

    Returns:
        0; 1 where plain PyTorch itself failed, so that there is nothing to compare with.

    Raises:
        UsageError: an accelerator's benchmark was asked for, and the package does not run from a checkout.
    """
    parser = _parser()
    options = parser.read(arguments)
    if options.table is not None:
        return _print(_read(parser, options.table))
    _check_device(parser, options)
    for what in options.what:
        if what not in _KINDS:
            parser.error(f"unknown benchmark {what!r}; allowed: {', '.join(_KINDS)}")
    with progress() as say:
        results = _measure(options, list(arguments), say)
    _save(options, results)
    return _print(results)


def _save(options: argparse.Namespace, results: dict[str, Any]) -> None:
    if options.out is None:
        return
    # Replaced in one step: a run that is cut off leaves the last whole file.
    part = options.out.with_name(options.out.name + ".part")
    part.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    part.replace(options.out)


def _print(results: dict[str, Any]) -> int:
    try:
        print(table(results))
    except LookupError as error:
        print(f"backstash bench: {error.args[0]}", file=sys.stderr)
        return 1
    return 0


def _parser() -> Parser:
    parser = Parser("backstash bench", _DESCRIPTION, _EXAMPLES, _USAGE)
    add = parser.add_argument
    add("what", metavar="WHAT", nargs="*", help=f"of {', '.join(_KINDS)} (default all)")
    add(
        "--disk",
        metavar="DIR",
        type=directory,
        help="directory for files (default a temporary one)",
    )
    add("--repeats", metavar="N", type=_count, default=3, help="processes of each variant (3)")
    add("--steps", metavar="N", type=_count, default=3, help="steps timed in each process (3)")
    add(
        "--device",
        metavar="DEVICE",
        help="measure an accelerator (cuda) instead, within --seconds; in a clone of the repository only",
    )
    add(
        "--seconds",
        metavar="N",
        type=_count,
        default=590,
        help="end after N seconds, with what was measured until then; with --device only (590)",
    )
    add(
        "--host",
        metavar="SIZE",
        type=_size,
        help="pinned host memory for stashes; with --device only (three quarters of the memory to spare)",
    )
    add(
        "--only",
        metavar="KEY,...",
        type=_variants,
        default=DEFAULT,
        help="these variants, and plain (default: those in README)",
    )
    add(
        "--tiny",
        action="store_true",
        help="seconds instead of minutes, for tests; the figures mean nothing",
    )
    add("--out", metavar="FILE", type=Path, help="write all figures to FILE as JSON")
    add(
        "--table", metavar="FILE", type=Path, help="print the table of such a FILE, measure nothing"
    )
    return parser


def _check_device(parser: Parser, options: argparse.Namespace) -> None:
    if options.device is None:
        return
    if options.what:
        parser.error(f"--device measures a set of its own; leave out {options.what[0]!r}")
    import torch  # here, so that --help and a wrong option do not wait for it

    accelerator = torch.accelerator.current_accelerator()
    there = accelerator.type if accelerator is not None and torch.accelerator.is_available() else ""
    if options.device.partition(":")[0] != there and not (options.device == "cpu" and options.tiny):
        parser.error(
            f"--device {options.device}: PyTorch finds {there or 'no accelerator'} on this machine"
        )


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: a whole number of at least 1")
    return int(text)


def _size(text: str) -> int:
    try:
        return parse_bytes(text, name="host")
    except SizeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _read(parser: Parser, path: Path) -> dict[str, Any]:
    try:
        results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        parser.error(f"--table {path}: {error}; allowed: a file that --out wrote")
    return results


def _variants(text: str) -> tuple[str, ...]:
    chosen = tuple(word.strip() for word in text.split(",") if word.strip())
    for word in chosen:
        if word not in VARIANTS:
            raise argparse.ArgumentTypeError(f"{word!r}; allowed: {', '.join(VARIANTS)}")
    return chosen


def _measure(
    options: argparse.Namespace, arguments: list[str], say: Callable[[str], None]
) -> dict[str, Any]:
    results: dict[str, Any] = {
        "command": _command(arguments),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine().as_dict(),
        "versions": versions(),
    }
    with tempfile.TemporaryDirectory(prefix="backstash-bench-", dir=options.disk) as where:
        results["file_system"] = file_system(where)
        if options.device is not None:
            from device.benchmark import device_benchmark  # which needs torch

            disk = measure(where, _DISK_BYTES)
            results["disk"] = asdict(disk)
            sections = [
                device_benchmark(
                    options.device,
                    repeats=options.repeats,
                    steps=options.steps,
                    directory=where,
                    tiny=options.tiny,
                    say=say,
                    seconds=options.seconds,
                    host=options.host,
                    save=lambda section: _save(options, results | {"sections": [section]}),
                )
            ]
        else:
            sections = [_section(what, options, where, say) for what in options.what or _KINDS]
            results["disk"] = asdict(measure(where, _DISK_BYTES))
    return results | {"sections": sections}


def _section(
    what: str, options: argparse.Namespace, where: str, say: Callable[[str], None]
) -> dict[str, Any]:
    common: dict[str, Any] = {"directory": where, "tiny": options.tiny, "say": say}
    if what == "overhead":
        return overhead(repeats=options.repeats, **common)
    if what == "gradients":
        return gradients(repeats=options.repeats, **common)
    if what == "alive":
        return alive(**common)
    if what == "limit":
        return limit(**common)
    if what == "limits":
        return limits(**common)
    keys = tuple(dict.fromkeys(("plain", *options.only)))  # the others are compared with plain
    return step(what, keys, repeats=options.repeats, steps=options.steps, **common)


def _command(arguments: list[str]) -> str:
    """The command as it was given, without the names of directories."""
    words = ["backstash", "bench"]
    rest = iter(arguments)
    for argument in rest:
        option, separator, value = argument.partition("=")
        if option not in ("--disk", "--out"):
            words.append(argument)
            continue
        value = value if separator else next(rest, "")
        words += [option, "DIR" if option == "--disk" else Path(value).name]
    return shlex.join(words)
