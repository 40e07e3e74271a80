"""What memory there is to spare: the machine's, and the control group's."""

import os
from pathlib import Path

import pytest

from backstash import Stash
from backstash.memory import ControlGroup, memory_group, spare_bytes

MIB = 1 << 20


def fake_process(directory: Path, cgroup: str, mountinfo: str) -> Path:
    proc = directory / "proc"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(cgroup)
    (proc / "mountinfo").write_text(mountinfo)
    return proc


def group(path: Path, **files: int | str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (path / name.replace("__", ".")).write_text(f"{value}\n")


def test_version_2_takes_the_smallest_limit_on_the_way_up(tmp_path: Path) -> None:
    top = tmp_path / "cgroup"
    group(top)
    group(top / "user", memory__max=100 * MIB, memory__current=40 * MIB)
    group(top / "user/job", memory__max="max", memory__current=30 * MIB)
    mount = f"30 20 0:26 / {top} rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
    found = memory_group(fake_process(tmp_path, "0::/user/job\n", mount))
    assert found is not None
    assert (found.version, found.path) == (2, top / "user/job")
    assert (found.limit_bytes, found.used_bytes) == (100 * MIB, 40 * MIB)
    assert found.spare_bytes == 60 * MIB


def test_version_1_says_no_limit_as_a_huge_number(tmp_path: Path) -> None:
    top = tmp_path / "memory"
    unlimited = 9223372036854771712
    group(top, memory__limit_in_bytes=unlimited, memory__usage_in_bytes=9)
    group(top / "job", memory__limit_in_bytes=unlimited, memory__usage_in_bytes=5)
    mount = f"30 20 0:26 / {top} rw - cgroup cgroup rw,memory\n31 20 0:27 / /x rw - cgroup cgroup rw,cpu\n"
    cgroup = "5:cpu:/job\n4:memory:/job\n0::/\n"
    found = memory_group(fake_process(tmp_path, cgroup, mount))
    assert found is not None
    assert (found.version, found.limit_bytes, found.spare_bytes) == (1, None, None)
    group(top / "job", memory__limit_in_bytes=8 * MIB)
    found = memory_group(tmp_path / "proc")
    assert found is not None
    assert (found.limit_bytes, found.used_bytes) == (8 * MIB, 5)


STAT = "anon 5\n{0}inactive_file 3\n{0}active_file 4\nshmem 6"


def test_page_cache_can_be_spared(tmp_path: Path) -> None:
    """A container that reads its data is at its limit all the time."""
    top = tmp_path / "cgroup"
    group(top)
    group(top / "user", memory__max=20, memory__current=18, memory__stat=STAT.format(""))
    group(top / "user/job", memory__max="max", memory__current=9, memory__stat="active_file 100")
    mount = f"30 20 0:26 / {top} rw - cgroup2 cgroup2 rw\n"
    proc = fake_process(tmp_path, "0::/user/job\n", mount)
    found = memory_group(proc)
    assert found is not None
    assert (found.used_bytes, found.cache_bytes, found.spare_bytes) == (18, 7, 9)
    group(top / "user", memory__stat="no figures")
    found = memory_group(proc)
    assert found is not None and (found.cache_bytes, found.spare_bytes) == (0, 2)


def test_page_cache_of_version_1_is_that_of_the_groups_below_too(tmp_path: Path) -> None:
    top = tmp_path / "memory"
    stat = STAT.format("total_") + "\ninactive_file 100"
    group(top, memory__limit_in_bytes=20, memory__usage_in_bytes=18, memory__stat=stat)
    mount = f"30 20 0:26 / {top} rw - cgroup cgroup rw,memory\n"
    found = memory_group(fake_process(tmp_path, "4:memory:/\n", mount))
    assert found is not None and (found.cache_bytes, found.spare_bytes) == (7, 9)


@pytest.mark.parametrize(
    "variable, processes", [("4", 4), ("1", 1), ("", 1), ("0", 1), ("four", 1)]
)
def test_processes_of_one_launcher_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, processes: int
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 8 kB\n")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", variable)
    assert spare_bytes(tmp_path) == 8192 // processes
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert spare_bytes(tmp_path) == 8192


