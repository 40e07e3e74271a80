import ctypes
import os
import re
import subprocess
import sys

import pytest

from backstash import Stash
from backstash._runtime import trim as _trim
from backstash._runtime.trim import Trimmer, _Heap
from backstash.cli._allocator import choose, find
from backstash.errors import SizeError
from long_tests import mostly_long


@pytest.fixture
def calls(monkeypatch):
    """What a worker is asked for; and no setting but the test's."""
    monkeypatch.delenv("BACKSTASH_TRIM", raising=False)
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    monkeypatch.setattr(_trim, "preloaded_allocator", lambda: "")
    return []


def trimmer_of(calls):
    return Trimmer(lambda function, *args: calls.append((function.__name__, *args)))


def test_memory_is_given_back_once_in_a_while(calls, monkeypatch):
    trimmer = trimmer_of(calls)
    for _ in range(2):
        trimmer.freed((256 << 20) - 1)
        before = len(calls)
        trimmer.freed(1)
        assert len(calls) == before + 1
    assert calls == 2 * [("malloc_trim", 0)], "all that can be given back, on a worker"


def test_the_heap_is_advised_of_huge_pages_as_it_grows(calls):
    trimmer = trimmer_of(calls)
    trimmer._heap.advise = lambda: calls.append("advised")
    for _ in range(4):
        trimmer.freed(32 << 20)
    assert calls == 2 * ["advised"]


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="the system shows no flags")
def test_all_of_the_heap_has_the_advice():
    heap = _Heap.find()
    heap.advise()
    with open("/proc/self/smaps") as lines:
        areas = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", lines.read())
    flags = [area.rpartition("VmFlags:")[2].split() for area in areas if "[heap]" in area]
    assert flags
    assert all("hg" in found for found in flags) or not _has_huge_pages()


def _has_huge_pages():
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
            return bool(file.read())
    except OSError:
        return False


def test_a_process_without_a_heap_is_not_advised(tmp_path):
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 0 08:01 1 /usr/lib/libc.so.6\n")
    assert _Heap.find(str(maps)) is None
    assert _Heap.find(str(tmp_path / "missing")) is None


def test_the_setting_says_how_often(calls, monkeypatch):
    monkeypatch.setenv("BACKSTASH_TRIM", "4")
    trimmer, counts = trimmer_of(calls), []
    for nbytes in (3, 1, 3, 1, 9, 3):
        trimmer.freed(nbytes)
        counts.append(len(calls))
    assert counts == [0, 1, 1, 2, 3, 3]
    monkeypatch.setenv("BACKSTASH_TRIM", "0")
    trimmer_of(calls).freed(1 << 40)
    assert len(calls) == 3


def test_a_process_that_gives_back_by_itself_is_left_alone(calls, monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1048576")
    trimmer_of(calls).freed(1 << 40)
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_")
    monkeypatch.setattr(_trim, "preloaded_allocator", lambda: "jemalloc")
    trimmer_of(calls).freed(1 << 40)
    assert calls == []


@pytest.mark.parametrize("error", [OSError, AttributeError, TypeError])
def test_a_system_without_the_call_is_left_alone(calls, monkeypatch, error):
    def other(name):
        raise error

    monkeypatch.setattr(ctypes, "CDLL", other)
    trimmer_of(calls).freed(1 << 40)
    assert calls == []


def test_a_wrong_setting_is_named(monkeypatch):
    monkeypatch.setenv("BACKSTASH_TRIM", "often")
    with pytest.raises(SizeError, match="BACKSTASH_TRIM='often'"):
        Stash()


HOLDS = """
import torch
from backstash._runtime.trim import Trimmer
from backstash.cli._resident import resident_bytes
parts = [torch.ones(1 << 20) for _ in range(64)]
full = resident_bytes()
del parts
Trimmer(lambda function, *args: None).release()
print(full - resident_bytes())
"""


@pytest.mark.parametrize("kind", mostly_long(["tbb", "none"], "tbb"))
def test_an_allocator_gives_back_what_is_free(kind):
    allocator = choose(kind, os.environ, find())
    if kind != "none" and allocator.kind != kind:
        pytest.skip(f"{kind} is not installed: {allocator.reason}")
    environment = os.environ | allocator.environment
    # glibc would give such large tensors back by itself.
    environment |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
    done = subprocess.run(
        [sys.executable, "-c", HOLDS], env=environment, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) > 200 << 20


def test_an_allocator_without_the_call_is_left_alone():
    for kind in ("tcmalloc", "mimalloc", "jemalloc", "another"):
        assert _trim._release_of(kind) is None, "not loaded here"


TUNED = """
import ctypes, resource, torch
from backstash._runtime.trim import Trimmer
def mapped():  # whether a large tensor lies in a mapping of its own, and not in the heap
    tensor = torch.ones(64 << 18)
    with open("/proc/self/maps") as lines:
        heap = next(line.split()[0] for line in lines if "[heap]" in line)
    start, end = (int(each, 16) for each in heap.split("-"))
    return not start <= tensor.data_ptr() < end
trimmer = Trimmer(lambda function, *args: None)
before = mapped()
trimmer.freed(1 << 40)
still = mapped()
trimmer.may_tune = True
trimmer.freed(1 << 40)
print(before, still, mapped())
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="the system shows no mappings")
def test_glibc_is_set_at_a_trim_only_where_the_process_is_ours() -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")
    }
    output = subprocess.run(
        [sys.executable, "-c", TUNED], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert output == "True True False\n"
