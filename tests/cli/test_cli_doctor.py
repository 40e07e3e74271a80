"""`backstash doctor`: the figures are there, the line it gives can be pasted, nothing is left."""

import json
from pathlib import Path
from typing import Any

import pytest

import allocators
from backstash import Stash
from backstash.cli import main
from backstash.cli._allocator import find
from backstash.cli._disk_speed import has_unnamed_files, measure
from backstash.cli.doctor import remarks, start

GIB = 1 << 30


def facts(**changed: Any) -> dict[str, Any]:
    return {
        "directory": "/scratch",
        "file_system": "ext4",
        "machine": {"available_bytes": 8 * GIB, "huge_pages": "madvise"},
        "spare_bytes": None,
        "accelerator": "",
        "allocator": {"kind": "tcmalloc"},
        "allocators": ["tcmalloc"],
        "disk": {"write_bytes_per_second": 3e9, "read_bytes_per_second": 3e9, "notes": ()},
    } | changed


def test_it_measures_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path), "--bytes", "32MiB"]) == 0
    output = capsys.readouterr().out
    for word in ("write", "read", "direct I/O", "memory", "versions", "allocator", "GB/s"):
        assert word in output
    line = next(line for line in output.splitlines() if line.startswith("Stash("))
    eval(line, {"Stash": Stash}).close()
    assert "backstash run --budget" in output
    assert list(tmp_path.iterdir()) == []


def test_every_allocator_that_can_be_had_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """By ``benchmarks/allocators.py``."""
    seconds = allocators.measure(find(), 32 << 20)
    assert set(seconds) == {*find(), "glibc", "none"}
    assert all(taken > 0 for taken in seconds.values())
    assert list(seconds.values()) == sorted(seconds.values())
    monkeypatch.setenv("LD_PRELOAD", "/lib/libjemalloc.so.2")
    assert allocators.measure({}) == {}


def test_json_has_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path), "--bytes", "16MiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["disk"]["nbytes"] == 16 << 20
    assert found["disk"]["read_bytes_per_second"] > 0
    assert found["advice"].startswith("Stash(budget=")
    assert found["machine"]["memory_bytes"] > 0


def test_small_sizes_are_rounded_up(tmp_path: Path) -> None:
    speed = measure(str(tmp_path), 1)
    assert speed.nbytes == 16 << 20
    assert speed.unnamed == has_unnamed_files(str(tmp_path))
    assert not has_unnamed_files(str(tmp_path / "missing"))


@pytest.mark.parametrize("where", ["missing", "file"])
def test_a_directory_that_is_none_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    (tmp_path / "file").touch()
    assert main(["doctor", str(tmp_path / where)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "allowed: an existing, writable directory" in error


def test_the_line_has_a_budget_of_what_is_left_less_a_twentieth() -> None:
    assert start(facts())[0].code == 'Stash(budget="7GiB", disk="/scratch")'
    assert start(facts(spare_bytes=GIB))[0].code == 'Stash(budget="972MiB", disk="/scratch")'
    assert start(facts(spare_bytes=0))[0].code == 'Stash(budget="auto", disk="/scratch")'
    assert start(facts())[1].code == "backstash run --budget 7GiB --disk /scratch SCRIPT"
    line, command = start(facts(accelerator="1 x cuda"))
    assert line.code == 'Stash(budget="auto", host="4GiB", disk="/scratch")'
    assert command.code == "backstash run --budget auto --host 4GiB --disk /scratch SCRIPT"
    assert remarks(facts()) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"file_system": "tmpfs"}, "give a directory on a disk"),
        ({"allocators": ["jemalloc"]}, "libtcmalloc-minimal4"),
        ({"machine": {"available_bytes": GIB, "huge_pages": "never"}}, "huge pages are off"),
        (
            {"disk": {"write_bytes_per_second": 1e8, "read_bytes_per_second": 3e9, "notes": ()}},
            "This disk moves 0.10 GB/s",
        ),
        (
            {
                "disk": {
                    "write_bytes_per_second": 3e9,
                    "read_bytes_per_second": 3e9,
                    "notes": ("x",),
                }
            },
            "x",
        ),
    ],
)
def test_it_remarks_what_would_help(changed: dict[str, Any], words: str) -> None:
    assert any(words in remark for remark in remarks(facts(**changed)))
