"""Completion: what may follow a word, and that a real bash, zsh and fish complete it."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from backstash.cli import main
from backstash.cli.completion import complete

COMMANDS = ["run", "profile", "plan", "doctor", "bench", "completion"]
PATIENCE_SECONDS = 60.0


def words(*line: str) -> list[str]:
    return [each.partition("\t")[0] for each in complete(line)]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ([""], [*COMMANDS, "help", "--help", "--version"]),
        (["p"], ["profile", "plan"]),
        (["--v"], ["--version"]),
        (["help", ""], COMMANDS),
        (["help", "d"], ["doctor"]),
        (["nonsense", ""], []),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["run", "--bud"], ["--budget"]),
        (["run", "--m"], ["--max-bytes", "--min-bytes", "--malloc"]),
        (["run", "--budget", ""], ["auto"]),
        (["run", "--keep", ""], ["auto", "unlimited"]),
        (["run", "--keep", "4"], ["4MiB", "4GiB"]),
        (["run", "--min-bytes", ""], ["auto"]),
        (["run", "--malloc", "t"], ["tcmalloc", "tbb"]),
        (["run", "--malloc=t"], ["--malloc=tcmalloc", "--malloc=tbb"]),
        (["run", "--malloc", "=", "t"], ["tcmalloc", "tbb"]),
        (["run", "--malloc", "="], ["auto", *"glibc tcmalloc jemalloc mimalloc tbb none".split()]),
        (["run", "--disk", ""], [":directories"]),
        (["run", "--json", "o"], [":files"]),
        (["run", ""], [":files"]),
        (["run", "--quiet", "tra"], [":files"]),
        (["run", "train.py", "--bud"], [":files"]),
        (["run", "-m", ""], []),
        (["run", "-m", "package", ""], [":files"]),
        (["plan", "--budget", "4GiB,6"], ["4GiB,6MiB", "4GiB,6GiB"]),
        (["doctor", ""], [":directories"]),
        (["bench", "g"], ["gpt", "gradients"]),
        (["bench", "--only", "plain,run-t"], ["plain,run-tcmalloc", "plain,run-tbb"]),
    ],
)
def test_what_may_follow(line: list[str], found: list[str]) -> None:
    assert words(*line) == found


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_that_help_has_is_completed_with_its_text(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    shown = {word.strip(",") for word in capsys.readouterr().out.split() if word[:2] == "--"}
    found = {
        name: what for name, _, what in (each.partition("\t") for each in complete([command, "--"]))
    }
    assert {"--help"} <= found.keys() <= shown
    assert all(found.values()) and not any("\n" in what for what in found.values())


def test_a_shell_s_part_says_how_it_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "--help"]) == 0
    assert 'eval "$(backstash completion bash)"' in capsys.readouterr().out
    assert main(["completion"]) == 2
    assert "`backstash completion bash`" in capsys.readouterr().err


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with the command on its path, a script, a directory, and no settings."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "backstash").write_text(f'#!/bin/sh\nexec {sys.executable} -m backstash "$@"\n')
    (programs / "backstash").chmod(0o755)
    (tmp_path / "training.py").touch()
    (tmp_path / "scratch disk").mkdir()
    return tmp_path


def environment(home: Path) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "LANG") if name in os.environ}
    path = f"{home / 'bin'}:{os.environ['PATH']}"
    return kept | {
        "HOME": str(home),
        "PATH": path,
        "TERM": "dumb",
        "PS1": "> ",
        "INPUTRC": "/dev/null",
    }


def shell(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} here; on Debian: apt install {name}")
    return found


# What is typed, and the words that the line then has.
TYPED = [
    ("backstash prof", "backstash profile"),
    ("backstash run --mallo", "backstash run --malloc"),
    ("backstash run --malloc mi", "backstash run --malloc mimalloc"),
    ("backstash run --malloc=mi", "backstash run --malloc=mimalloc"),
    ("backstash run --disk scr", "backstash run --disk scratch disk"),
    ("backstash run --disk train", "backstash run --disk train"),  # a file is no directory
    ("backstash run --quiet trai", "backstash run --quiet training.py"),
    ("backstash run training.py --data trai", "backstash run training.py --data training.py"),
]


@pytest.mark.parametrize("name", ["bash", "zsh"])
def test_a_tab_completes(name: str, home: Path) -> None:
    """A terminal is typed into: the line and a tab; then it is made the arguments of what records them."""
    recorded = home / "recorded"
    recorded.touch()
    (home / "bin" / "record").write_text(f'#!/bin/sh\necho "$*" >> {recorded}\n')
    (home / "bin" / "record").chmod(0o755)
    start = [shell(name), *{"bash": ["--norc", "--noprofile"], "zsh": ["-f"]}[name], "-i"]
    with Terminal(start, home) as terminal:
        terminal.type(f'eval "$(backstash completion {name})"; record ready\n')
        terminal.wait(recorded, 1)
        for count, (line, _) in enumerate(TYPED, start=2):
            terminal.type(f"{line}\t\x01record \x05\n")
            terminal.wait(recorded, count)
    lines = [line.rstrip("/ ") for line in recorded.read_text().splitlines()]
    assert lines == ["ready", *(line for _, line in TYPED)]


def test_fish_completes(home: Path) -> None:
    asked = [f"complete -C '{line}'; echo ==" for line, _ in TYPED]
    ran = subprocess.run(
        [
            shell("fish"),
            "--no-config",
            "-c",
            "\n".join(["backstash completion fish | source", *asked]),
        ],
        cwd=home,
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    answers = [part.strip().partition("\t")[0].rstrip("/") for part in ran.stdout.split("==\n")]
    expected = [whole.removeprefix(typed.rpartition(" ")[0]).strip() for typed, whole in TYPED]
    assert answers[:-1] == ["" if each == "train" else each for each in expected], ran.stderr


class Terminal:
    """A shell that believes that it is typed into."""

    def __init__(self, command: list[str], home: Path) -> None:
        self._master, slave = pty.openpty()
        self._running = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=home,
            env=environment(home),
            start_new_session=True,
        )
        os.close(slave)
        self._shown = b""

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self._running.kill()
        self._running.wait()
        os.close(self._master)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait(self, path: Path, lines: int) -> None:
        """Until ``path`` has so many lines; what the shell shows is taken from it meanwhile."""
        end = time.monotonic() + PATIENCE_SECONDS
        while path.read_text().count("\n") < lines:
            assert time.monotonic() < end, self._shown.decode(errors="replace")
            if select.select([self._master], [], [], 0.05)[0]:
                self._shown += os.read(self._master, 1 << 16)
