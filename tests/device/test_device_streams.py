"""What an accelerator is asked to do, and in which order: played by streams that only write it down."""

import functools
import gc
import os
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch

from backstash import Stash
from backstash._device import accelerator as _accelerator
from backstash._device.accelerator import Accelerator, accelerator
from backstash._device.copies import Lane
from backstash._torch import streams as _streams
from backstash._torch.streams import capture_query


class FakeEvent:
    def __init__(self, log, stream):
        self.log, self.stream, self.has_ended = log, stream, False

    def query(self):
        self.log.append(("asked", self.stream))
        return self.has_ended

    def synchronize(self):
        self.log.append(("the host waits for", self.stream))
        self.has_ended = True


class FakeStream:
    def __init__(self, log, name, current=None):
        self.log, self.name, self.events, self.current = log, name, [], current

    def __ne__(self, other):
        return other is not None and self is not other  # as torch.Stream

    def record_event(self):
        self.events.append(FakeEvent(self.log, self.name))
        self.log.append(("event on", self.name))
        return self.events[-1]

    def wait_event(self, event):
        self.log.append((self.name, "waits for", event.stream))

    def synchronize(self):
        self.log.append(("the host waits for", self.name))
        for event in self.events:
            event.has_ended = True

    def __enter__(self):
        self.before, self.current[0] = self.current[0], self
        self.log.append(("current is", self.name))

    def __exit__(self, *error):
        self.current[0] = self.before
        self.log.append(("current is", self.before.name))


@pytest.fixture
def recorded(monkeypatch):
    """The streams that memory was recorded on, each with where the memory is."""
    found = []

    def record(tensor, stream):
        found.append((tensor.untyped_storage().data_ptr(), stream.name))

    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    return found


def address_of(tensor):
    return tensor.untyped_storage().data_ptr()


@pytest.fixture
def played(monkeypatch, recorded):
    """A device whose streams are fakes and whose memory is the CPU's; and the log of what was asked."""
    log = []
    compute = FakeStream(log, "compute")
    current = [compute]
    names = iter(["down", "up", "asking"])

    monkeypatch.setattr(torch, "Stream", lambda device: FakeStream(log, next(names), current))
    monkeypatch.setattr(_accelerator, "current_stream", lambda index: current[0])
    empty = torch.empty

    def logged(*args, **kwargs):
        log.append(("memory on", current[0].name))
        return empty(*args, **kwargs)

    device = Accelerator(torch.device("cpu"))
    device.group_bytes = 0  # each copy begins at once
    monkeypatch.setattr(torch, "empty", logged)
    return device, log, compute, current


def bytes_of(value, count=64):
    return torch.full((count,), value, dtype=torch.uint8)


def test_a_copy_down_comes_after_what_made_its_source(played):
    device, log, compute, _ = played
    target = bytes_of(0)
    copy = device.down(bytes_of(7), target, compute)
    assert log == [
        ("event on", "compute"),
        ("down", "waits for", "compute"),
        ("current is", "down"),
        ("event on", "down"),
        ("current is", "compute"),
    ]
    assert torch.equal(target, bytes_of(7))
    assert not copy.done() and not copy.ended()
    copy.completion.event.has_ended = True
    assert copy.done() and copy.ended()
    log.clear()
    copy.order()
    assert copy.done() and copy.ended() and log == [], "what is known is not asked again"
    copy = device.down(bytes_of(7), target, compute)
    assert not copy.cancel(), "it has begun"
    assert copy.error is None and copy.ends_in_order is True


def test_ordering_a_copy_asks_the_stream_and_never_the_host(played):
    device, log, compute, _ = played
    copy = device.down(bytes_of(7), bytes_of(0), compute)
    log.clear()
    copy.order()
    assert log == [("compute", "waits for", "down")]
    assert copy.done(), "the memory may go: what the stream does next comes after the copy"
    assert not copy.ended(), "and a worker may not read it yet"
    copy.wait()
    assert log[-1] == ("the host waits for", "down")


def test_waiting_for_a_copy_as_for_any_transfer_orders_the_stream_and_not_the_host(played):
    device, log, compute, _ = played
    copy = device.down(bytes_of(7), bytes_of(0), compute)
    log.clear()
    assert copy.exception() is None and copy.done()
    assert log == [("compute", "waits for", "down")]


def test_memory_of_another_stream_is_recorded_there(played, recorded):
    device, log, compute, current = played
    source = bytes_of(7)
    copy = device.down(source, bytes_of(0), compute)
    current[0] = FakeStream(log, "other")
    copy.order()
    assert recorded == [(address_of(source), "down")]
    recorded.clear()
    current[0] = compute
    copy.order()
    assert recorded == [], "only where it is needed: it delays reuse"
    copy = device.down(bytes_of(7), bytes_of(0), compute)
    copy.completion.event.has_ended = True
    current[0] = FakeStream(log, "third")
    copy.order()
    assert recorded == [], "its memory has been read"


