"""Processes that a test starts and that must not outlive it."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def child(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process that is killed where it runs at the end, for which ``with subprocess.Popen(...)`` waits.

    So that a test that is ended by its time limit does not wait there for ever.
    """
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()
