"""Which directory ``backstash run`` and ``backstash plan`` move to where none was given."""

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from backstash import scratch as module

Usage = namedtuple("Usage", "free")


@pytest.fixture
def directories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Makes directories, each of a file system of this kind with so much free."""
    kinds: dict[str, tuple[str, int]] = {}

    def make(**given: tuple[str, int]) -> list[str]:
        for name, (kind, free) in given.items():
            (tmp_path / name).mkdir()
            kinds[str(tmp_path / name)] = kind, free
        return [str(tmp_path / name) for name in given]

    monkeypatch.setattr(module, "file_system", lambda path: kinds[path][0])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(kinds[path][1]))
    return make


def test_it_is_on_the_disk_with_the_most_free_space(directories) -> None:
    small, large, memory = directories(
        small=("ext4", 1 << 30), large=("xfs", 2 << 30), memory=("tmpfs", 4 << 30)
    )
    assert module.scratch([small, large, memory]) == (large, "xfs with 2.00 GiB free")
    assert module.scratch([memory, f"{small}/missing"]) is None


@pytest.mark.parametrize(
    "kind", ["nfs4", "lustre", "gpfs", "beegfs", "ceph", "9p", "fuse.sshfs", "fuse.s3fs"]
)
def test_what_other_machines_serve_is_no_disk(directories, kind: str) -> None:
    own, far = directories(own=("ext4", 1 << 30), far=(kind, 1 << 50))
    assert module.scratch([far, own]) == (own, "ext4 with 1.00 GiB free")
    assert module.scratch([far]) is None


@pytest.mark.parametrize("kind", ["overlay", "fuseblk", "fuse.fuse-overlayfs", "btrfs", ""])
def test_a_container_s_and_an_unknown_one_are_taken(directories, kind: str) -> None:
    (own,) = directories(own=(kind, 1 << 30))
    found = module.scratch([own])
    assert found is not None and found[0] == own