# A copy that dies.


def test_the_memory_of_a_copy_down_that_dies_before_it_has_ended_is_the_device_s_until_then(
    played, recorded
):
    """The next copy that begins frees it, if it has ended: nothing is asked or recorded where it dies."""
    device, log, compute, _ = played
    source = bytes_of(7)
    copy = device.down(source, bytes_of(0), compute)
    at, alive = address_of(source), weakref.ref(source.untyped_storage())
    completion = copy.completion
    log.clear()
    del source
    assert recorded == [] and alive() is not None
    del copy
    assert [address_of(memory) for _, memory in device.unfinished] == [at]
    assert device.unfinished_bytes() == 64
    assert alive() is not None and recorded == [] and log == []
    assert not completion.ended()
    device.up(bytes_of(3), None)
    assert alive() is not None, "the device still uses it"
    completion.event.has_ended = True
    device.up(bytes_of(3), None)
    assert completion.ended() and alive() is None


@pytest.mark.parametrize("has_ended", [False, True])
def test_the_memory_of_a_copy_up_that_no_one_used_is_free_after_its_owner_waits(
    played, recorded, has_ended
):
    """The next copy that begins frees it. A host that is ahead would hold it as long as it is ahead."""
    device, log, _, _ = played
    before = device.down(bytes_of(7), bytes_of(0), device.stream())
    copy = device.up(bytes_of(7), None)
    at, alive = address_of(copy.memory), weakref.ref(copy.memory.untyped_storage())
    completion = copy.completion
    completion.event.has_ended = has_ended
    log.clear()
    del copy, before
    assert [address_of(memory) for _, memory, _ in device.dropped] == [at]
    assert device.unfinished_bytes() == 128
    assert alive() is not None and recorded == [] and log == []
    device.is_capturing = lambda: True
    device.sweep()
    assert alive() is not None and log == [], "a graph of the device is captured"
    device.is_capturing = lambda: False
    another = device.down(bytes_of(3), bytes_of(0), device.stream())
    assert alive() is None and recorded == [] and device.unfinished_bytes() == 64
    assert not another.ended()
    assert log.count(("compute", "waits for", "up")) == (not has_ended)
    assert not [each for each in log if each[0] == "the host waits for"]


@pytest.mark.parametrize("way", ["down", "up"])
@pytest.mark.parametrize("end", ["ended", "done", "order"])
def test_a_copy_that_dies_when_its_memory_may_go_records_nothing(played, recorded, way, end):
    device, _, compute, _ = played
    copy = (
        device.down(bytes_of(7), bytes_of(0), compute)
        if way == "down"
        else device.up(bytes_of(7), None)
    )
    copy.completion.event.has_ended = end != "order"
    getattr(copy, end)()
    alive = weakref.ref(copy)
    del copy
    assert alive() is None and recorded == []


def test_a_copy_that_was_looked_at_too_early_is_unfinished_when_it_dies(played):
    device, _, compute, _ = played
    copy = device.down(bytes_of(7), bytes_of(0), compute)
    assert not copy.ended() and not copy.done() and not copy.completion.ended()
    del copy
    assert len(device.unfinished) == 1


def test_of_many_unfinished_copies_the_first_that_has_not_ended_is_asked_and_no_other(played):
    device, log, compute, _ = played
    copies = [device.down(bytes_of(7), bytes_of(0), compute) for _ in range(50)]
    for copy in copies[:20]:
        copy.completion.event.has_ended = True
    del copy
    copies.reverse()
    while copies:
        copies.pop()
    log.clear()
    copy = device.up(bytes_of(3), None)
    assert log.count(("asked", "down")) == 21 and len(device.unfinished) == 30
    copy.wait()


def test_without_memory_what_no_graph_needs_is_waited_for(played, monkeypatch):
    device, log, compute, _ = played
    device.down(bytes_of(7), bytes_of(0), compute)
    empty, refused = torch.empty, [torch.OutOfMemoryError("none left")]

    def refusing(*size, **options):
        if refused:
            raise refused.pop()
        return empty(*size, **options)

    source = bytes_of(3)
    monkeypatch.setattr(torch, "empty", refusing)
    log.clear()
    copy = device.up(source, None)
    assert ("the host waits for", "down") in log and not device.unfinished
    refused.append(torch.OutOfMemoryError("none left"))
    with pytest.raises(torch.OutOfMemoryError):
        device.up(source, None)
    monkeypatch.undo()
    copy.wait()


