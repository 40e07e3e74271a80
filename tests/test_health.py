"""What could not be had: when there is no use in asking, when there is again, and what is told once."""

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

FULL = StashFullError(errno.ENOSPC, "no room for 1 MiB")


class Stuck:
    """A block that is in place, or not any more."""

    def __init__(self, kept=1):
        self.cleanup = SimpleNamespace(resident_bytes=kept)


def made(*, raises=False, used=1000):
    resident = SimpleNamespace(queue=WeakQueue(lambda block: True))
    tier = SimpleNamespace(used_bytes=used)
    return TierHealth(resident, tier, raises=raises), resident, tier


def told_by(call):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        call()
    return [(each.category, str(each.message)) for each in told]


def test_a_full_tier_is_asked_for_less_or_when_something_has_left_it():
    health, resident, tier = made()
    assert health.refuses(1 << 40) is False
    told_by(lambda: health.full(FULL, 100))
    health.deferred.append(deferred := Stuck())
    assert health.refuses(100) is True and health.refuses(101) is True
    assert health.refuses(99) is False
    assert len(health.deferred) == 1 and len(resident.queue) == 0
    tier.used_bytes += 1
    assert health.refuses(100) is True
    tier.used_bytes -= 2
    assert health.refuses(100) is False
    assert len(health.deferred) == 0 and resident.queue.popleft() is deferred
    tier.used_bytes += 2
    assert health.refuses(100) is False, "it is asked once more"


def test_what_was_stuck_is_asked_before_what_came_later_when_a_step_has_ended():
    health, resident, _ = made()
    first, second, later = Stuck(), Stuck(), Stuck()
    for each in (first, second):
        health.deferred.append(each)
    resident.queue.append(later)
    health.try_again()
    assert len(health.deferred) == 2, "nothing was refused: nothing has changed"
    told_by(lambda: health.full(FULL, 100))
    health.try_again()
    assert [resident.queue.popleft() for _ in range(3)] == [first, second, later]
    assert health.refuses(100) is False


def test_only_what_is_in_place_is_stuck():
    health, _, _ = made()
    gone = Stuck(kept=0)
    health.deferred.append(gone)
    assert health.deferred.popleft() is None
    health.restore()
    health.deferred.append(gone)
    assert health.deferred.popleft() is None


def test_the_first_refusal_is_a_warning_and_each_is_noted_once():
    health, _, _ = made()
    health.notes["out of device memory"] = None  # which no refusal is
    other = StashFullError(errno.ENOSPC, "no room for 2 MiB")
    assert told_by(lambda: health.full(FULL, 1)) == [(StashWarning, f"left in place: {FULL}")]
    assert told_by(lambda: (health.full(FULL, 1), health.full(other, 1))) == []
    assert list(health.notes) == [
        "out of device memory",
        f"left in place: {FULL}",
        f"left in place: {other}",
    ]


def test_whoever_wants_errors_has_each_and_asks_again():
    health, _, _ = made(raises=True)
    for _ in range(2):
        with pytest.raises(StashFullError) as caught:
            health.full(FULL, 100)
        assert caught.value is FULL and health.refuses(100) is False
    assert health.notes == {}


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
    ((category, message),) = told_by(lambda: health.broke(failure))
    assert category is StashWarning and message.startswith("left in place: ")
    assert str(failure) in message and "nothing more is sent there" in message
    assert health.refuses(0) is True
    health.restore()
    assert health.refuses(0) is True, "for good"
    health, _, _ = made(raises=True)
    assert told_by(lambda: health.broke(failure)) == [], "the next who sends is told"
    seen = []
    for _ in range(2):
        with pytest.raises(kind, match="nothing more is sent there") as caught:
            health.refuses(0)
        assert type(caught.value) is kind and caught.value.errno == number
        seen.append(caught.value)
    assert seen[0] is not seen[1] and health.notes == {}


def test_the_books_anew_have_forgotten_what_was_stuck():
    health, resident, _ = made()
    told_by(lambda: health.full(FULL, 100))
    health.deferred.append(deferred := Stuck())
    health.restore()
    assert health.refuses(100) is False
    assert len(health.deferred) == len(resident.queue) == 0
    del deferred


@pytest.mark.parametrize("inflight", [0, "1MiB"])
@pytest.mark.parametrize("error", [FULL, OSError(5, "broke")])
def test_the_warning_names_the_line_of_whoever_computes(error, inflight):
    store = Failing(MemoryStore())
    store.on_write = error
    x = torch.ones(1 << 18, requires_grad=True)
    with warnings.catch_warnings(record=True) as told, Stash(disk=store, inflight=inflight):
        warnings.simplefilter("always")
        torch.nn.functional.silu(torch.nn.functional.silu(torch.nn.functional.silu(x * 2)))
    (each,) = told
    assert each.filename == __file__
    assert "silu" in linecache.getline(__file__, each.lineno)


def test_the_warning_comes_where_nobody_has_a_line(monkeypatch):
    """As on a thread of autograd's, whose first line is ours; or in code that is of no module."""
    health, _, _ = made()
    told, come = [], threading.Event()
    monkeypatch.setattr(warnings, "showwarning", lambda *what: (told.append(what), come.set()))
    warnings.simplefilter("always")
    _thread.start_new_thread(health.full, (FULL, 1))
    assert come.wait(30)
    health, _, _ = made()
    exec(compile("full(error, 1)", "of no module", "exec"), {"full": health.full, "error": FULL})
    assert [each[2].rpartition("/")[2] for each in told] == ["health.py", "of no module"]
