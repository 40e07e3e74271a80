"""Lines on stderr that may come when the script has closed it, or nobody reads it any more."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["say"]


def say(text: str) -> None:
    """Write ``text`` and a newline to ``sys.stderr``, or nothing where that cannot be written to.

    How the script ends must not depend on it. So nothing is left in a buffer that the interpreter would
    fail to write at its end, and no signal comes of a pipe that nobody reads. A stream that the script has
    put in the place of its own gets the text by its ``write``.
    """
    stream = sys.stderr
    with suppress(Exception):
        if type(stream) is not io.TextIOWrapper:
            print(text, file=stream or io.StringIO())
            return
        stream.flush()
        data = f"{text}\n".encode(stream.encoding, "backslashreplace")
        with _no_signal_of_a_pipe():
            while data:
                data = data[os.write(stream.fileno(), data) :]


@contextmanager
def _no_signal_of_a_pipe() -> Iterator[None]:
    """Python ignores SIGPIPE, but a script may have given it its default, which ends the process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    try:
        yield
    finally:
        if signal.SIGPIPE in signal.sigpending() and signal.SIGPIPE not in before:
            signal.sigwait({signal.SIGPIPE})
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
