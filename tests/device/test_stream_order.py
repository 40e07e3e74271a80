"""Who is ordered after whom on an accelerator: random programs over several streams, by vector clocks.

Streams and events are played; each knows what it comes after. Memory has the stream that asked for it, those
it was recorded on, and who read or wrote it when. What is looked at: nothing reads what has not been written,
nothing is handed out again that somebody may still use, and no buffer of host memory either. When an event has
ended for the host is a matter of chance, so that the host is ahead of the device by more or less.

Memory that is freed is handed out again at once, as far as its owner goes: so a copy that dies while it may
still run has to leave its memory with the device.
"""

import random
from collections import Counter, deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from backstash import Stash
from backstash._device import accelerator as _accelerator
from backstash._device.accelerator import Accelerator

SIDE = 64
BLOCK = SIDE * SIDE * 4


class Stream:
    """A queue of work: ``clock`` says up to where it comes after each stream, itself included."""

    def __init__(self, model: "Model", name: str) -> None:
        self.model, self.name, self.clock = model, name, {name: 0}

    def work(self) -> tuple[str, int]:
        self.clock[self.name] += 1
        return self.name, self.clock[self.name]

    def record_event(self) -> "Event":
        self.work()
        return Event(self.model, dict(self.clock))

    def wait_event(self, event: "Event") -> None:
        merge(self.clock, event.clock)

    def synchronize(self) -> None:
        merge(self.model.host, self.clock)

    def __enter__(self) -> None:
        self.before, self.model.current = self.model.current, self

    def __exit__(self, *error: object) -> None:
        self.model.current = self.before


@dataclass
class Event:
    model: "Model"
    clock: dict[str, int]

    def query(self) -> bool:
        ended = all(self.model.host.get(name, 0) >= at for name, at in self.clock.items())
        if ended or self.model.random.random() < self.model.chance:
            merge(self.model.host, self.clock)
            return True
        return False

    def synchronize(self) -> None:
        merge(self.model.host, self.clock)


def merge(clock: dict[str, int], other: dict[str, int]) -> None:
    for name, at in other.items():
        clock[name] = max(clock.get(name, 0), at)


@dataclass
class Memory:
    """A piece of the device's memory."""

    owner: Stream
    weak: StorageWeakRef
    uses: list[tuple[str, int]] = field(default_factory=list)
    recorded: list[Stream] = field(default_factory=list)


class Model:
    """The device, the host's knowledge of it, and what went wrong."""

    def __init__(self, seed: int, chance: float) -> None:
        self.random, self.chance = random.Random(seed), chance
        self.host: dict[str, int] = {}
        self.current = Stream(self, "first")
        self.faults: list[str] = []
        self.memory: dict[int, Memory] = {}
        self.buffers: dict[tuple[int, int], list[tuple[str, int]]] = {}
        self.waiting: Counter[tuple[int, int]] = Counter()  # buffers of copies that wait for others
        self.grouped: set[str] = set()  # streams on which several copies began together
        self.died: set[str] = (
            set()
        )  # streams of copies that died when they were not known to have ended
        self.silent = ""  # the stream whose copies free their memory when they die: to be found

    def allocated(self, tensor: torch.Tensor) -> Memory:
        storage = tensor.untyped_storage()
        self.look()
        made = Memory(self.current, StorageWeakRef(storage), [self.current.work()])
        self.memory[storage._cdata] = made
        return made

    def of(self, tensor: torch.Tensor) -> Memory:
        return self.memory[tensor.untyped_storage()._cdata]

    def record(self, tensor: torch.Tensor, stream: Stream) -> None:
        """What frees ``tensor``'s memory from now on has to wait for ``stream``, up to where that is then."""
        self.of(tensor).recorded.append(stream)

    def comes_after(self, clock: dict[str, int], use: tuple[str, int]) -> bool:
        name, at = use
        return clock.get(name, 0) >= at or self.host.get(name, 0) >= at

    def look(self) -> None:
        """What has been freed may be handed out on its owner: everybody else must be done with it."""
        for key, memory in list(self.memory.items()):
            if not memory.weak.expired():
                continue
            del self.memory[key]
            for use in memory.uses:
                # It is used again on its owner, once what it was recorded on has come up to here.
                waited = (memory.owner, *memory.recorded)
                known = any(self.comes_after(stream.clock, use) for stream in waited)
                self.check(known, f"memory of {memory.owner.name} goes while {use[0]} may use it")

    def check(self, good: bool, fault: str) -> None:
        if not good:
            self.faults.append(fault)


