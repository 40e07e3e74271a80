"""Which allocator `backstash run` chooses, and what it sets to get it."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from backstash.cli._allocator import CHOICES, INSTALL_HINT, choose, find, preloaded

TCMALLOC = {"tcmalloc": "/lib/libtcmalloc_minimal.so.4"}
TBB = {"tbb": "/venv/lib/libtbbmalloc_proxy.so.2"}


def test_auto_takes_tcmalloc_where_it_is_installed() -> None:
    allocator = choose("auto", {}, TCMALLOC | TBB, "glibc")
    assert (allocator.kind, allocator.library) == ("tcmalloc", TCMALLOC["tcmalloc"])
    assert dict(allocator.environment) == {
        "LD_PRELOAD": TCMALLOC["tcmalloc"],
        "THP_MEM_ALLOC_ENABLE": "1",
    }


def test_else_auto_keeps_the_process_s_own() -> None:
    allocator = choose("auto", {}, TBB, "glibc")
    assert (allocator.kind, allocator.library) == ("own", "")
    assert dict(allocator.environment) == {"THP_MEM_ALLOC_ENABLE": "1"}
    assert dict(choose("auto", {"THP_MEM_ALLOC_ENABLE": "0"}, {}, "glibc").environment) == {}


def test_what_is_preloaded_already_stays_preloaded() -> None:
    environ = {"LD_PRELOAD": "/lib/libprofiler.so"}
    allocator = choose("tcmalloc", environ, TCMALLOC, "glibc")
    assert (
        allocator.environment["LD_PRELOAD"] == "/lib/libtcmalloc_minimal.so.4:/lib/libprofiler.so"
    )


def test_an_allocator_that_the_caller_preloads_is_left_alone() -> None:
    environ = {"LD_PRELOAD": "/opt/libfirst.so /opt/libjemalloc.so.2"}
    assert preloaded(environ) == "jemalloc"
    allocator = choose("auto", environ, TCMALLOC, "glibc")
    assert (allocator.kind, dict(allocator.environment)) == ("none", {})
    assert "LD_PRELOAD already has jemalloc" in allocator.reason


def test_glibc_is_set_up_from_the_start_where_it_is_asked_for() -> None:
    allocator = choose("glibc", {}, {}, "glibc")
    assert allocator.kind == "glibc" and allocator.environment["MALLOC_MMAP_MAX_"] == "0"


def test_what_the_caller_set_for_glibc_is_kept() -> None:
    environ = {"MALLOC_MMAP_THRESHOLD_": "4096", "GLIBC_TUNABLES": "glibc.malloc.check=3"}
    allocator = choose("glibc", environ, TCMALLOC, "glibc")
    assert not {"MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_"} & set(allocator.environment)
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
    assert {"auto", "glibc", "tcmalloc", "jemalloc", "mimalloc", "tbb", "none"} == set(CHOICES)


def test_tbb_is_preloaded_after_what_it_needs() -> None:
    allocator = choose("tbb", {"LD_PRELOAD": "/lib/libprofiler.so"}, TBB, "glibc")
    assert (allocator.kind, allocator.library) == ("tbb", TBB["tbb"])
    assert allocator.environment["LD_PRELOAD"] == (
        "/venv/lib/libtbbmalloc.so.2:/venv/lib/libtbbmalloc_proxy.so.2:/lib/libprofiler.so"
    )
    assert preloaded(dict(allocator.environment)) == "tbb"


def test_a_missing_tbb_is_named_with_what_pip_installs() -> None:
    with pytest.raises(LookupError, match=r"--malloc tbb.*pip install tbb"):
        choose("tbb", {}, TCMALLOC, "glibc")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="tbb has wheels for x86-64 alone")
def test_what_needs_no_root_is_named_first() -> None:
    assert INSTALL_HINT.startswith("pip install tbb")
    assert "libtcmalloc-minimal4" in INSTALL_HINT


@pytest.mark.parametrize("base", ["prefix", "user"])
def test_tbb_is_found_where_pip_put_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str
) -> None:
    (tmp_path / base / "lib").mkdir(parents=True)
    proxy = tmp_path / base / "lib" / "libtbbmalloc_proxy.so.2"
    proxy.touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setattr("site.getuserbase", lambda: str(tmp_path / "user"))
    assert find().get("tbb") != str(proxy)  # alone it cannot be loaded
    proxy.with_name("libtbbmalloc.so.2").touch()
    assert find()["tbb"] == str(proxy)


def test_a_path_that_cannot_be_in_a_list_is_passed_over(tmp_path: Path) -> None:
    for name in ("my project", "project"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "libtcmalloc.so.4").touch()
    assert find([str(tmp_path / "my project")]) == {}
    assert find([str(tmp_path / name)]) == {"tcmalloc": str(tmp_path / name / "libtcmalloc.so.4")}


@pytest.mark.skipif("tbb" not in find(), reason="needs pip install 'backstash[fast]'")
def test_a_process_with_tbb_preloaded_starts_in_silence_and_uses_it() -> None:
    allocator = choose("tbb", {}, find())
    shown = "from backstash.stores._buffer_pool import preloaded_allocator as kind; print(kind())"
    done = subprocess.run(
        [sys.executable, "-c", shown],
        env={**os.environ, **allocator.environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("tbb\n", "")


def test_everything_found_here_exists() -> None:
    for kind, path in find().items():
        assert Path(path).name.startswith(f"lib{kind}")
        assert not set(path) & set(" :")
        assert Path(path).is_file()
