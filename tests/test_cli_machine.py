"""What the command line knows of the machine: memory, its limits, file systems."""

from pathlib import Path

import pytest
import torch

from backstash.cli._bench._limit import limited_group
from backstash.cli._machine import file_system, machine, versions
from backstash.cli._resident import reset_resident_peak, resident_bytes, resident_peak_bytes
from backstash.memory import memory_group, spare_bytes

MIB = 1 << 20


def fake_process(directory: Path, cgroup: str, mountinfo: str) -> Path:
    proc = directory / "proc"
    proc.mkdir()
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


@pytest.mark.parametrize("told, processes", [("4", 4), ("1", 1), ("", 1), ("0", 1), ("four", 1)])
def test_processes_of_one_launcher_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str, processes: int
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 8 kB\n")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
    assert spare_bytes(tmp_path) == 8192 // processes
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert spare_bytes(tmp_path) == 8192


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


def test_a_group_is_made_and_removed_or_the_reason_is_said() -> None:
    with limited_group(512 * MIB) as made:
        assert bool(made) == (made.reason == "")
        if made:
            assert made.path.is_dir()
            assert made.prefix[-1] == str(made.path / "cgroup.procs")
    assert not made or not made.path.exists()


def test_file_system_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    inner = tmp_path / "with space"
    inner.mkdir()
    escaped = str(inner).replace(" ", "\\040")
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/x rw\n"
        f"2 1 0:3 / {escaped} rw shared:1 - tmpfs tmpfs rw\n"
        f"3 1 0:4 / {tmp_path}/with rw - xfs /dev/y rw\n"
    )
    assert file_system(str(inner), mounts) == "tmpfs"
    assert file_system(str(tmp_path), mounts) == "ext4"
    assert file_system(str(tmp_path), tmp_path / "missing") == ""


def test_machine_and_versions_are_plain_values() -> None:
    facts = machine()
    assert facts.cores >= 1
    assert facts.memory_bytes >= facts.available_bytes > 0
    assert set(versions()) == {"backstash", "torch", "python"}
    assert versions()["torch"]


def test_the_peak_starts_again_where_the_system_lets_it(tmp_path: Path) -> None:
    block = torch.ones(16 * MIB)
    high = resident_peak_bytes()
    assert high >= resident_bytes() > block.nbytes
    del block
    if reset_resident_peak():
        assert resident_peak_bytes() <= high
    assert not reset_resident_peak(tmp_path / "missing" / "file")


def test_resident_bytes_are_read_in_kib(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("VmPeak:\t  9 kB\nVmHWM:\t  20 kB\nVmRSS:\t  10 kB\n")
    assert (resident_bytes(status), resident_peak_bytes(status)) == (10240, 20480)
    assert resident_bytes(tmp_path / "missing") == 0
    assert resident_peak_bytes(tmp_path / "missing") > 0


@pytest.mark.parametrize("name", ["memory_bytes", "swap_bytes"])
def test_nothing_says_which_machine_it_is(name: str) -> None:
    facts = machine().as_dict()
    assert name in facts
    assert not {"host", "hostname", "node"} & set(facts)
