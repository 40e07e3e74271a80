"""The live line of `backstash run`, on a pseudo-terminal: it is drawn, and the script's output is unchanged."""

import io
import os
import pty
import re
import select
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from backstash.cli import _live
from backstash.cli._live import live_text
from backstash.cli._status_line import StatusLine
from children import child
from long_tests import takes_long

TRAIN = """
import sys, time
import torch
x = torch.randn(400, 400, requires_grad=True)
optimizer = torch.optim.SGD([x], lr=1e-3)

def train(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        optimizer.zero_grad()
        x.sin().exp().sin().sum().backward()
        optimizer.step()
        time.sleep(0.01)
"""


def on_terminal(
    tmp_path: Path, script: str, *options: str, columns: int = 100, **variables: str
) -> str:
    """What a terminal receives from `backstash run` of the script."""
    (tmp_path / "train.py").write_text(TRAIN + textwrap.dedent(script))
    command = [
        sys.executable,
        "-m",
        "backstash",
        "run",
        "--disk",
        str(tmp_path),
        *options,
        "train.py",
    ]
    ours, theirs = pty.openpty()
    environ = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(columns)} | variables
    with child(
        command, cwd=tmp_path, env=environ, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        received = b""
        while select.select([ours], [], [], 60)[0]:
            try:
                read = os.read(ours, 1 << 16)
            except OSError:  # the terminal's other side is closed
                break
            if not read:
                break
            received += read
        os.close(ours)
        assert process.wait(60) == 0, received
    return received.decode()


def screen(received: str) -> list[str]:
    """The lines that stay on a terminal; it knows what the live line uses, and refuses anything else."""
    lines, at = [""], 0
    for part in re.findall(r"\x1b\[K|\x1b\[[\d;]*m|\r|\n|[^\x1b\r\n]+|\x1b", received):
        if part == "\n":
            lines.append("")
        elif part == "\r":
            at = 0
            continue
        elif part == "\x1b[K":
            lines[-1] = lines[-1][:at]
            continue
        elif part.startswith("\x1b"):
            assert part.endswith("m"), repr(part)
            continue
        else:
            lines[-1] = lines[-1][:at] + part + lines[-1][at + len(part) :]
            at += len(part)
            continue
        at = 0
    return lines


def drawn(received: str) -> list[str]:
    """The texts of the live line, without colours."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", received)
    return re.findall(r"\r\x1b\[K(backstash  [^\r\n]*)", plain)


def test_the_line_is_drawn_and_the_script_s_output_is_unchanged(tmp_path: Path) -> None:
    received = on_terminal(
        tmp_path,
        """
        print("one")
        train(1.3)
        print("two", file=sys.stderr)
        train(0.7)
        print("three...", end="", flush=True)
        train(1.2)
        print("four")
        print(sys.stdout.isatty(), type(sys.stdout).__name__)
        """,
    )
    lines = drawn(received)
    assert any(re.search(r"step \d+ .* kept .* on disk .* waits ", line) for line in lines)
    assert all(len(line) < 100 for line in lines)
    left = [line for line in screen(received) if not line.startswith("backstash: ")]
    assert left == ["one", "two", "three...four", "True TextIOWrapper", ""]
    between = received[received.index("three...") : received.index("four")]
    assert between == "three...", "it was drawn over half a line"


@takes_long
def test_it_is_not_there_when_quiet(tmp_path: Path) -> None:
    script = """
        import threading
        train(0.7)
        print("alive", sum(t.name.startswith("backstash live") for t in threading.enumerate()))
        """
    assert on_terminal(tmp_path, script, "--quiet") == "alive 0\r\n"


@takes_long
def test_only_one_process_of_a_machine_draws_the_line(tmp_path: Path) -> None:
    """The others share its terminal, and would draw over its line."""
    of_two = {"WORLD_SIZE": "2", "RANK": "1"}
    assert drawn(on_terminal(tmp_path, "train(1.2)", **of_two, LOCAL_RANK="0"))
    assert not drawn(on_terminal(tmp_path, "train(1.2)", **of_two, LOCAL_RANK="1"))


@takes_long
def test_a_script_that_asks_is_left_in_peace(tmp_path: Path) -> None:
    received = on_terminal(
        tmp_path,
        """
        import threading, os
        train(0.8)
        threading.Timer(1.3, os._exit, [0]).start()
        input("name? ")
        """,
    )
    assert re.search(r"\r\x1b\[K(\x1b\[\?2004h)?name\? $", received)


@takes_long
def test_an_error_and_a_fork_leave_the_terminal_whole(tmp_path: Path) -> None:
    received = on_terminal(
        tmp_path,
        """
        import os, warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12's, of a fork with threads
        train(0.8)
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            print("child")
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)
        train(0.8)
        sys.exit(0)
        """,
    )
    left = [line for line in screen(received) if not line.startswith("backstash: ")]
    assert left == ["child", ""]


# Its words.


def stats(**values: float) -> SimpleNamespace:
    none = dict.fromkeys(("keep_bytes", "host_bytes", "disk_bytes"), 0)
    return SimpleNamespace(**(none | {"stall_seconds": 0.0} | values))


def test_words() -> None:
    looks = [
        stats(keep_bytes=1 << 20),
        stats(keep_bytes=1 << 10, disk_bytes=3 << 30, stall_seconds=4.0),
    ]
    moments = [(1.0, "1"), (1.5, "2"), (2.5, "3"), (3.0, "4")]
    text = live_text(looks, moments, 8, 80)
    assert text == "backstash  step 8  0.50 s  kept 1.00 MiB  on disk 3.00 GiB  waits 0.50 s"
    early = live_text([stats(host_bytes=1)], [], 0, 80)
    assert early == "backstash  kept 0 B  in host memory 1 B  on disk 0 B  waits 0.00 s"


@pytest.mark.parametrize("columns", [200, 80, 60, 40, 20, 1])
def test_it_fits(columns: int) -> None:
    looks = [stats(keep_bytes=1 << 20, host_bytes=5 << 30, disk_bytes=3 << 30, stall_seconds=4.0)]
    text = live_text(looks, [(1.0, "1"), (2.0, "2")], 2, columns)
    assert len(text) < columns and ("backstash" in text) is (columns > 10)
    assert ("step 2  1.00 s  kept 1.00 MiB" in text) is (columns > 40)
    assert ("on disk 3.00 GiB  waits 2.00 s" in text) is (columns > 80)


# The line that is shared.


class Terminal(io.StringIO):
    """A stream whose methods can be wrapped, as those of a real text stream can."""


def test_streams_are_given_back() -> None:
    stream = Terminal()
    line = StatusLine(stream, [stream, stream])
    line.show("a")
    stream.write("b\n")
    line.show("c")
    theirs = stream.write
    line.remove()
    line.remove()
    assert stream.getvalue() == "\r\x1b[Ka\r\x1b[Kb\n\r\x1b[Kc\r\x1b[K"
    assert "write" not in vars(stream) and "flush" not in vars(stream)
    theirs("d")  # who kept the wrapped method can still write
    assert stream.getvalue().endswith("d")


def test_a_wrapper_around_ours_stays() -> None:
    stream = Terminal()
    line = StatusLine(stream, [stream])
    inner = stream.write
    stream.write = lambda text: inner(text.upper())  # type: ignore[method-assign]
    line.remove()
    stream.write("loud")
    assert stream.getvalue() == "LOUD"


def test_threads_may_write_at_once() -> None:
    stream = Terminal()
    line = StatusLine(stream, [stream])

    def write() -> None:
        for _ in range(200):
            stream.write("x\n")

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        line.show("line")
    for thread in threads:
        thread.join()
    line.remove()
    assert screen(stream.getvalue()) == ["x"] * 600 + [""]


def test_a_flush_of_nothing_is_the_beginning_of_a_question() -> None:
    stream = Terminal()
    line = StatusLine(stream, [stream])
    stream.write("x\n")
    stream.flush()
    line.show("a")
    stream.flush()
    line.show("b")  # may be due to what went before the question
    line.show("c")
    line.remove()
    assert stream.getvalue() == "x\n\r\x1b[Ka\r\x1b[K\r\x1b[Kc\r\x1b[K"


def test_what_is_no_terminal_or_cannot_clear_a_line_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(theirs, "w") as terminal:
        for stream, suits in ((terminal, True), (Terminal(), False), (None, False)):
            monkeypatch.setattr(sys, "stderr", stream)
            assert _live.Live.suits() is suits
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "dumb")
        assert not _live.Live.suits()
    assert not _live.Live.suits()
    os.close(ours)
