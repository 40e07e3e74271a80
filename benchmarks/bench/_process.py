"""Starting the benchmark's processes, each with the allocator of its variant."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backstash.cli._allocator import choose, find

from ._variants import Variant

__all__ = ["Ended", "allocator_of", "python", "step_process"]

_BENCHMARKS = Path(__file__).resolve().parent.parent  # which the workers import this package from
_STEP_WORKER = "bench._step_worker"
_INHERITED_NOT = ("LD_PRELOAD", "GLIBC_TUNABLES", "THP_MEM_ALLOC_ENABLE")


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that has ended."""

    status: int
    """Its exit status; negative: the signal that killed it."""
    result: dict[str, Any]
    """The JSON on the last line of its output; empty where there is none."""
    error: str
    """The last line of its stderr."""


def python(
    arguments: Sequence[str],
    variables: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Ended:
    """Run this interpreter with ``arguments`` and wait for its end.

    Args:
        arguments: what follows ``python``.
        variables: added to an environment in which no allocator is chosen.
        prefix: a command that runs another command, put in front.
    """
    environ = {name: value for name, value in os.environ.items() if not _chooses_memory(name)}
    paths = [str(_BENCHMARKS), *filter(None, [environ.get("PYTHONPATH")])]
    environ["PYTHONPATH"] = os.pathsep.join(paths)
    command = [*prefix, sys.executable, *arguments]
    done = subprocess.run(
        command, env=environ | dict(variables or {}), capture_output=True, text=True, check=False
    )
    return Ended(done.returncode, _last_json(done.stdout), _last_line(done.stderr))


def _chooses_memory(name: str) -> bool:
    return name in _INHERITED_NOT or name.startswith(("MALLOC_", "TCMALLOC_"))


def step_process(variant: Variant, task: dict[str, Any], prefix: Sequence[str] = ()) -> Ended:
    """Run one variant of the step benchmark; the stash's figures are in ``result["stats"]``.

    Args:
        variant: what to run.
        task: the worker's task; the variant's ``way`` is added to it.
        prefix: a command that runs another command, put in front.
    """
    words = json.dumps(task | {"way": variant.way})
    if not variant.launched:
        variables = allocator_of(variant).environment
        return python(["-m", _STEP_WORKER, words], variables, prefix)
    with tempfile.TemporaryDirectory(prefix="backstash-bench-") as directory:
        figures = os.path.join(directory, "run.json")
        options = ["--disk", task["directory"], "--min-bytes", str(task["min_bytes"])]
        options += ["--malloc", variant.malloc, "--json", figures, "--quiet"]
        command = ["-m", "backstash", "run", *options, "-m", _STEP_WORKER, words]
        ended = python(command, None, prefix)
        if ended.result and os.path.exists(figures):
            with open(figures, encoding="utf-8") as file:
                ended.result["stats"] = json.load(file)["stats"]
    return ended


def allocator_of(variant: Variant) -> Any:
    """The allocator that the variant's process gets. Raises ``LookupError`` where it is missing."""
    environ = {name: value for name, value in os.environ.items() if not _chooses_memory(name)}
    return choose(variant.malloc, environ, find())


def _last_json(output: str) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(_last_line(output))
    except ValueError:
        return {}
    return result


def _last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return lines[-1] if lines else ""