def test_an_interrupt_while_one_is_asked_leaves_its_memory_with_the_device(played):
    device, _, compute, _ = played
    copy = device.down(bytes_of(7), bytes_of(0), compute)
    event = copy.completion.event

    def interrupted():
        raise KeyboardInterrupt

    event.query = interrupted
    del copy
    with pytest.raises(KeyboardInterrupt):
        device.up(bytes_of(3), None)
    assert len(device.unfinished) == 1


@pytest.mark.parametrize("way", ["down", "up"])
def test_the_completion_of_a_copy_owns_no_memory(played, way):
    """It outlives the copy, in what waits to give back the host's end: that is its caller's to own."""
    device, _, compute, _ = played
    host = bytes_of(0)
    copy = (
        device.down(bytes_of(7), host, compute) if way == "down" else device.up(bytes_of(7), None)
    )
    alive = [weakref.ref(each.untyped_storage()) for each in (host, copy.memory)]
    completion = copy.completion
    del host, copy
    device.unfinished.clear()
    device.dropped.clear()
    assert [each() for each in alive] == [None, None]
    completion.wait()
    assert completion.ended()


def test_a_copy_that_was_waited_for_records_nothing_when_it_dies(played, recorded):
    device, log, compute, _ = played
    copy = device.down(bytes_of(7), bytes_of(0), compute)
    copy.wait()
    assert log[-1] == ("the host waits for", "down")
    del copy
    assert recorded == []


def test_a_copy_s_end_is_a_call_of_c_that_no_mode_sees(played):
    """An interrupt that came in Python there would be printed and lost: see ``_runtime/reclaim``.

    An operator is no such call: a function or dispatch mode that is active there runs Python.
    """
    device, _, compute, _ = played
    source = bytes_of(7)
    down, up = device.down(source, bytes_of(0), compute), device.up(bytes_of(7), None)
    for copy, mine, dead in ((down, source, device.unfinished), (up, up.memory, device.dropped)):
        end = copy.__del__
        assert type(end) is functools.partial and not end.keywords
        assert end.func.__self__ is dead and end.func.__name__ == "append"
        ((event, memory, *_),) = end.args
        assert memory is mine and event is copy.completion.event
        copy.order()
        assert copy.__del__ is tuple


def test_a_copy_is_in_no_cycle(played, recorded):
    """Its memory goes when its block dies, and not when the collector comes round."""
    device, _, compute, _ = played
    gc.collect()
    gc.disable()
    try:
        for end in (lambda copy: None, lambda copy: copy.order(), lambda copy: copy.wait()):
            for make in (
                lambda: device.down(bytes_of(7), bytes_of(0), compute),
                lambda: device.up(bytes_of(7), None),
            ):
                copy = make()
                end(copy)
                alive = weakref.ref(copy)
                del copy
                assert alive() is None
    finally:
        gc.enable()


@pytest.fixture
def stash(played):
    """Tensors of the CPU are the played device's to it."""
    device = played[0]
    device.free_bytes, device.failures = lambda: 1 << 40, lambda: 0
    made = Stash(host="1MiB", min_bytes=0, prefetch=0)
    made._session.put(torch.device("cpu"), made._config.tiers(device, 1))
    yield made
    made.close()


def test_a_graph_that_is_dropped_while_it_is_copied_leaves_its_memory_until_the_copy_has_ended(
    played, recorded, stash
):
    device = played[0]
    with stash:
        y = torch.ones(1024, requires_grad=True).exp()
    at, alive = address_of(y), weakref.ref(y.untyped_storage())
    recorded.clear()
    del y
    assert alive() is not None and recorded == []
    assert [address_of(memory) for _, memory in device.unfinished] == [at]
    assert len(stash._session.reclaim_queue) == 2, "the block's cleanup, and the backing's"
    assert stash.stats().host_bytes == 4096, "which the copy fills still"
    device.finish()
    assert stash.stats().host_bytes == 0
    with stash:
        torch.ones(1024, requires_grad=True).exp()
    assert alive() is None


def test_what_was_brought_back_for_nobody_leaves_its_memory_until_it_has_come(
    played, recorded, stash
):
    device = played[0]
    with stash:
        y = torch.ones(1024, requires_grad=True).exp()
    block = y.grad_fn._raw_saved_result.data.block
    device.finish()
    stash.stats()
    with stash._session.section.lock, stash._session.section:
        load, _ = stash._session.device_tiers[1].prefetcher.load(block)
    at, alive = address_of(load.memory), weakref.ref(load.memory.untyped_storage())
    recorded.clear()
    del y, block, load
    assert alive() is not None and recorded == []
    assert [address_of(memory) for _, memory, _ in device.dropped] == [at]
    assert stash.stats().host_bytes == 4096, "which the copy reads still"
    device.finish()
    assert stash.stats().host_bytes == 0


