"""Which allocator `backstash run` chooses, and what it sets to get it."""

import shutil
import sys
from pathlib import Path

import pytest

from backstash.cli._allocator import CHOICES, choose, find, is_loaded, preloaded

TCMALLOC = {"tcmalloc": "/lib/libtcmalloc_minimal.so.4"}


def test_auto_takes_tcmalloc_where_it_is_installed() -> None:
    allocator = choose("auto", {}, TCMALLOC, "glibc")
    assert (allocator.kind, allocator.library) == ("tcmalloc", TCMALLOC["tcmalloc"])
    assert dict(allocator.environment) == {
        "LD_PRELOAD": TCMALLOC["tcmalloc"],
        "THP_MEM_ALLOC_ENABLE": "1",
    }
    assert allocator.reason


def test_what_is_preloaded_already_stays_preloaded() -> None:
    environ = {"LD_PRELOAD": "/lib/libprofiler.so"}
    allocator = choose("auto", environ, TCMALLOC, "glibc")
    assert (
        allocator.environment["LD_PRELOAD"] == "/lib/libtcmalloc_minimal.so.4:/lib/libprofiler.so"
    )


def test_an_allocator_that_the_caller_preloads_is_left_alone() -> None:
    environ = {"LD_PRELOAD": "/opt/libfirst.so /opt/libjemalloc.so.2"}
    assert preloaded(environ) == "jemalloc"
    allocator = choose("auto", environ, TCMALLOC, "glibc")
    assert (allocator.kind, dict(allocator.environment)) == ("none", {})
    assert "LD_PRELOAD already has jemalloc" in allocator.reason


def test_without_tcmalloc_auto_sets_glibc_up_and_says_what_would_help() -> None:
    allocator = choose("auto", {}, {"jemalloc": "/lib/libjemalloc.so.2"}, "glibc")
    assert allocator.kind == "glibc"
    assert "MALLOC_MMAP_THRESHOLD_" in allocator.environment
    assert "libtcmalloc-minimal4" in allocator.reason


def test_what_the_caller_set_for_glibc_is_kept() -> None:
    environ = {"MALLOC_MMAP_THRESHOLD_": "4096", "GLIBC_TUNABLES": "glibc.malloc.check=3"}
    allocator = choose("glibc", environ, TCMALLOC, "glibc")
    assert "MALLOC_MMAP_THRESHOLD_" not in allocator.environment
    tunables = "glibc.malloc.check=3:glibc.malloc.hugetlb=1"
    assert allocator.environment["GLIBC_TUNABLES"] == tunables
    environ = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=2"}
    assert "GLIBC_TUNABLES" not in choose("glibc", environ, TCMALLOC, "glibc").environment


@pytest.mark.parametrize("asked", ["auto", "glibc", "tcmalloc"])
def test_without_glibc_nothing_is_changed(asked: str) -> None:
    allocator = choose(asked, {}, TCMALLOC, "")
    assert (allocator.kind, dict(allocator.environment)) == ("none", {})
    assert "glibc" in allocator.reason


def test_none_changes_nothing() -> None:
    assert dict(choose("none", {}, TCMALLOC, "glibc").environment) == {}


def test_one_that_is_missing_is_named_with_what_is_there() -> None:
    with pytest.raises(
        LookupError, match=r"--malloc jemalloc.*not installed.*auto, glibc, tcmalloc"
    ):
        choose("jemalloc", {}, TCMALLOC, "glibc")
    assert {"auto", "glibc", "tcmalloc", "jemalloc", "mimalloc", "none"} == set(CHOICES)


def test_only_libraries_for_this_machine_are_found(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        directory.mkdir()
    (first / "libtcmalloc.so.4").write_bytes(b"\x7fELF\x01\x01" + bytes(14))  # another word size
    (first / "libmimalloc.so.2").write_text("a linker script, not a library")
    shutil.copyfile(sys.executable, second / "libtcmalloc.so.4")
    assert find([str(first), str(second)]) == {"tcmalloc": str(second / "libtcmalloc.so.4")}
    assert find([str(first)]) == {}


def test_everything_found_here_exists() -> None:
    for kind, path in find().items():
        assert Path(path).name.startswith(f"lib{kind}")
        assert Path(path).is_file()


def test_a_library_is_loaded_when_it_is_mapped(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 0 08:01 1 /usr/lib/libtcmalloc_minimal.so.4.5.10\n")
    assert is_loaded("tcmalloc", maps)
    assert not is_loaded("jemalloc", maps)
    assert not is_loaded("tcmalloc", tmp_path / "missing")
