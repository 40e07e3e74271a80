"""The stashes that a program is run under: tiers, windows, faults, threads, and what is around."""

from __future__ import annotations

import gc
import random
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from backstash import Disk, Stash, graph, stash
from backstash._tiers import segments as _segments
from backstash.errors import StashIOError, StashWarning
from backstash.policy import Action, SavedTensor
from backstash.stores import Store
from backstash.testing import Failing, Gated, MemoryStore, TwinDevice, stash_on
from packers import ANYTHING, Halves, Wrong

from .acts import CONTEXTS, is_alone
from .operations import COPIED, UNSEEN
from .places import CPU, Place
from .run import Result, Run, Step

PATIENCE_SECONDS = 60


@dataclass(frozen=True)
class Way:
    """How the stash is made that a program runs under."""

    options: dict[str, Any] = field(default_factory=dict)
    """The stash's."""
    chance: float | None = None
    """On a twin accelerator, how likely a copy has run when somebody looks; ``None``: on the CPU."""
    disk: str = "memory"
    """What is below: ``"memory"``, ``"verify"`` (a file, checksums), ``"fails"``, ``"full"`` or ``""``."""
    one_by_one: bool = False
    """Small blocks are written from their own memory too, as large ones are."""
    holds: bool = True
    """Whether a program may hold writes back. Not where something would wait for them."""
    around: str = ""
    """``"hooks"``: within another's hooks. ``"mutation"``: changes in place are allowed. ``"attached"``:
    no context; the stash is attached to the module that every operation runs in. ``"plan"``: a plan that
    changes all the time, and leaves alone what is saved from here to there."""
    threads: int = 1
    """So many run the program at once, on one stash."""
    leaves_out: frozenset[str] = frozenset()
    """Operations that mean something else there."""


def _packed_wrong(saved: SavedTensor) -> Action:
    return Action("pack", Wrong())


def _packed(saved: SavedTensor) -> Action:
    return Action("pack", ANYTHING)


def _recomputed(saved: SavedTensor) -> Action:
    return Action("recompute")


def _sometimes_recomputed(saved: SavedTensor) -> Action | None:
    return (Action("recompute"), Action("recompute"), None, Action("pack", Halves()))[
        saved.index % 4
    ]


def _sometimes_packed(saved: SavedTensor) -> Action | None:
    return (Action("pack", Halves()), Action("disk", Halves()), Action("disk"), None)[
        saved.index % 4
    ]


def _sometimes(saved: SavedTensor) -> Action | None:
    return (Action("disk"), None, Action("keep"), Action("host"), None)[saved.index % 5]