def test_memory_that_autograd_would_hold_waits_for_every_stream_that_saves(
    played, recorded, monkeypatch
):
    """The stream that asked for it is unknown, and so are those that still read it."""
    device, log, _, current = played
    source = bytes_of(7)
    at = address_of(source)
    device.used(source)
    device.used(source)
    assert recorded == [(at, "compute")] * 2, "nothing where that stream has asked for it"
    recorded.clear()
    current[0] = FakeStream(log, "other")
    device.used(source)
    assert recorded == [(at, "compute"), (at, "other")], "it may have been asked for on a third"
    named = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, _: named.append(tensor))
    device.used(source)
    assert named[0] is named[1] is source, "nothing is made for it"
    named.clear()
    device.is_capturing = lambda: True
    device.used(source)
    assert named == [], "what is saved in a capture stays"


@pytest.mark.parametrize("view", [torch.conj, lambda z: z.conj().imag])
def test_of_a_conjugate_or_negative_view_its_memory_is_named(played, monkeypatch, view):
    """PyTorch would name that of a copy without the bit, and write past the end of what it returns."""
    device, named = played[0], []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: named.append(tensor))
    tensor = view(torch.zeros(3, dtype=torch.complex64))
    assert tensor.is_conj() or tensor.is_neg()
    device.used(tensor)
    (memory,) = named
    assert not memory.is_conj() and not memory.is_neg()
    assert memory.untyped_storage()._cdata == tensor.untyped_storage()._cdata


def test_what_came_is_recorded_on_each_other_stream_that_uses_it(played, recorded):
    """Also where the copy ended long ago: its memory goes back to the stream it was asked for on."""
    device, log, _, current = played
    copy = device.up(bytes_of(7), None)
    at = address_of(copy.memory)
    copy.order()
    assert recorded == []
    current[0] = FakeStream(log, "other")
    copy.order()
    assert recorded == [(at, "other")], "it waits for the copy, and so do all that wait for it"
    copy.completion.event.has_ended = True
    recorded.clear()
    current[0] = FakeStream(log, "third")
    copy.order()
    assert recorded == [(at, "third")]


def test_while_a_graph_is_captured_no_event_is_asked(played, recorded):
    device, log, compute, _ = played
    copy = device.down(bytes_of(7), bytes_of(0), compute)
    copy.completion.event.has_ended = True
    device.is_capturing = lambda: True
    log.clear()
    assert not copy.ended() and not copy.done() and not copy.completion.ended()
    assert log == []
    device.is_capturing = lambda: False
    assert copy.ended() and copy.done() and log == [("asked", "down")]
    device.is_capturing = lambda: True
    assert copy.ended() and copy.completion.ended(), "what is known need not be asked"
    device.is_capturing = lambda: False
    copy = device.down(bytes_of(7), bytes_of(0), compute)
    copy.completion.event.has_ended = True
    device.is_capturing = lambda: True
    recorded.clear()
    log.clear()
    del copy
    assert log == [] and len(device.unfinished) == 1, "which asks no event"


def test_without_memory_on_the_device_that_is_said_and_nothing_waited_for(played, monkeypatch):
    """What died has been given back: the allocator knows of it, and waits for it itself."""
    device, log, *_ = played
    refused = []

    def none(*args, **kwargs):
        refused.append(0)
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(torch, "empty", none)
    with pytest.raises(torch.OutOfMemoryError):
        device.up(bytes_of(7), None)
    assert (refused, log) == ([0], [])


def test_a_copy_up_fills_memory_of_the_current_stream(played):
    device, log, compute, _ = played
    down = device.down(bytes_of(7), bytes_of(0), compute)
    log.clear()
    copy = device.up(down.memory, down.completion)
    assert log == [
        ("memory on", "compute"),
        ("event on", "compute"),
        ("up", "waits for", "compute"),
        ("up", "waits for", "down"),
        ("current is", "up"),
        ("event on", "up"),
        ("current is", "compute"),
    ]
    assert torch.equal(copy.memory, bytes_of(7))
    assert copy.memory._version == 0, "nobody changed it: the next use may share it"
    copy.order()
    assert log[-1] == ("compute", "waits for", "up")


