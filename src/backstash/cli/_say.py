"""Write lines to stderr, even if the script has closed it or no one reads it any more, and results to files."""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import suppress
from typing import Any

__all__ = ["say", "write"]


def say(text: str) -> None:
    """Write ``text`` and a newline to ``sys.stderr``, or nothing if that fails.

    How the script ends must not depend on this. So no text stays in a buffer that the interpreter would fail to
    write at its end. If the script has replaced ``sys.stderr``, the text goes to the ``write`` of its stream.
    """
    stream = sys.stderr
    with suppress(Exception):
        if type(stream) is not io.TextIOWrapper:
            print(text, file=stream or io.StringIO())
            return
        stream.flush()
        data = f"{text}\n".encode(stream.encoding, "backslashreplace")
        while data:
            data = data[os.write(stream.fileno(), data) :]


def write(option: str, path: str, content: str | dict[str, Any]) -> None:
    """Write text, or values as JSON, to ``path``; if that fails, print a line that names the ``option``."""
    text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        say(f"{option}: {error}")