WAYS: dict[str, Way] = {
    "below": Way({"inflight": 0}),
    "below, one by one": Way({"inflight": 0}, one_by_one=True),
    "below, no read ahead": Way({"inflight": 0, "prefetch": 0}),
    "on its way": Way(),
    # A read ahead would queue behind a write that is held.
    "on its way, one by one": Way({"prefetch": 0}, one_by_one=True, leaves_out=COPIED),
    "some kept": Way({"keep": "5KiB"}),
    "some kept, one by one": Way(
        {"keep": "5KiB", "prefetch": 0}, one_by_one=True, leaves_out=COPIED
    ),
    "little of everything": Way(
        {"keep": "3KiB", "inflight": "5KiB", "prefetch": "5KiB"},
        one_by_one=True,
        holds=False,
        leaves_out=COPIED,
    ),
    "all kept": Way({"keep": None}),
    "small left": Way({"min_bytes": "1KiB"}),
    "all left": Way({"min_bytes": "1GiB"}),
    "a file": Way({"inflight": 0}, disk="verify"),
    "a file, one by one": Way({"prefetch": 0}, disk="verify", one_by_one=True, leaves_out=COPIED),
    "policy": Way(
        {"keep": "4KiB", "policy": _sometimes, "prefetch": 0}, one_by_one=True, leaves_out=COPIED
    ),
    "packed": Way({"keep": None, "disk": None, "policy": _packed}, disk=""),
    "packed, then moved": Way({"inflight": 0, "policy": _packed}),
    "packed, or not": Way(
        {"keep": "1KiB", "prefetch": 0, "policy": _sometimes_packed},
        one_by_one=True,
        leaves_out=COPIED,
    ),
    "recomputed": Way({"keep": None, "policy": _recomputed}),
    "recomputed, from below": Way({"inflight": 0, "policy": _recomputed}),
    "recomputed, or not": Way(
        {"keep": "1KiB", "prefetch": 0, "policy": _sometimes_recomputed},
        one_by_one=True,
        leaves_out=COPIED,
    ),
    "recomputed, two threads": Way(
        {"keep": "5KiB", "inflight": "8KiB", "policy": _recomputed},
        one_by_one=True,
        holds=False,
        threads=2,
        leaves_out=COPIED,
    ),
    "write fails": Way({"prefetch": 0}, disk="fails", one_by_one=True, leaves_out=COPIED),
    "full": Way({"inflight": 0}, disk="full", one_by_one=True),
    "attached": Way({"inflight": 0}, around="attached", leaves_out=CONTEXTS),
    "in another's hooks": Way(
        {"inflight": 0}, around="hooks", leaves_out=frozenset({"leave ours first"})
    ),
    "mutation allowed": Way(
        {"prefetch": 0}, around="mutation", leaves_out=UNSEEN | CONTEXTS | {"without hooks"}
    ),
    "two threads": Way(
        {"keep": "5KiB", "inflight": "8KiB"},
        one_by_one=True,
        holds=False,
        threads=2,
        leaves_out=COPIED,
    ),
    "packed wrong": Way({"inflight": 0, "policy": _packed_wrong}),
    "packed, on an accelerator": Way(
        {"disk": None, "keep": "3KiB", "policy": _packed}, chance=0.3, disk="", leaves_out=COPIED
    ),
    "packed, two threads": Way(
        {"keep": "5KiB", "inflight": "8KiB", "policy": _packed},
        one_by_one=True,
        holds=False,
        threads=2,
        leaves_out=COPIED,
    ),
    "host": Way({"inflight": 0, "disk": None}, chance=0.3, disk="", leaves_out=COPIED),
    "host, never by itself": Way(
        {"disk": None, "keep": "5KiB"}, chance=0.0, disk="", leaves_out=COPIED
    ),
    "host and disk": Way(
        {"host": "24KiB", "inflight": "8KiB"}, chance=0.3, holds=False, leaves_out=COPIED
    ),
    "host, then disk": Way(
        {"host": "64KiB", "inflight": "64KiB", "prefetch": 0},
        chance=0.5,
        holds=False,
        leaves_out=COPIED,
    ),
    "left alone in part": Way(
        {"budget": "1TiB", "inflight": "5KiB", "prefetch": 0},
        around="plan",
        one_by_one=True,
        leaves_out=COPIED,
    ),
    "left alone in part, two threads": Way(
        {"budget": "1TiB", "inflight": "8KiB", "prefetch": "8KiB"},
        around="plan",
        one_by_one=True,
        holds=False,
        threads=2,
        leaves_out=COPIED,
    ),
    "two threads, host": Way(
        {"host": "64KiB", "inflight": "8KiB"}, chance=0.3, holds=False, threads=2, leaves_out=COPIED
    ),
}

# On an accelerator that is there, or simulated, in place of the twin. One thread: two of them share its
# first stream, and without any stash their programs race each other for its memory. Not within save_on_cpu:
# the reference sees neither what is saved there nor that it was written unseen while it was copied.
DEVICE_WAYS = {
    name: replace(
        way,
        chance=None,
        options={"host": "1MiB", **way.options},
        leaves_out=way.leaves_out | {"enter save_on_cpu"},
    )
    for name, way in WAYS.items()
    if way.chance is not None and way.threads == 1
}


class Bench:
    """One stash of a way, what is below it, and what programs say to them."""

    def __init__(self, way: Way, directory: str, seed: int) -> None:
        self.way = way
        self.inner = _store(way.disk, directory)
        self.failing = Failing(self.inner) if self.inner is not None else None
        self.store = Gated(self.failing) if self.failing is not None else None
        options: dict[str, Any] = {"disk": self.store, "min_bytes": 0, **way.options}
        self.device = TwinDevice(chance=way.chance, seed=seed) if way.chance is not None else None
        if self.device is not None:
            self.stash = stash_on(self.device, **{"host": "1MiB", **options})
        else:
            self.stash = Stash(**options)
        if way.around == "plan":
            _plan_anything(self.stash, random.Random(seed))
        self.other = Stash(disk=MemoryStore(), min_bytes=0, keep="3KiB", inflight="4KiB")

    def scope(self) -> AbstractContextManager[Any]:
        """The context that forward runs in."""
        if self.way.around == "attached":
            return nullcontext()
        return _within_hooks(self.stash) if self.way.around == "hooks" else self.stash

    def other_scope(self) -> AbstractContextManager[Any]:
        """Another stash's."""
        return self.other

    def gate(self, word: str) -> None:
        """What a program says of the way down."""
        if word == "hold":
            self._hold()
        elif word == "free":
            self.free()
        elif word == "land":
            self._settle()
            self.stash.stats()
        elif word == "elsewhere":
            self._settle()
            thread = threading.Thread(target=self.stash.stats)
            thread.start()
            thread.join()

    def _hold(self) -> None:
        if self.way.disk == "fails" and self.failing is not None:
            self.failing.on_write = StashIOError(5, "failed by the test")
        elif self.store is not None and self.way.options.get("inflight") != 0 and self.way.holds:
            self.store.writes.clear()

    def free(self) -> None:
        """Let everything go down that wants to."""
        if self.failing is not None:
            self.failing.on_write = None
        if self.store is not None:
            self.store.writes.set()
        if self.device is not None:
            self.device.run(downs=-1, ups=-1)

    def _settle(self) -> None:
        """Wait for the writes that have begun, unless they are held."""
        if self.store is None or not self.store.writes.is_set() or self.way.threads > 1:
            return
        threads = self.store.threads
        barrier = threading.Barrier(threads + 1)
        if self.stash._workers._threads:
            ends = [self.stash._workers.submit(_pass, barrier) for _ in range(threads)]
            _pass(barrier)  # so every thread has made what came before
            for end in ends:
                error = end.exception()
                assert error is None, error

    def close(self) -> None:
        """End everything."""
        self.free()
        self.stash.close()
        self.other.close()
        if self.store is not None:
            self.store.close()

    def check_nothing_is_left(self) -> None:
        """Blocks, bytes, slots, buffers, pinned memory."""
        patience = time.monotonic() + 10
        while (
            self.stash.stats().blocks or self.other.stats().blocks
        ) and time.monotonic() < patience:
            gc.collect()  # a subclass's or a checkpoint's own cycles
            time.sleep(0.01)  # a device's own thread frees a graph when it gets there
        left = self.stash.stats()
        assert (left.blocks, left.keep_bytes, left.inflight_bytes) == (0, 0, 0), left
        assert (left.ahead_bytes, left.host_bytes, left.disk_bytes) == (0, 0, 0), left
        assert self.other.stats().blocks == 0, self.other.stats()
        if self.device is not None:
            assert not self.device.faults, self.device.faults
            assert self.device.pinned_bytes == 0


