"""The windows of ``inflight="auto"`` and ``prefetch="auto"``."""

import pytest
import torch

from backstash import Stash

KIB, MIB = 1 << 10, 1 << 20


def windows_of(stash: Stash) -> tuple[int, int]:
    tiers = stash._session.device_tiers[0]
    return tiers.evictor.inflight.window_bytes, tiers.prefetcher.ahead.window_bytes


def step(stash: Stash, pieces: int, nbytes: int) -> None:
    """Save ``pieces`` blocks of ``nbytes``, and go backward."""
    with stash:
        x = torch.ones(nbytes // 4, requires_grad=True)
        for _ in range(pieces):
            x = x.exp().clamp(max=1.0).sin()
    x.sum().backward()


@pytest.mark.parametrize(
    ("pieces", "nbytes", "window"),
    [
        (1, 64 * KIB, 4 * MIB),  # at least what a segment takes
        (30, MIB, 7 * MIB + 512 * KIB),  # an eighth of 60 MiB
        (1, 16 * MIB, 32 * MIB),  # two of the largest
        (1, 80 * MIB, 128 * MIB),
    ],
)
def test_a_window_follows_what_a_step_saves(disk_dir, pieces, nbytes, window) -> None:
    stash = Stash(disk=disk_dir)
    step(stash, pieces, nbytes)
    found = windows_of(stash)
    assert found[0] == found[1] and window - nbytes <= found[0] <= window
    stash.close()


def test_a_window_shrinks_with_the_step_after_a_smaller_one(disk_dir) -> None:
    stash = Stash(disk=disk_dir)
    step(stash, 60, MIB)
    large = windows_of(stash)[0]
    for _ in range(3):
        step(stash, 20, MIB)
    assert windows_of(stash)[0] <= large // 2
    stash.close()


def test_a_size_fixes_a_window(disk_dir) -> None:
    stash = Stash(disk=disk_dir, inflight="9MiB")
    step(stash, 60, MIB)
    inflight, prefetch = windows_of(stash)
    assert inflight == 9 * MIB and prefetch > 9 * MIB
    stash.close()


def test_a_budget_s_windows_are_the_planner_s(disk_dir) -> None:
    stash = Stash("1TiB", disk=disk_dir)  # which no process of tests has exceeded
    for _ in range(3):
        step(stash, 20, MIB)
        assert windows_of(stash) == stash._session.planners[0]._limits.windows
    stash.close()