def test_the_stream_is_put_back_when_a_copy_fails(played, monkeypatch):
    device, log, compute, current = played

    def fail(*args, **kwargs):
        raise RuntimeError("no")

    monkeypatch.setattr(torch.Tensor, "copy_", fail)
    with pytest.raises(RuntimeError, match="no"):
        device.down(bytes_of(7), bytes_of(0), compute)
    assert current[0] is compute
    assert log[-2:] == [("current is", "compute"), ("the host waits for", "down")], (
        "it may have begun"
    )
    log.clear()
    device.finish()
    assert not [each for each in log if each[0] == "current is"], "and it is not begun again"


@pytest.mark.parametrize("way", ["down", "up"])
def test_an_interrupt_after_a_copy_began_has_it_begun_again(played, monkeypatch, way):
    """Its caller does not have it, and nobody has its event: until it has one, its memory stays."""
    device, log, compute, current = played
    copies, seen = torch.Tensor.copy_, []

    def interrupted(memory, source, **options):
        copies(memory, source)
        seen.extend(weakref.ref(each.untyped_storage()) for each in (memory, source))
        raise KeyboardInterrupt

    def begin():
        if way == "down":
            return device.down(bytes_of(7), bytes_of(0), compute)
        return device.up(bytes_of(7), None)

    monkeypatch.setattr(torch.Tensor, "copy_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        begin()
    assert current[0] is compute and all(each() is not None for each in seen)
    monkeypatch.setattr(torch.Tensor, "copy_", copies)
    log.clear()
    device.finish()
    assert log.count(("event on", way)) == 1 and ("the host waits for", way) in log
    assert seen[way == "up"]() is None, "the caller owns the host's end, and has freed it"
    device.sweep()
    assert [each() for each in seen] == [None, None]
    log.clear()
    device.finish()
    assert ("event on", way) not in log, "once"


@pytest.mark.parametrize("way", ["down", "up"])
def test_an_interrupt_after_the_event_does_not_begin_a_group_again(played, monkeypatch, way):
    """From then on it is complete, and its source may change."""
    device, log, compute, _ = played
    device.group_bytes = 1 << 20
    source, target = bytes_of(7), bytes_of(0)
    copy = device.down(source, target, compute) if way == "down" else device.up(source, None)
    lane = copy.completion.lane

    class Interrupted(type(lane)):
        __slots__ = ()

        def __setattr__(self, name, value):
            if name == "group":
                raise KeyboardInterrupt
            super().__setattr__(name, value)

    plain, lane.__class__ = type(lane), Interrupted
    with pytest.raises(KeyboardInterrupt):
        device.begin()
    lane.__class__ = plain
    copy.completion.event.has_ended = True
    assert copy.done()
    source.fill_(9)
    again = device.down(source, target, compute) if way == "down" else device.up(source, None)
    assert again.completion is not copy.completion and not again.done()
    assert torch.equal(copy.memory, bytes_of(7)) and log.count(("event on", way)) == 1


# Copies that begin together.


def test_small_copies_begin_together_with_one_event_before_and_one_after(played):
    device, log, compute, _ = played
    device.group_bytes = 4 * 64
    targets = [bytes_of(0) for _ in range(4)]
    first = [device.down(bytes_of(at), targets[at], compute) for at in range(3)]
    assert log == [] and not any(copy.done() or copy.ended() for copy in first)
    last = device.down(bytes_of(3), targets[3], compute)
    assert log == [
        ("event on", "compute"),
        ("down", "waits for", "compute"),
        ("current is", "down"),
        ("event on", "down"),
        ("current is", "compute"),
    ]
    assert all(torch.equal(target, bytes_of(at)) for at, target in enumerate(targets))
    last.completion.event.has_ended = True
    log.clear()
    assert all(copy.done() for copy in (*first, last)) and log == [("asked", "down")]
    ups = [
        device.up(target, copy.completion)
        for target, copy in zip(targets, (*first, last), strict=True)
    ]
    log[:] = [each for each in log if each[0] != "memory on"]
    assert log[1:] == [
        ("event on", "compute"),
        ("up", "waits for", "compute"),
        ("current is", "up"),
        ("event on", "up"),
        ("current is", "compute"),
    ], "the copies down are known to have ended"
    log.clear()
    for copy in ups:
        copy.order()
    assert log == [("compute", "waits for", "up")], "once for all of them"


@pytest.mark.parametrize("need", ["order", "wait", "exception", "begin", "finish"])
def test_what_is_needed_begins(played, need):
    device, _, compute, _ = played
    device.group_bytes = 1 << 20
    target = bytes_of(0)
    copy = device.down(bytes_of(7), target, compute)
    assert not copy.ended()
    getattr(copy if need in ("order", "wait", "exception") else device, need)()
    assert torch.equal(target, bytes_of(7))


def test_a_copy_up_begins_the_copy_down_that_fills_its_source(played):
    device, log, compute, _ = played
    device.group_bytes = 1 << 20
    down = device.down(bytes_of(7), bytes_of(0), compute)
    up = device.up(down.memory, down.completion)
    assert log == [("memory on", "compute")]
    up.order()
    assert torch.equal(up.memory, bytes_of(7))
    assert log.index(("event on", "down")) < log.index(("up", "waits for", "down"))
    assert log[-1] == ("compute", "waits for", "up")


def test_copies_of_two_streams_do_not_begin_together(played):
    device, log, compute, _ = played
    device.group_bytes = 1 << 20
    other = FakeStream(log, "other")
    first = device.down(bytes_of(7), bytes_of(0), compute)
    second = device.down(bytes_of(7), bytes_of(0), other)
    assert ("down", "waits for", "compute") in log and ("down", "waits for", "other") not in log
    assert first.completion is not second.completion


def test_what_is_larger_than_a_group_does_not_wait(played):
    device, _, compute, _ = played
    device.group_bytes = 128
    small, large = bytes_of(0), bytes_of(0, 256)
    first = device.down(bytes_of(1), small, compute)
    second = device.down(bytes_of(2, 256), large, compute)
    assert torch.equal(small, bytes_of(1)) and torch.equal(large, bytes_of(2, 256))
    assert first.completion is not second.completion


def test_nothing_that_waits_begins_in_a_capture(played):
    device, log, compute, _ = played
    device.group_bytes = 1 << 20
    copy = device.down(bytes_of(7), bytes_of(0), compute)
    device.is_capturing = lambda: True
    device.begin()
    assert log == [] and not copy.done()
    device.is_capturing = lambda: False
    device.begin()
    assert ("event on", "down") in log


def test_a_copy_that_dies_while_it_waits_frees_its_memory_with_its_group(played):
    device, _, compute, _ = played
    device.group_bytes = 1 << 20
    source = bytes_of(7)
    alive = weakref.ref(source.untyped_storage())
    copy = device.down(source, bytes_of(0), compute)
    completion = copy.completion
    del source, copy
    assert alive() is not None and not device.unfinished and not completion.ended()
    device.begin()
    assert alive() is not None and len(device.unfinished) == 1
    completion.wait()
    device.sweep()
    assert alive() is None and completion.ended()


@pytest.mark.parametrize("later", [0, 128])
def test_a_source_that_was_resized_while_it_waited_is_not_copied(played, later):
    """The others of its group are. Resizing raises no version."""
    device, _, compute, _ = played
    device.group_bytes = 1 << 20
    targets = [bytes_of(0) for _ in range(3)]
    sources = [bytes_of(at + 1) for at in range(3)]
    copies = [
        device.down(source, target, compute)
        for source, target in zip(sources, targets, strict=True)
    ]
    sources[1].untyped_storage().resize_(later)
    device.begin()
    assert [copy.was_skipped for copy in copies] == [False, True, False]
    assert [int(target[0]) for target in targets] == [1, 0, 3]
    assert device.up(targets[0], copies[0].completion).was_skipped is False


def test_copies_do_not_block(played, monkeypatch):
    device, _, compute, _ = played
    asked, copies = [], torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor,
        "copy_",
        lambda memory, source, non_blocking=False: (
            asked.append(non_blocking) or copies(memory, source)
        ),
    )
    device.up(device.down(bytes_of(7), bytes_of(0), compute).memory, None)
    assert asked == [True, True]