class Played(Accelerator):
    """The real one, whose requests the model sees."""

    def __init__(self, model: Model) -> None:
        super().__init__(torch.device("cpu"))
        self.model = model
        for lane, name in ((self._down, "down"), (self._up, "up")):
            lane.stream.name, lane.stream.clock = name, {name: 0}

    def _empty(self, nbytes: int) -> torch.Tensor:
        memory = super()._empty(nbytes)
        self.model.allocated(memory)
        return memory

    def down(self, source: torch.Tensor, target: torch.Tensor, made_on: Any) -> Any:
        self.model.waiting[place(target)] += 1
        return super().down(source, target, made_on)

    def up(self, source: torch.Tensor, after: Any) -> Any:
        self.model.waiting[place(source)] += 1
        return super().up(source, after)

    def begin_lane(self, lane: Any) -> None:
        model, group, begun = self.model, lane.group, []
        if group is not None and group.event is None:
            begun = [(copy, copy.source) for copy in group.copies]
        if len(begun) > 1:
            model.grouped.add(lane.stream.name)
        super().begin_lane(lane)
        for copy, source in begun:
            clock = group.event.clock
            if lane is self._down:
                self._has_gone_down(copy, clock)
            else:
                self._has_come_up(copy, source, clock)

    def _has_gone_down(self, copy: Any, clock: dict[str, int]) -> None:
        model = self.model
        use, memory, target = ("down", clock["down"]), model.of(copy.mine), place(copy.memory)
        model.check(model.comes_after(clock, memory.uses[0]), "read before it was made")
        memory.uses.append(use)
        model.buffers.setdefault(target, []).append(use)
        model.waiting[target] -= 1
        self._watch(copy, "down")

    def _has_come_up(self, copy: Any, source: torch.Tensor, clock: dict[str, int]) -> None:
        model = self.model
        use, memory = ("up", clock["up"]), model.of(copy.memory)
        known = model.comes_after(clock, (memory.owner.name, memory.uses[0][1] - 1))
        model.check(known, "written while the stream that has freed it may still use it")
        memory.uses.append(use)
        uses = model.buffers.setdefault(place(source), [])
        for written in [each for each in uses if each[0] == "down"][-1:]:
            model.check(model.comes_after(clock, written), "read up before it was down")
        uses.append(use)
        model.waiting[place(source)] -= 1
        self._watch(copy, "up")

    def mark(self, storage: Any, made_on: Any) -> Any:
        mark: Any = super().mark(storage, made_on)
        before, self.model.current = self.model.current, made_on
        self.model.allocated(mark.digest)
        self.model.current = before
        mark.event = made_on.record_event()
        return mark

    def compare(self, mark: Any, storage: Any, first: int = 0, nbytes: int = -1) -> Any:
        check = super().compare(mark, storage, first, nbytes)
        model, memory = self.model, self.model.of(mark.digest)
        known = model.comes_after(model.current.clock, memory.uses[0])
        model.check(known, "compared with what was not yet made")
        memory.uses.append(model.current.work())
        return check

    def _watch(self, copy: Any, stream: str) -> None:
        """What the copy does at its end, it does still, unless it is to be silent."""
        end, model = copy.__del__, self.model

        def watched() -> None:
            model.died.add(stream)
            if stream != model.silent:
                end()

        copy.__del__ = watched


def place(memory: torch.Tensor) -> tuple[int, int]:
    return memory.untyped_storage()._cdata, int(memory.storage_offset())


@pytest.fixture
def played(monkeypatch):
    """From a seed and a chance to a model, and a stash on it."""
    made = []

    def make(seed: int, chance: float, group_bytes: int = 0, **options: Any) -> tuple[Model, Stash]:
        model = Model(seed, chance)
        monkeypatch.setattr(torch, "Stream", lambda device: Stream(model, "copier"))
        monkeypatch.setattr(_accelerator, "current_stream", lambda index: model.current)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *what: model.record(*what))
        device = Played(model)
        device.group_bytes = group_bytes
        device.pin, device.unpin = lambda memory: "", lambda memory: None
        device.free_bytes, device.failures = lambda: 1 << 40, lambda: 0
        stash = Stash(min_bytes=0, **options)
        stash._session.put(torch.device("cpu"), stash._config.tiers(device, 1))
        tier: Any = stash._session.device_tiers[1].tier
        pool = tier.pool
        give = pool.give

        def given(buffer: Any) -> None:
            model.check(
                not model.waiting[place(buffer.memory)], "a buffer is given before its copy"
            )
            for use in model.buffers.pop(place(buffer.memory), ()):
                model.check(
                    model.comes_after({}, use), f"a buffer is given while {use[0]} may use it"
                )
            give(buffer)

        monkeypatch.setattr(pool, "give", given)
        made.append(stash)
        return model, stash

    yield make
    for stash in made:
        stash.close()


