"""Eight threads on one stash: their own graphs and shared ones, every way to enter it, looked at meanwhile."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillRunning

from torch import Tensor

from backstash import Stash
from backstash.errors import StashClosedError, UsageError
from oracle import same_bits

from .mixes import MIXES
from .programs import LARGEST_BYTES, forward, gradients, leaves, nested, second

__all__ = ["closed_meanwhile", "many_threads"]

_SWITCH_SECONDS = 1e-5  # how often Python changes threads, so that they interleave everywhere
_DEPTH = 64
_RUNNING_BYTES = (
    8 * 2 * LARGEST_BYTES
)  # an operation of each thread, which saves two tensors at most

Job = Callable[[Stash], Sequence[Tensor]]


def _own_graph(seed: int) -> Job:
    def job(stash: Stash) -> Sequence[Tensor]:
        x, weight = leaves(seed)
        with stash:
            loss = forward(x, weight, seed)
        return gradients(loss, (x, weight))

    return job


def _kept_and_used_again(seed: int) -> Job:
    def job(stash: Stash) -> Sequence[Tensor]:
        x, weight = leaves(seed)
        with stash:
            one, other = forward(x, weight, seed), forward(x, weight, seed + 1)
        first = gradients(one, (x, weight), retain=True)
        return first + gradients(other, (x, weight)) + gradients(one, (x, weight))

    return job


def _own_stash_within(seed: int) -> Job:
    """What both stashes save shares storages."""

    def job(stash: Stash) -> Sequence[Tensor]:
        x, weight = leaves(seed)
        with stash:
            before = forward(x, weight, seed)
            with Stash(keep="16KiB" if seed % 2 else None, min_bytes=0):
                within = forward(before, weight, seed + 1)
            after = forward(within, weight, seed + 2) + before.exp()
        return gradients(after, (x, weight))

    return job


def _second_order(seed: int) -> Job:
    def job(stash: Stash) -> Sequence[Tensor]:
        x, weight = leaves(seed, large=False)
        with stash:
            return second(forward(x, weight, seed), (x, weight))

    return job


def _dropped(seed: int) -> Job:
    def job(stash: Stash) -> Sequence[Tensor]:
        x, weight = leaves(seed)
        for number in range(3):
            with stash:
                loss = forward(x, weight, seed + number)
        return gradients(loss, (x, weight))

    return job


def _backwards_within_one_another(seed: int) -> Job:
    """So deep that autograd goes on with threads of its own."""

    def job(stash: Stash) -> Sequence[Tensor]:
        x, _ = leaves(seed, large=False)
        with stash:
            inside = gradients(nested(x, _DEPTH), (x,))
            loss = nested(x, _DEPTH)
        return inside + gradients(loss, (x,))

    return job


def _as_a_decorator(seed: int) -> Job:
    def job(stash: Stash) -> Sequence[Tensor]:
        x, weight = leaves(seed)
        loss = stash(forward)(x, weight, seed)
        return gradients(loss, (x, weight))

    return job


_JOBS = (
    _own_graph,
    _kept_and_used_again,
    _own_stash_within,
    _second_order,
    _dropped,
    _as_a_decorator,
    _backwards_within_one_another,
)


def many_threads(
    mix: str, directory: str, *, rounds: int, seed: int, threads: int = 8, patience: float = 120.0
) -> list[str]:
    """What eight threads on one stash get wrong, against the same jobs one after another without one.

    Args:
        mix: of ``MIXES``.
        directory: where the disk tier is.
        rounds: how many jobs each thread does.
        seed: of the jobs and their order.
        patience: seconds after which a thread that has not ended is said to hang.
    """
    plain = Stash()  # without a tier: saves stay in place
    jobs = [
        [_JOBS[(number + turn) % len(_JOBS)](seed + 31 * number + turn) for turn in range(rounds)]
        for number in range(threads)
    ]
    shared = _shared(seed)
    want = [
        [job(plain) for job in mine] + [shared(plain)(number)] for number, mine in enumerate(jobs)
    ]
    stash = MIXES[mix].make(directory)
    looker = _Looker(stash, mix)
    use_shared = shared(stash)

    def work(number: int) -> list[Sequence[Tensor]]:
        got = [job(stash) for job in jobs[number]]
        _leave_without_entering(stash)
        return [*got, use_shared(number)]

    try:
        found = looker.wrong + _compared(work, want, patience)
    finally:
        looker.end()
        use_shared = None  # type: ignore[assignment]
        stash.close()
    stats = stash.stats()
    found += looker.wrong + [
        text for text in [MIXES[mix].broken_by(stats, running_bytes=_RUNNING_BYTES)] if text
    ]
    if stats.blocks or stats.keep_bytes or stats.inflight_bytes or stats.ahead_bytes:
        found.append(f"left behind: {stats}")
    if mix != "in place" and not stats.written_bytes:
        found.append("nothing moved")
    return [f"{mix}: {text}" for text in found]


def _compared(
    work: Callable[[int], list[Sequence[Tensor]]], want: list, patience: float
) -> list[str]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    found = []
    pool = ThreadPoolExecutor(len(want))
    try:
        running = [pool.submit(work, number) for number in range(len(want))]
        for number, future in enumerate(running):
            try:
                got = future.result(patience)
            except StillRunning:
                return [f"thread {number} hangs"]  # the watchdog shows where
            except Exception as error:
                found.append(f"thread {number}: {type(error).__name__}: {error}")
                continue
            for job, (mine, true) in enumerate(zip(got, want[number], strict=True)):
                if not all(same_bits(*pair) for pair in zip(mine, true, strict=True)):
                    found.append(f"thread {number}, job {job}: differs")
    finally:
        sys.setswitchinterval(interval)
        pool.shutdown(wait=False)
    return found


def _shared(seed: int) -> Callable[[Stash], Callable[[int], Sequence[Tensor]]]:
    """Graphs that all threads differentiate at once, each on a way of its own."""

    def build(stash: Stash) -> Callable[[int], Sequence[Tensor]]:
        x, weight = leaves(seed)
        with stash:
            trunk = forward(x, weight, seed)
            heads = [forward(trunk, weight, seed + number % 3) for number in range(8)]
        return lambda number: gradients(heads[number], (trunk, x, weight), retain=True)

    return build


def _leave_without_entering(stash: Stash) -> None:
    try:
        stash.__exit__(None, None, None)
    except UsageError:
        return
    raise AssertionError("a thread left a stash that it had not entered, and no error was raised")


class _Looker:
    """Asks for figures while others work, and holds them against the budgets."""

    def __init__(self, stash: Stash, mix: str) -> None:
        self.wrong: list[str] = []
        self._stash, self._mix = stash, MIXES[mix]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(0.001):
            stats = self._stash.stats()
            text = self._mix.broken_by(stats, running_bytes=_RUNNING_BYTES)
            if min(stats.keep_bytes, stats.inflight_bytes, stats.ahead_bytes, stats.blocks) < 0:
                text += f" negative: {stats}"
            if text:
                self.wrong.append(text)
                return

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def closed_meanwhile(mix: str, directory: str, *, seed: int, patience: float = 120.0) -> list[str]:
    """What is wrong when a stash is closed while eight threads use it.

    Each graph made before must be exact, each save after it refused.
    """
    plain = Stash()
    order = random.Random(seed)
    seeds = [order.randrange(1000) for _ in range(8)]
    want = [[_own_graph(each)(plain), _second_order(each)(plain)] for each in seeds]
    stash = MIXES[mix].make(directory)
    begun = threading.Barrier(9)

    def work(number: int) -> list[Sequence[Tensor]]:
        x, weight = leaves(seeds[number])
        with stash:
            loss = forward(x, weight, seeds[number])
        begun.wait()
        refused = False
        for _ in range(200):  # until it is closed
            try:
                _own_graph(seeds[number])(stash)
            except StashClosedError:
                refused = True
                break
        late = gradients(loss, (x, weight))
        if not refused:
            ended.wait()
            try:
                _own_graph(seeds[number])(stash)
            except StashClosedError:
                pass
            else:
                raise AssertionError("a closed stash took tensors")
        return [late]

    ended = threading.Event()

    def close() -> None:
        begun.wait()
        order.random()
        stash.close()
        ended.set()

    closer = threading.Thread(target=close)
    closer.start()
    found = _compared(work, [each[:1] for each in want], patience)
    closer.join()
    stats = stash.stats()
    if stats.blocks or stats.keep_bytes or stats.inflight_bytes:
        found.append(f"left behind: {stats}")
    return [f"{mix}, closed meanwhile: {text}" for text in found]