def test_a_device_says_its_name_and_whether_it_is_captured(played, monkeypatch):
    device = played[0]
    assert device.name == "cpu" and device._pid == os.getpid()
    assert device.is_capturing() is False, "a device without graphs"
    for answer in (True, False):
        module = SimpleNamespace(is_current_stream_capturing=lambda answer=answer: answer)
        device.is_capturing = capture_query(module)
        assert device.is_capturing() is answer
    assert capture_query(torch.cuda) is torch._C._cuda_isCurrentStreamCapturing, (
        "without a call around it"
    )
    monkeypatch.setattr(_streams, "_cuda_query", None)
    assert capture_query(torch.cuda) is torch.cuda.is_current_stream_capturing


@pytest.fixture
def whole(played, monkeypatch):
    """As ``played``, but of a device that has all that a stash needs: ``torch.accelerator`` is it."""
    log = played[1]
    here = torch.device("cpu")
    accelerator = torch.accelerator
    monkeypatch.setattr(_accelerator, "_tried_out", set())
    monkeypatch.setattr(accelerator, "current_accelerator", lambda *_: here)
    monkeypatch.setattr(torch, "Stream", lambda device: FakeStream(log, "copier", played[3]))
    monkeypatch.setattr(accelerator, "get_memory_info", lambda device: (1, 2), raising=False)
    monkeypatch.setattr(accelerator, "memory_stats", lambda device: {})
    return lambda: _accelerator.accelerator(here)


