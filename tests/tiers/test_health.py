"""What could not be had: when there is no use in asking, when there is again, and what is noted once."""

import _thread
import errno
import linecache
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch

from backstash import Stash
from backstash._runtime.weak import WeakQueue
from backstash._tiers.health import TierHealth
from backstash.errors import StashFullError, StashIOError, StashWarning
from backstash.testing import Failing, MemoryStore

FULL = StashFullError(errno.ENOSPC, "no space for 1 MiB")


class Waiting:
    """A block that is in place, or not any more."""

    def __init__(self, kept=1):
        self.cleanup = SimpleNamespace(resident_bytes=kept)


def made(*, raises=False, used=1000):
    resident = SimpleNamespace(queue=WeakQueue(lambda block: True))
    tier = SimpleNamespace(used_bytes=used)
    return TierHealth(resident, tier, raises=raises), resident, tier


def warnings_of(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [(each.category, str(each.message)) for each in caught]


def test_a_full_tier_is_asked_for_less_or_when_something_has_left_it():
    health, resident, tier = made()
    assert health.is_well and health.refuses(1 << 40) is False
    warnings_of(lambda: health.full(FULL, 100))
    assert not health.is_well
    health.deferred.append(deferred := Waiting())
    assert health.refuses(100) is True and health.refuses(101) is True
    assert health.refuses(99) is False
    assert len(health.deferred.refs) == 1 and len(resident.queue.refs) == 0
    tier.used_bytes += 1
    assert health.refuses(100) is True and not health.is_well
    tier.used_bytes -= 2
    assert health.refuses(100) is False and health.is_well
    assert len(health.deferred.refs) == 0 and resident.queue.popleft() is deferred
    tier.used_bytes += 2
    assert health.refuses(100) is False, "it is asked once more"


def test_what_was_deferred_is_asked_before_what_came_later_when_a_step_has_ended():
    health, resident, _ = made()
    first, second, later = Waiting(), Waiting(), Waiting()
    for each in (first, second):
        health.deferred.append(each)
    resident.queue.append(later)
    health.try_again()
    assert len(health.deferred.refs) == 2, "nothing was refused: nothing has changed"
    warnings_of(lambda: health.full(FULL, 100))
    assert not health.is_well
    health.try_again()
    assert health.is_well
    assert [resident.queue.popleft() for _ in range(3)] == [first, second, later]
    assert health.refuses(100) is False


def test_only_what_is_in_place_is_deferred():
    health, _, _ = made()
    gone = Waiting(kept=0)
    health.deferred.append(gone)
    assert health.deferred.popleft() is None
    health.restore()
    health.deferred.append(gone)
    assert health.deferred.popleft() is None


def test_the_first_refusal_is_a_warning_and_the_last_is_noted_with_their_number():
    health, _, _ = made()
    health.notes.add("out of memory", "out of device memory")  # which no refusal is
    other = StashFullError(errno.ENOSPC, "no space for 2 MiB")
    assert warnings_of(lambda: health.full(FULL, 1)) == [(StashWarning, f"kept in memory: {FULL}")]
    assert warnings_of(lambda: (health.full(FULL, 1), health.full(other, 1))) == []
    assert list(health.notes) == [
        "out of device memory",
        f"kept in memory: {other} (the last of 3 such notes)",
    ]


def test_a_caller_that_wants_errors_gets_each_and_asks_again():
    health, _, _ = made(raises=True)
    for _ in range(2):
        with pytest.raises(StashFullError) as caught:
            health.full(FULL, 100)
        assert caught.value is FULL and health.refuses(100) is False and not health.is_well
    assert list(health.notes) == []


@pytest.mark.parametrize(
    "failure, kind, number",
    [
        (OSError(errno.ENOSPC, "was full"), StashFullError, errno.ENOSPC),
        (OSError(errno.EROFS, "was read-only"), StashIOError, errno.EROFS),
        (OSError("was odd"), StashIOError, errno.EIO),
        (ValueError("was wrong"), StashIOError, errno.EIO),
    ],
)
def test_nothing_more_is_sent_to_what_has_failed(failure, kind, number):
    health, _, _ = made()
    ((category, message),) = warnings_of(lambda: health.broke(failure))
    assert category is StashWarning and message.startswith("kept in memory: ")
    assert str(failure) in message and "nothing more is written there" in message
    assert health.refuses(0) is True and not health.is_well
    health.restore()
    assert health.refuses(0) is True and not health.is_well, "for good"
    warnings_of(lambda: health.full(FULL, 100))
    health.try_again()
    assert health.refuses(0) is True and not health.is_well, "whatever else it was"
    health, _, _ = made(raises=True)
    assert warnings_of(lambda: health.broke(failure)) == [], "the next who sends gets an error"
    assert not health.is_well
    seen = []
    for _ in range(2):
        with pytest.raises(kind, match="nothing more is written there") as caught:
            health.refuses(0)
        assert type(caught.value) is kind and caught.value.errno == number
        seen.append(caught.value)
    assert seen[0] is not seen[1] and list(health.notes) == []


def test_a_rebuild_forgets_what_was_deferred():
    health, resident, _ = made()
    warnings_of(lambda: health.full(FULL, 100))
    health.deferred.append(deferred := Waiting())
    health.restore()
    assert health.is_well and health.refuses(100) is False
    assert len(health.deferred.refs) == len(resident.queue.refs) == 0
    del deferred


@pytest.mark.parametrize("inflight", [0, "1MiB"])
@pytest.mark.parametrize("error", [FULL, OSError(5, "broke")])
def test_the_warning_names_the_line_of_the_computing_code(error, inflight):
    store = Failing(MemoryStore())
    store.on_write = error
    x = torch.ones(1 << 18, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught, Stash(disk=store, inflight=inflight):
        warnings.simplefilter("always")
        torch.nn.functional.silu(torch.nn.functional.silu(torch.nn.functional.silu(x * 2)))
    (each,) = caught
    assert each.filename == __file__
    assert "silu" in linecache.getline(__file__, each.lineno)


def test_the_warning_comes_where_nobody_has_a_line(monkeypatch):
    """As on a thread of autograd's, whose first line is ours; or in code that is of no module."""
    health, _, _ = made()
    shown, come = [], threading.Event()
    monkeypatch.setattr(warnings, "showwarning", lambda *what: (shown.append(what), come.set()))
    warnings.simplefilter("always")
    _thread.start_new_thread(health.full, (FULL, 1))
    assert come.wait(30)
    health, _, _ = made()
    exec(compile("full(error, 1)", "of no module", "exec"), {"full": health.full, "error": FULL})
    assert [each[2].rpartition("/")[2] for each in shown] == ["health.py", "of no module"]
