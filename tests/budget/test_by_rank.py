"""Budgets that differ by rank."""

import argparse
import re
import sys
from pathlib import Path

import pytest
import torch

from backstash import Disk, Stash
from backstash.cli._arguments import by_rank, directory, size
from backstash.errors import UsageError
from backstash.launcher import of_this_rank, this_rank
from test_distributed import needs_gloo

MIB = 1 << 20


@pytest.fixture
def rank_5(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "5"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)


def step(stash: Stash) -> None:
    x = torch.ones(1 << 18, requires_grad=True)  # 1 MiB, and so is each of three results
    with stash:
        loss = x.exp().exp().exp().sum()
    loss.backward()


@pytest.mark.usefixtures("rank_5")
def test_a_stash_has_the_budgets_of_its_rank(tmp_path: Path) -> None:
    asked = []

    def disk(rank: int) -> Disk:
        asked.append(rank)
        return Disk(tmp_path)

    stash = Stash(keep={0: 0, 5: "2MiB"}, disk=disk, host=lambda rank: rank * MIB)
    assert asked == [5]
    step(stash)
    assert stash.stats().keep_peak_bytes == 2 * MIB
    assert stash.stats().written_bytes == 1 * MIB
    stash.close()
    assert Stash(budget=lambda rank: "3GiB").plan.budget_bytes == 3 << 30  # type: ignore[union-attr]


@pytest.mark.usefixtures("rank_5")
@pytest.mark.parametrize("name", ["keep", "host", "disk", "budget"])
def test_a_rank_that_is_missing_is_named(name: str) -> None:
    message = rf"^{name}={{0: '1GiB', 4: None}} has nothing for rank 5: give each rank an entry, or a function"
    with pytest.raises(UsageError, match=message):
        Stash(**{name: {0: "1GiB", 4: None}})  # type: ignore[arg-type]


@pytest.mark.usefixtures("rank_5")
def test_what_a_rank_is_given_is_checked_as_ever() -> None:
    with pytest.raises(ValueError, match="keep='two' is not a size"):
        Stash(keep={5: "two"})
    with pytest.raises(UsageError, match="with budget="):
        Stash(keep={5: "1GiB"}, budget={5: "1GiB"})


def test_values_by_rank_are_refused_in_a_process_without_a_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert this_rank() is None
    with pytest.raises(
        UsageError, match=r"^keep= is given by rank, and this process has none: .*torchrun"
    ):
        Stash(keep={0: "1GiB"})
    with pytest.raises(UsageError, match="disk= is given by rank"):
        Stash(disk=lambda rank: f"/disk{rank}")


@needs_gloo
def test_without_a_launcher_the_rank_is_that_of_the_process_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the process group puts its own there
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert of_this_rank({0: "mine"}, "keep") == "mine"
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("rank_5")
def test_on_the_command_line(tmp_path: Path) -> None:
    read = by_rank(size("unlimited"))
    assert [read(text) for text in ("1GiB", "0:1GiB,5:2MiB", "0-4:1GiB, 5-7:unlimited")] == [
        1 << 30,
        2 * MIB,
        None,
    ]
    assert by_rank(directory)(f"0:/not/there,5:{tmp_path}") == str(tmp_path)
    for text, message in (
        ("0-4:1GiB", "'0-4:1GiB' has nothing for rank 5"),
        ("0:1GiB,2GiB", "'0:1GiB,2GiB' has values with and without a rank; allowed: RANK:VALUE"),
        ("5:1Q", "unknown unit 'Q'"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=re.escape(message)):
            read(text)


def test_on_the_command_line_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(argparse.ArgumentTypeError, match="this process has no rank; allowed: one"):
        by_rank(size("unlimited"))("0:1GiB")