def test_auto_is_an_equal_part_for_each_process_of_a_launcher(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("backstash.memory._available_bytes", lambda meminfo: 40 * MIB)
    monkeypatch.setattr("backstash.memory.memory_group", lambda proc: None)
    limits = []
    for processes in ("1", "4"):
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            monkeypatch.setenv(name, "0")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        with Stash(keep="auto", disk=tmp_path) as stash:
            limits.append(stash._session.device_tiers[0].evictor.resident.limit)
        stash.close()
    assert limits == [20 * MIB, 5 * MIB]


def test_in_a_container_the_mount_is_the_group(tmp_path: Path) -> None:
    top = tmp_path / "memory"
    group(top, memory__limit_in_bytes=7 * MIB, memory__usage_in_bytes=MIB)
    mount = f"30 20 0:26 /docker/abc {top} ro - cgroup cgroup rw,memory\n"
    found = memory_group(fake_process(tmp_path, "4:memory:/docker/abc\n", mount))
    assert found is not None
    assert (found.path, found.limit_bytes) == (top, 7 * MIB)


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert memory_group(tmp_path) is None
    assert (
        memory_group(fake_process(tmp_path, "0::/\n", "1 0 8:1 / / rw - ext4 /dev/x rw\n")) is None
    )


def mounted(top: Path, root: str = "/", kind: str = "cgroup2", options: str = "rw") -> str:
    return f"30 20 0:26 {root} {top} rw - {kind} {kind} {options}\n"


def test_what_is_spare_is_the_least_of_the_machine_s_and_the_group_s(tmp_path: Path) -> None:
    top = tmp_path / "cgroup"
    proc = fake_process(tmp_path / "of", "0::/\n", mounted(top))
    (proc / "self").mkdir()
    for name in ("cgroup", "mountinfo"):
        (proc / name).rename(proc / "self" / name)
    (proc / "meminfo").write_text("MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable: 8 kB\n")
    group(top, memory__max=9000, memory__current=1000)
    assert spare_bytes(proc) == 8000
    group(top, memory__max=90_000)
    assert spare_bytes(proc) == 8192
    group(top, memory__max="max")
    assert spare_bytes(proc) == 8192
    group(top, memory__max=1000, memory__current=9000)  # the limit was lowered
    assert spare_bytes(proc) == 0


def test_where_there_is_no_meminfo_it_is_the_machine_s_memory(tmp_path: Path) -> None:
    assert spare_bytes(tmp_path) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_group_without_cache_and_limit() -> None:
    assert ControlGroup(2, Path("/"), 10, 4).spare_bytes == 6
    assert ControlGroup(2, Path("/"), 10, 11).spare_bytes == 0
    assert ControlGroup(2, Path("/"), None, 4).spare_bytes is None


@pytest.mark.parametrize(
    "lines, found",
    [
        ("3:cpu,memory:/job\n0::/other", (1, "one/job")),
        ("0::/other\n3:memory:/job", (1, "one/job")),  # of both, the first has the memory
        ("3:cpu:/job\n0::/other", (2, "two/other")),
        ("0:cpu:/job\n1::/job", None),
        ("0:cpu:/job\n1::/job\n0::/other", (2, "two/other")),
        ("3:memory:/job:2", (1, "one/job:2")),
        ("0::/", (2, "two")),  # the root of version 2 says nothing of memory
        ("3:memory:/empty", (1, "one/empty")),
        ("3:memory:/other", (1, "one")),  # of a container: only the host sees it
    ],
)
def test_which_of_its_groups_has_the_memory(
    tmp_path: Path, lines: str, found: tuple[int, str] | None
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    group(one / "job", memory__usage_in_bytes=1)
    group(two / "other", memory__current=1)
    group(two / "job", memory__current=1)
    group(one / "job:2", memory__usage_in_bytes=1)
    group(one / "empty")
    table = (
        "1 0 0:3 / /run rw - tmpfs  rw\n"  # without a source
        "2 0 0:4 / /mnt/c rw - 9p drvfs rw,path=C:\\Program Files;uid=0\n"
        + mounted(tmp_path / "cpu", kind="cgroup", options="rw,cpu")
        + mounted(tmp_path / "memory", kind="tmpfs", options="rw,memory")
        + mounted(one, kind="cgroup", options="rw,memory")
        + mounted(two)
    )
    has = memory_group(fake_process(tmp_path, lines + "\n", table))
    if found is None:
        assert has is None
    else:
        assert has is not None and (has.version, has.path) == (found[0], tmp_path / found[1])


def test_a_mount_of_a_group_s_own_directory(tmp_path: Path) -> None:
    top = tmp_path / "top"
    group(top / "below", memory__current=3, memory__max=5)
    proc = fake_process(tmp_path, "0::/docker/abc/below\n", mounted(top, root="/docker/abc"))
    has = memory_group(proc)
    assert has is not None and (has.path, has.spare_bytes) == (top / "below", 2)


def test_a_mount_that_knows_nothing_of_memory_is_passed_over(tmp_path: Path) -> None:
    bare, top = tmp_path / "bare", tmp_path / "top"
    group(bare / "job")
    group(top / "job", memory__current=3)
    proc = fake_process(tmp_path, "0::/job\n", mounted(bare) + mounted(top))
    has = memory_group(proc)
    assert has is not None and has.path == top / "job"


@pytest.mark.parametrize("outer, inner, used", [(5, 7, 1), (7, 5, 2), (5, 5, 2)])
def test_the_smallest_limit_counts_and_of_equals_the_innermost(
    tmp_path: Path, outer: int, inner: int, used: int
) -> None:
    top = tmp_path / "top"
    group(tmp_path, memory__max=1, memory__current=1)  # above the mount: of no concern
    group(top, memory__max=outer, memory__current=1)
    group(top / "job", memory__max=inner, memory__current=2)
    has = memory_group(fake_process(tmp_path / "of", "0::/job\n", mounted(top)))
    assert has is not None and (has.limit_bytes, has.used_bytes) == (5, used)


@pytest.mark.parametrize("limit, found", [(2**60 - 1, 2**60 - 1), (2**60, None)])
def test_from_where_on_a_limit_is_none(tmp_path: Path, limit: int, found: int | None) -> None:
    top = tmp_path / "top"
    group(top, memory__limit_in_bytes=limit)
    table = mounted(top, kind="cgroup", options="rw,memory")
    has = memory_group(fake_process(tmp_path, "3:memory:/\n", table))
    assert has is not None and (has.limit_bytes, has.used_bytes) == (found, 0)  # none is given
