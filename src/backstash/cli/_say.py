"""Write lines to stderr, even if the script has closed it or no one reads it any more."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["say"]


def say(text: str) -> None:
    """Write ``text`` and a newline to ``sys.stderr``, or nothing if that fails.

    How the script ends must not depend on this. So no text stays in a buffer that the interpreter would fail to
    write at its end, and a closed pipe raises no signal. If the script has replaced ``sys.stderr``, the text
    goes to the ``write`` of its stream.
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
    """Block SIGPIPE: Python ignores it, but a script may have restored its default, which ends the process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    try:
        yield
    finally:
        if signal.SIGPIPE in signal.sigpending() and signal.SIGPIPE not in before:
            signal.sigwait({signal.SIGPIPE})
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