def test_a_device_is_tried_out_before_it_is_used(whole, played, monkeypatch):
    asked, log = [], played[1]
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: asked.append(stream.name)
    )
    log.clear()
    assert isinstance(whole(), Accelerator)
    assert asked == ["compute"] and ("the host waits for", "copier") in log
    assert log[-1] == ("compute", "waits for", "copier"), "what has come up is compared"
    log.clear()
    assert isinstance(whole(), Accelerator) and log == [], "once: the next stash waits for nothing"
    _accelerator._tried_out.clear()
    monkeypatch.setattr(_accelerator, "capture_query", lambda module: lambda: True)
    assert isinstance(whole(), Accelerator) and log == [], "a capture would end"
    monkeypatch.undo()


@pytest.mark.parametrize(
    "what, name, error",
    [
        (torch, "Stream", RuntimeError("none here\nand what C++ has to say")),
        (torch.Tensor, "record_stream", NotImplementedError("none here")),
        (torch.accelerator, "memory_stats", RuntimeError("none here")),
        (torch.accelerator, "get_memory_info", ValueError("none here")),
        (_accelerator, "current_stream", TypeError("none here")),
        (FakeStream, "wait_event", AttributeError("none here")),
        (Accelerator, "failures", RuntimeError("none here")),
    ],
)
def test_what_lacks_something_has_a_reason(whole, monkeypatch, what, name, error):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(what, name, refuse)
    assert whole() == "device cpu lacks what a stash needs: none here"


@pytest.mark.parametrize("way", [0, 1])
def test_a_device_whose_copies_are_wrong_is_not_used(whole, monkeypatch, way):
    copies, begun = torch.Tensor.copy_, []

    def wrong(memory, source, non_blocking=False):
        copies(memory, source)
        if non_blocking:
            begun.append(True)
            if len(begun) == 1 + way:
                memory[-1] += 1

    monkeypatch.setattr(torch.Tensor, "copy_", wrong)
    assert whole() == (
        "device cpu lacks what a stash needs: a copy on another stream returned different bytes"
    )


def test_a_device_without_memory_is_used_all_the_same(whole, monkeypatch):
    def full(self, nbytes):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(Accelerator, "_empty", full)
    assert isinstance(whole(), Accelerator) and not _accelerator._tried_out, "the next stash tries"


def test_an_allocator_s_warning_about_a_tensor_s_own_stream_is_suppressed(whole, monkeypatch):
    def record(tensor, stream):
        warnings.warn("its own stream", UserWarning, stacklevel=1)

    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    filters = [*warnings.filters]
    assert isinstance(whole(), Accelerator)
    assert warnings.filters == filters, "other warnings are shown as before"


def test_another_device_than_the_accelerator_has_none(monkeypatch):
    assert accelerator(torch.device("meta")) == "device meta"
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch, "Stream", lambda device: FakeStream([], "of another kind"))
    assert accelerator(torch.device("cpu")) == "device cpu"


REFUSAL = "cudaHostRegister answers 2: out of it"


@pytest.mark.parametrize("status, reason", [(0, ""), (2, REFUSAL)])
def test_pinning_is_by_registering_and_says_what_was_answered(monkeypatch, status, reason):
    asked = []

    class Runtime:
        def cudaHostRegister(self, address, nbytes, flags):
            asked.append((address, nbytes, flags))
            return status

        def cudaHostUnregister(self, address):
            asked.append(address)
            return status

        def cudaGetErrorString(self, status):
            return "out of it"

    class Module:
        @staticmethod
        def cudart():
            return Runtime()

    device = Accelerator.__new__(Accelerator)
    device._device = torch.device("cuda", 0)
    device._module = Module
    device._down, device._up = Lane(FakeStream(asked, "down")), Lane(FakeStream(asked, "up"))
    device._pid = os.getpid()
    memory, zeros = torch.zeros(4096, dtype=torch.uint8), torch.zeros
    launched, fails = [], []

    def launch(*size, device):
        launched.append(device)
        if fails:
            raise RuntimeError("out of it")
        return zeros(*size)

    monkeypatch.setattr(torch, "zeros", launch)
    assert device.pin(memory) == reason
    assert len(launched) == bool(reason), "the next kernel is not blamed for what was refused"
    device._pid += 1
    device.unpin(memory)
    assert len(asked) == 1, "what the parent of a fork pinned is the parent's to unpin"
    device._pid -= 1
    fails.append("that kernel is blamed, and nothing is reported")
    device.unpin(memory)
    cuda_host_register_portable = 1
    assert asked == [
        (memory.data_ptr(), 4096, cuda_host_register_portable),
        ("the host waits for", "down"),
        ("the host waits for", "up"),
        memory.data_ptr(),
    ]
    assert len(launched) == 2 * bool(reason)