def program(model: Model, stash: Stash, streams: int) -> None:
    """Saves on several streams, uses in another order and on other streams, drops some unused."""
    chance = model.random
    ways = [model.current, *(Stream(model, f"stream {number}") for number in range(1, streams))]
    leaf = torch.ones(SIDE, SIDE, requires_grad=True)
    model.allocated(leaf)
    held: deque[tuple[Any, Stream, float]] = deque()
    later: list[tuple[torch.Tensor, Any, list[Stream]]] = []
    known: set[str] = set()  # the streams that have saved something
    for step in range(40):
        if chance.random() < 0.4:  # the next operation is on another stream, ordered as it must be
            after = model.current.record_event()
            model.current = chance.choice(ways)
            model.current.wait_event(after)
        made_on = model.current
        tensor = leaf * float(step)
        model.allocated(tensor)
        if chance.random() < 0.3:  # made here, saved there
            after = made_on.record_event()
            model.current = chance.choice(ways)
            model.current.wait_event(after)
            model.of(tensor).uses.append(model.current.work())
        for again in range(chance.choice((1, 1, 2))):  # more than once, too, and on another stream
            if again:
                after = model.current.record_event()
                model.current = chance.choice(ways)
                model.current.wait_event(after)
            with stash if chance.random() < 0.5 else nullcontext():  # as a hook of the program's
                held.append((stash.pack(tensor), model.current, float(step)))
            known.add(model.current.name)
            model.of(tensor).uses.append(model.current.work())  # the operation that saves it
        if chance.random() < 0.3:
            savers = [way for way in ways if way.name in known]
            later.append((tensor, held[-1][0], savers))
        while (
            later and chance.random() < 0.3
        ):  # another reads it, and relies on autograd to hold it
            old, packed, savers = later.pop(0)
            reader = chance.choice(savers)  # one that saves nothing is the program's own to record
            reader.wait_event(model.current.record_event())
            model.of(old).uses.append(reader.work())
            del old
            model.look()
            del packed
        del tensor
        model.look()
        while held and chance.random() < 0.45:
            held.rotate(-chance.randrange(len(held)) if chance.random() < 0.4 else 0)
            packed, stream, value = held.pop()
            if chance.random() < 0.2:
                del packed  # its graph is dropped
                continue
            if chance.random() < 0.3:  # used on another stream than it was saved on
                stream = chance.choice(ways)
            model.current = stream
            for _ in range(chance.choice((1, 1, 2))):
                use(model, stash, packed, value)
            del packed
            model.look()
    held.clear()
    later.clear()
    model.look()


def use(model: Model, stash: Stash, packed: Any, value: float) -> None:
    view = stash.unpack(packed)
    memory, current = model.of(view), model.current
    if memory.uses[1:] and memory.uses[1][0] == "up":
        model.check(model.comes_after(current.clock, memory.uses[1]), "used before it had come")
    elif current is not memory.owner:
        view.record_stream(current)  # it never moved: the program's own to record
    memory.uses.append(current.work())
    assert float(view[0, 0]) == value
    del view
    model.look()


OPTIONS: dict[str, dict[str, Any]] = {
    "all at once": {"host": "64MiB"},
    "no windows": {"host": "64MiB", "inflight": 0, "prefetch": 0},
    "small windows": {"host": "64MiB", "inflight": 2 * BLOCK, "prefetch": 2 * BLOCK},
    "kept": {"keep": 4 * BLOCK, "host": "64MiB", "inflight": BLOCK, "prefetch": 3 * BLOCK},
}


@pytest.mark.parametrize("streams", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("blocks", [0, 3])
def test_nothing_is_used_before_or_after_its_time(
    played, blocks: int, name: str, streams: int
) -> None:
    """Each copy begins at once, or with others up to this many blocks."""
    died: set[str] = set()
    grouped: set[str] = set()
    for seed in range(12):
        chance = (0.0, 0.1, 0.6)[seed % 3]
        model, stash = played(seed, chance, blocks * BLOCK, **OPTIONS[name])
        program(model, stash, streams)
        assert not model.faults, f"seed {seed}: {sorted(set(model.faults))}"
        assert stash.stats().written_bytes > 0
        stash.close()
        died |= model.died
        grouped |= model.grouped
    has_room = OPTIONS[name].get("inflight", 2 * BLOCK) >= 2 * BLOCK
    assert (blocks > 0 and has_room) <= ("down" in grouped) <= (blocks > 0)
    wanted = {"down", "up"} if OPTIONS[name].get("prefetch") != 0 else {"down"}
    assert died == (wanted if OPTIONS[name].get("inflight") != 0 else set()), "both kinds die early"


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("silent", ["down", "up"])
def test_a_copy_that_dies_and_frees_its_memory_is_detected(
    played, silent: str, streams: int
) -> None:
    faults: set[str] = set()
    for seed in range(6):
        model, stash = played(seed, chance=0.0, **OPTIONS["small windows"])
        model.silent = silent
        program(model, stash, streams)
        stash.close()
        faults |= set(model.faults)
    found = [fault for fault in faults if fault.endswith(f" goes while {silent} may use it")]
    assert found, faults
