"""Runs a process that prints figures as lines of JSON, and ends it at its deadline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["run_reporting"]

_LAST_LINES = 40  # kept of its output, in addition to the figures
_LAST_BYTES = 2000  # kept of its stderr


def run_reporting(
    command: Sequence[str],
    on_figure: Callable[[dict[str, Any]], None],
    seconds: float,
    variables: dict[str, str] | None = None,
) -> tuple[int, str]:
    """Run ``command`` and call ``on_figure`` with each line of its output that is JSON.

    Args:
        command: the program and its arguments.
        on_figure: called with each line as soon as it is printed.
        seconds: after so many the process and all its children are killed.
        variables: added to the environment.

    Returns:
        Its exit status (negative: the signal that ended it), and the end of its other output and its stderr.
    """
    environ = os.environ | {"PYTHONUNBUFFERED": "1"} | (variables or {})
    said: deque[str] = deque(maxlen=_LAST_LINES)
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environ,
            start_new_session=True,
        )
        timer = threading.Timer(max(0.0, seconds), _end, (process,))
        timer.start()
        output = process.stdout
        assert output is not None
        try:
            for line in output:
                if line.startswith("{"):
                    on_figure(json.loads(line))
                else:
                    said.append(line)
            process.wait()
        finally:
            timer.cancel()
            timer.join()
            _end(process)
            process.wait()
            output.close()
        errors.seek(0)
        return process.returncode, ("".join(said) + errors.read()[-_LAST_BYTES:]).strip()


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