def test_pinned_memory_that_pytorch_caches_is_released(monkeypatch):
    asked = []
    monkeypatch.delattr(torch.accelerator, "empty_host_cache", raising=False)
    monkeypatch.delattr(torch._C, "_host_emptyCache", raising=False)
    _accelerator.empty_host_cache()
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: asked.append("cuda"), raising=False)
    _accelerator.empty_host_cache()
    assert asked == ["cuda"], "torch 2.11's"
    monkeypatch.setattr(
        torch.accelerator, "empty_host_cache", lambda: asked.append("any"), raising=False
    )
    _accelerator.empty_host_cache()
    assert asked == ["cuda", "any"]


def test_where_nothing_can_be_registered_pytorch_pins(monkeypatch):
    device = Accelerator.__new__(Accelerator)
    device._device, device._pid = torch.device("xpu", 0), os.getpid()
    asked = []
    device._down, device._up = Lane(FakeStream(asked, "down")), Lane(FakeStream(asked, "up"))
    monkeypatch.setattr(_accelerator, "empty_host_cache", lambda: asked.append("cache emptied"))
    empty = torch.empty

    def pins(*size, pin_memory=False, **rest):
        if pin_memory:
            asked.append("pinned")
        return empty(*size, **rest)

    memory = torch.zeros(4096, dtype=torch.uint8)
    assert device.pin(memory) == "xpu cannot lock memory that exists"
    monkeypatch.setattr(torch, "empty", pins)
    own = device.pinned(4096)
    assert asked == ["pinned"]
    assert (own.numel(), own.dtype, own.device.type) == (4096, torch.uint8, "cpu")
    device._pid += 1
    device.give_back(own)
    assert own.numel() == 4096 and len(asked) == 1, "a forked process has no device"
    device._pid -= 1
    device.give_back(own)
    waits = [("the host waits for", "down"), ("the host waits for", "up")]
    assert own.numel() == 0 and asked[1:] == [*waits, "cache emptied"]
    device.unpin(memory)
    assert asked[4:] == waits, "what is not pinned may be copied to, all the same"

    def refuses(*size, **rest):
        raise RuntimeError("there is none\nand what C++ has to say")

    monkeypatch.setattr(torch, "empty", refuses)
    assert device.pinned(4096) == "there is none"


def test_free_memory_is_what_the_process_may_still_take(monkeypatch):
    gib = 1 << 30
    shares = [1.0]

    class Module:
        get_per_process_memory_fraction = staticmethod(lambda device: shares[0])

    statistics = {"reserved_bytes.all.current": 6 * gib, "active_bytes.all.current": 2 * gib}
    monkeypatch.setattr(
        torch.accelerator, "get_memory_info", lambda device: (10 * gib, 20 * gib), raising=False
    )
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device: statistics)
    device = Accelerator.__new__(Accelerator)
    device._device, device._module = torch.device("cuda", 0), Module
    assert device.free_bytes() == 14 * gib, "with what the allocator keeps"
    shares[0] = 0.5
    assert device.free_bytes() == 8 * gib, "and no more than the process is allowed"
    statistics.clear()
    assert device.free_bytes() == 10 * gib, "an allocator that does not count"
    device._module = SimpleNamespace(mem_get_info=lambda device: (3 * gib, 20 * gib))
    assert device.free_bytes() == 10 * gib, "a device without shares"
    monkeypatch.delattr(torch.accelerator, "get_memory_info")
    assert device.free_bytes() == 3 * gib, "a torch without the common call"


def test_failures_are_the_allocator_s_count(monkeypatch):
    statistics = {"num_ooms": 3}
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device: statistics)
    device = Accelerator.__new__(Accelerator)
    device._device = torch.device("cuda", 0)
    assert device.failures() == 3
    statistics.clear()
    assert device.failures() == 0, "cudaMallocAsync's does not count"


def test_a_backward_that_loads_nothing_releases_copies_that_have_ended(played, stash):
    """Copies that began early of blocks that stayed: nothing else looks at them before the next forward."""
    device = played[0]
    stash.set_keep(None)
    x = torch.ones(1024, requires_grad=True)
    with stash:
        loss = x.exp().exp().sum()
    copy = device.down(bytes_of(7), bytes_of(0), device.stream())
    event = copy.completion.event
    del copy
    event.has_ended = True
    loss.backward()
    assert not device.unfinished