def _plan_anything(planned: Stash, rng: random.Random) -> None:
    """Nothing is measured; of each block something is done, within windows of any size, and so much after it is
    left alone."""
    planner: Any = planned._planner
    planner._recording.start = lambda: None

    def choose(block: Any, tensor: Tensor, modules: Any) -> str:
        tiers = planner._limits.tiers
        # No block waits for its own write, which the program may hold up.
        tiers.evictor.inflight.window_bytes = rng.choice((1 << 20, 1 << 24))
        tiers.prefetcher.ahead.window_bytes = rng.choice((0, 4096, 1 << 20))
        return rng.choice(("", "disk", "recompute", "pack"))

    planner.follower.choose = choose
    planner.follower.may_leave_bytes = lambda threads: rng.choice((-1, 64, 5000, 1 << 20))


@contextmanager
def _within_hooks(ours: Stash) -> Iterator[None]:
    with saved_tensors_hooks(_never, _never), ours:
        yield


def _never(_: Any) -> Tensor:
    raise AssertionError("the outer hooks were asked, though only the innermost pair applies")


def _pass(barrier: threading.Barrier) -> None:
    barrier.wait(PATIENCE_SECONDS)


def _store(kind: str, directory: str) -> Store | None:
    if not kind:
        return None
    if kind == "verify":
        return Disk(directory, verify=True)
    return MemoryStore(max_bytes=9000 if kind == "full" else None)


def run_in(way: Way, steps: list[Step], directory: str, place: Place = CPU) -> list[list[Result]]:
    """The results of each thread that ran the program under a stash of ``way``."""
    threads = 1 if any(map(is_alone, steps)) else way.threads
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # It looks at every object there is, for an error's text.
        stack.enter_context(mock.patch.object(stash, "module_that_has", lambda tensor: ""))
        warnings.simplefilter("ignore", StashWarning)
        if way.one_by_one:
            stack.enter_context(mock.patch.object(_segments, "SMALL_BYTES", 0))
        bench = Bench(way, directory, seed=random.Random(str(steps)).getrandbits(32))
        try:
            found = _run_on_each(bench, steps, threads, place)
        except BaseException:
            bench.close()
            raise
        bench.close()
        if not any(name == "enter skip" for name, _, _ in steps):
            # What torch itself saved and a program then changes in place holds itself, in C++, for ever.
            bench.check_nothing_is_left()
        return found


def _run_on_each(bench: Bench, steps: list[Step], threads: int, place: Place) -> list[list[Result]]:
    if threads == 1:
        return [_run(bench, steps, place)]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda _: _run(bench, steps, place), range(threads)))


def _run(bench: Bench, steps: list[Step], place: Place) -> list[Result]:
    run = Run(bench.scope, bench.gate, bench.other_scope, **place.of(steps))
    attached = bench.stash.attach(run.module) if bench.way.around == "attached" else None
    try:
        with mutation(bench.way):
            return run.run(steps)
    finally:
        run.close()
        if attached is not None:
            attached.remove()


@contextmanager
def mutation(way: Way) -> Iterator[None]:
    """Changes in place are allowed, where the way says so."""
    if way.around != "mutation":
        yield
        return
    with graph.allow_mutation_on_saved_tensors():
        yield
