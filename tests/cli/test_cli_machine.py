"""What the command line knows of the machine: memory, its limits, file systems."""

from pathlib import Path

import pytest
import torch

from backstash.cli._machine import machine, versions
from backstash.cli._resident import reset_resident_peak, resident_bytes, resident_peak_bytes
from backstash.scratch import file_system
from bench._limit import limited_group

MIB = 1 << 20


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
