"""What a newcomer writes first: a positional budget, no directory, a directory that is not there."""

import pytest
import torch

from backstash import Stash
from backstash.errors import SizeError, StashIOError, UsageError
from backstash.report import draw, saved_report, timeline
from backstash.scratch import scratch


def test_a_budget_may_be_positional_and_is_shown() -> None:
    with Stash("6G", disk=True) as stash:
        assert repr(stash).startswith(
            "Stash(name=None, budget=6.00 GiB, plan='measuring', store=Disk("
        )
        torch.randn(300, 300, requires_grad=True).exp().sum().backward()
    stash.close()


@pytest.mark.parametrize("given", [{"budget": 6}, {"keep": 6}, {"keep": "512"}])
def test_a_size_that_lacks_its_unit_is_refused(given) -> None:
    with pytest.raises(SizeError, match=r"with a unit: (budget|keep)="):
        Stash(**given)


def test_disk_true_is_a_directory_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = scratch()
    assert found is not None
    with Stash(disk=True) as stash:
        loss = torch.randn(300, 300, requires_grad=True).exp().sum()
        assert stash.stats().written_bytes == 360_000
        assert repr(found[0]) in repr(stash)
    loss.backward()
    stash.close()
    monkeypatch.setattr("backstash.scratch.scratch", lambda: None)
    with pytest.raises(UsageError, match="disk=True: no directory on a disk"):
        Stash(disk=True)


def test_a_missing_directory_is_one_error(tmp_path) -> None:
    with pytest.raises(StashIOError, match="must be an existing, writable directory") as caught:
        Stash(disk=tmp_path / "missing")
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_ipython_in_a_terminal_shows_the_table() -> None:
    pretty = pytest.importorskip("IPython.lib.pretty")
    stash = Stash("1TiB")
    with stash, saved_report() as report:
        timeline_of = timeline(stash.record())
        loss = torch.ones(9, requires_grad=True).sin().sum()
    for each in (stash.stats(), stash.plan, report, timeline_of, draw(loss)):
        assert pretty.pretty(each) == str(each) != repr(each)
    timeline_of.remove()
    stash.close()
