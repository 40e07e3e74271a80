"""One sum of memory among the processes of a machine: each asks when it is told to, in a known order."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from backstash import Stash
from backstash import memory as backstash_memory
from backstash._device.pinned_pool import PinnedPool
from backstash.launcher import Job, JobDirectory, Shares, _shares
from test_job_directory import names, waits_for_a_lock

MIB = 1 << 20
PATIENCE_SECONDS = 60.0
RANK = """
import json, sys
from pathlib import Path
from backstash.launcher import JobDirectory, Shares
class Holder: pass
path, rank, processes = sys.argv[1:]
shares = Shares(JobDirectory(Path(path), int(rank)), int(processes), lambda pid: 0)
holder = Holder()
print(flush=True)
for line in sys.stdin:
    print(shares.ask(holder, **json.loads(line)), flush=True)
shares.leave()
"""


class Rank:
    """Another process of the machine."""

    def __init__(self, path: Path, rank: int, processes: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(path), str(rank), str(processes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "\n"  # it is there, and has not said what it wants

    def begin(self, wanted: int | None = None, *, held: int = 0, spare: int = 1000) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(
            json.dumps({"held": held, "wanted": wanted, "spare": spare}) + "\n"
        )
        self.process.stdin.flush()

    def granted(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def ask(self, wanted: int | None = None, *, held: int = 0, spare: int = 1000) -> int:
        self.begin(wanted, held=held, spare=spare)
        return self.granted()

    def end(self) -> None:
        self.process.communicate(timeout=PATIENCE_SECONDS)

    def kill(self) -> None:
        self.process.kill()
        self.end()


@pytest.fixture
def two(tmp_path: Path):
    ranks = [Rank(tmp_path / "job", rank, 2) for rank in range(2)]
    yield ranks
    for rank in ranks:
        rank.kill()


def test_each_has_its_part_whoever_comes_first(two):
    assert (
        two[0].ask() == 250
    )  # half of 1000 may be granted, and half of that is kept for the other
    assert two[1].ask() == 250
    assert [rank.ask() for rank in two] == [250, 250]


def test_what_one_does_not_want_is_lent_and_comes_back(two):
    two[0].ask()
    two[1].ask()
    assert two[0].ask(100) == 100
    assert two[1].ask() == 400
    assert two[0].ask() == 100  # the rest is lent
    assert two[1].ask() == 250  # and is back when the borrower asks again
    assert two[0].ask() == 250


def test_where_nobody_wants_more_each_keeps_its_part(two):
    assert [rank.ask(100) for rank in two] == [
        100,
        250,
    ]  # the second was not known when the first asked
    assert two[0].ask(100) == 250
    assert two[1].ask(300) == 250 and two[0].ask(100) == 250
    assert two[1].ask() == 250 and two[0].ask(100) == 100  # now somebody does
    assert two[1].ask(300) == 300


def test_more_than_the_sum_is_never_granted_nor_less_than_nothing(two):
    assert two[0].ask(100) == 100
    assert two[1].ask() == 400
    assert two[0].ask(spare=300) == 0  # the machine has become smaller: 150 in all
    assert two[1].ask(spare=300) == 75


def test_what_a_process_holds_is_of_the_sum(two):
    assert two[0].ask(held=200, spare=800) == 250
    assert two[1].ask(spare=800) == 250  # 200 of the other's are in use
    assert two[0].ask(held=1000, spare=0) == 250


def test_one_that_is_killed_gives_its_part_back(two):
    two[0].ask()
    two[1].ask()
    two[0].kill()
    assert two[1].ask() == 500


def test_one_that_has_ended_gives_its_part_back_and_the_last_removes_all(two, tmp_path):
    two[0].ask()
    two[1].ask()
    two[0].end()
    assert two[1].ask() == 500
    two[1].end()
    assert names(tmp_path) == []


def test_two_that_ask_at_the_same_moment_are_not_given_the_same_bytes(tmp_path):
    ranks = [Rank(tmp_path / "job", rank, 3) for rank in range(3)]
    try:
        for rank in ranks:
            assert rank.ask(spare=1200) == 200
        assert ranks[2].ask(0, spare=1200) == 0
        with JobDirectory(tmp_path / "job", 7)._locked(make=False):
            deadline = time.monotonic() + PATIENCE_SECONDS
            for rank in ranks[:2]:
                rank.begin(spare=1200)
            while not all(waits_for_a_lock(rank.process.pid) for rank in ranks[:2]):
                assert time.monotonic() < deadline, "nobody waits for the lock"
        assert sorted(rank.granted() for rank in ranks[:2]) == [200, 400]
    finally:
        for rank in ranks:
            rank.kill()


class Holder:
    """What holds bytes."""


def mine(path: Path, processes: int = 2, resident: dict[int, int] | None = None) -> Shares:
    found = ({} if resident is None else resident).get
    return Shares(JobDirectory(path, 0), processes, lambda pid: found(pid, 0))


def test_what_another_one_has_taken_since_is_of_the_sum(tmp_path):
    resident: dict[int, int] = {}
    shares, other, holder = (
        mine(tmp_path / "job", resident=resident),
        Rank(tmp_path / "job", 1, 2),
        Holder(),
    )
    try:
        other.ask()
        assert shares.ask(holder, held=0, wanted=None, spare=1000) == 250
        resident[other.process.pid] = 200  # it has saved so much, and the machine has less to spare
        assert shares.ask(holder, held=0, wanted=None, spare=800) == 250
        resident[other.process.pid] = 900  # of which only what it was granted is of the sum
        assert shares.ask(holder, held=0, wanted=None, spare=250) == 0
    finally:
        other.kill()
        shares.leave()


def test_a_holder_that_dies_leaves_its_grant_to_the_others_of_its_process(tmp_path):
    shares, first, second = mine(tmp_path / "job"), Holder(), Holder()
    assert shares.ask(first, held=0, wanted=None, spare=1000) == 250
    assert shares.ask(second, held=0, wanted=None, spare=1000) == 0
    del first
    assert shares.ask(second, held=0, wanted=None, spare=1000) == 250
    shares.leave()


def test_a_process_that_was_forked_has_no_part_of_its_own(tmp_path, monkeypatch):
    shares = mine(tmp_path / "job")
    monkeypatch.setattr(_shares, "_of_job", lambda job: shares)
    assert Shares.of_this_process() is shares
    monkeypatch.setattr(shares, "_pid", 1)
    assert Shares.of_this_process() is None
    shares.leave()  # not its own to leave
    assert names(tmp_path) == ["job"]


def test_a_job_of_one_process_shares_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("backstash.launcher._directory._root", lambda: str(tmp_path / "gone"))
    _shares._of_job.cache_clear()
    assert _shares._of_job(Job()) is None
    assert _shares._of_job(Job(0, 0, 2, 2)) is None  # the directory cannot be made
    _shares._of_job.cache_clear()


def step(stash: Stash, blocks: int) -> None:
    """Saves so many blocks of 1 MiB."""
    x = torch.ones(1 << 18, requires_grad=True)
    with stash:
        y = x
        for _ in range(blocks):
            y = y.exp()
    y.sum().backward()


def test_a_stash_lends_what_its_steps_do_not_keep_and_borrows(tmp_path, monkeypatch):
    shares, other = mine(tmp_path / "job"), Rank(tmp_path / "job", 1, 2)
    monkeypatch.setattr(_shares, "_of_job", lambda job: shares)
    monkeypatch.setattr(backstash_memory, "_machine_bytes", lambda proc: 40 * MIB)
    stash = Stash(keep="auto", disk=tmp_path)
    resident = stash._session.device_tiers[0].evictor.resident
    try:
        assert resident.limit == 10 * MIB  # 20 may be granted, to two
        for _ in range(2):
            step(stash, 4)
        assert resident.limit == 5 * MIB  # four blocks, and a quarter more
        assert other.ask(spare=40 * MIB) == 15 * MIB
        for _ in range(2):  # the first shows that it wants more, and the second says so
            step(stash, 8)
        assert stash.stats().written_bytes > 0  # what is lent is not here now
        assert other.ask(spare=40 * MIB) == 10 * MIB  # at the other one's next step
        before = stash.stats().written_bytes
        step(stash, 8)
        assert resident.limit == 10 * MIB
        assert stash.stats().written_bytes == before
        assert other.ask(2 * MIB, spare=40 * MIB) == 2 * MIB
        step(stash, 16)
        assert resident.limit is not None and resident.limit == 10 * MIB
        step(stash, 16)
        assert resident.limit == 18 * MIB  # all but what the other one wants
    finally:
        stash.close()
        other.kill()
        shares.leave()


class NoPins:
    """Pins nothing."""

    def pin(self, memory: torch.Tensor) -> str:
        return ""

    def unpin(self, memory: torch.Tensor) -> None:
        pass

    def pinned(self, nbytes: int) -> str:
        return "none"

    def give_back(self, memory: torch.Tensor) -> None:
        pass


def test_a_pool_of_pinned_memory_tells_after_a_step_what_it_wants(monkeypatch):
    monkeypatch.setattr("backstash._device.pinned_pool._SLAB_BYTES", MIB)
    asked: list[int | None] = []
    more = [4 * MIB]

    def budget() -> int:
        asked.append(pool.wanted)
        return more[0]

    pool = PinnedPool(lambda: more[0], NoPins())
    pool._more = budget
    pool.begin_step()
    held = [pool.take(MIB) for _ in range(2)]
    assert None not in held
    pool.begin_step()
    assert pool.wanted == 3 * MIB  # what it has, and a slab
    assert pool.budget == 6 * MIB
    count = len(asked)
    pool.begin_step()
    assert len(asked) == count  # nothing has changed
    more[0] = 0
    assert pool.take(2 * MIB) is None and asked[-1] is None  # more than it had said
    pool.begin_step()
    assert pool.wanted is None  # since it was refused
    more[0] = 4 * MIB
    pool.begin_step()
    assert pool.budget == 6 * MIB and pool.wanted == 3 * MIB
