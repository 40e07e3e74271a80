"""What an accelerator is asked to do, and in which order: played by streams that only write it down."""

import gc

import pytest
import torch

from backstash import _streams
from backstash._streams import Accelerator, accelerator


class FakeEvent:
    def __init__(self, log, stream):
        self.log, self.stream, self.has_ended = log, stream, False

    def query(self):
        return self.has_ended

    def synchronize(self):
        self.log.append(("the host waits for", self.stream))
        self.has_ended = True


class FakeStream:
    made = 0

    def __init__(self, log, name):
        self.log, self.name, self.events = log, name, []

    def record_event(self):
        self.events.append(FakeEvent(self.log, self.name))
        self.log.append(("event on", self.name))
        return self.events[-1]

    def wait_event(self, event):
        self.log.append((self.name, "waits for", event.stream))


@pytest.fixture
def played(monkeypatch):
    """A device whose streams are fakes and whose memory is the CPU's; and the log of what was asked."""
    log = []
    compute = FakeStream(log, "compute")
    current = [compute]
    names = iter(["down", "up"])

    def set_stream(stream):
        current[0] = stream
        log.append(("current is", stream.name))

    monkeypatch.setattr(torch, "Stream", lambda device: FakeStream(log, next(names)))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: current[0])
    monkeypatch.setattr(torch.accelerator, "set_stream", set_stream)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(
        torch.accelerator, "set_device_index", lambda index: log.append(("device", index))
    )
    empty = torch.empty

    def logged(*args, **kwargs):
        log.append(("memory on", current[0].name))
        return empty(*args, **kwargs)

    device = Accelerator(torch.device("cpu"))
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
        ("device", 3),
    ]
    assert torch.equal(target, bytes_of(7))
    assert not copy.done() and not copy.ended()
    copy._event.has_ended = True
    assert copy.done() and copy.ended()


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


def test_memory_of_another_stream_is_recorded_there(played, monkeypatch):
    device, log, compute, current = played
    recorded = []
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: recorded.append(stream.name)
    )
    copy = device.down(bytes_of(7), bytes_of(0), compute)
    current[0] = FakeStream(log, "other")
    copy.order()
    assert recorded == ["down", "other"]
    recorded.clear()
    own = device.down(bytes_of(7), bytes_of(0), current[0])
    own.order()
    assert recorded == [], "only where it is needed: it delays reuse"


def test_a_copy_up_fills_memory_of_the_current_stream(played):
    device, log, compute, _ = played
    down = device.down(bytes_of(7), bytes_of(0), compute)
    log.clear()
    copy = device.up(down.memory, down)
    assert log == [
        ("memory on", "compute"),
        ("event on", "compute"),
        ("up", "waits for", "compute"),
        ("up", "waits for", "down"),
        ("current is", "up"),
        ("event on", "up"),
        ("current is", "compute"),
        ("device", 3),
    ]
    assert torch.equal(copy.memory, bytes_of(7))
    assert copy.memory._version == 0, "nobody changed it: the next use may share it"
    copy.order()
    assert log[-1] == ("compute", "waits for", "up")


def test_what_an_unfinished_copy_uses_outlives_it(played):
    """A guess that was wrong: nobody wants the copy, and the device still writes its memory."""
    device, _, compute, _ = played
    copy = device.up(bytes_of(7), None)
    event, memory = copy._event, copy.memory
    del copy
    gc.collect()
    (held,) = device.unfinished
    assert held[0] is event and held[2] is memory
    del held, memory
    device.down(bytes_of(1), bytes_of(0), compute).order()
    assert len(device.unfinished) == 1
    event.has_ended = True
    device.down(bytes_of(1), bytes_of(0), compute).order()
    assert not device.unfinished


def test_a_source_that_is_released_early_outlives_its_copy(played):
    device, _, compute, _ = played
    copy = device.down(bytes_of(7), bytes_of(0), compute)
    source = copy._source
    copy.release()
    assert any(each[1] is source for each in device.unfinished)
    later = device.down(bytes_of(7), bytes_of(0), compute)
    later.order()
    before = len(device.unfinished)
    later.release()
    assert len(device.unfinished) == before


def test_the_stream_is_put_back_when_a_copy_fails(played, monkeypatch):
    device, log, compute, current = played

    def fail(*args, **kwargs):
        raise RuntimeError("no")

    monkeypatch.setattr(torch.Tensor, "copy_", fail)
    with pytest.raises(RuntimeError, match="no"):
        device.down(bytes_of(7), bytes_of(0), compute)
    assert current[0] is compute
    assert log[-1] == ("device", 3)


def test_what_has_no_streams_has_a_reason(monkeypatch):
    assert accelerator(torch.device("meta")) == "device meta"
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cpu"))

    def refuse(device):
        raise RuntimeError("none here")

    monkeypatch.setattr(torch, "Stream", refuse)
    assert accelerator(torch.device("cpu")) == "device cpu has no streams: none here"


@pytest.mark.parametrize("status, reason", [(0, ""), (2, "cudaHostRegister answers 2")])
def test_pinning_is_by_registering_and_says_what_was_answered(monkeypatch, status, reason):
    asked = []

    class Runtime:
        def cudaHostRegister(self, address, nbytes, flags):
            asked.append((address, nbytes, flags))
            return status

        def cudaHostUnregister(self, address):
            asked.append(address)
            return 0

    class Module:
        @staticmethod
        def cudart():
            return Runtime()

    device = Accelerator.__new__(Accelerator)
    device._device = torch.device("cuda", 0)
    device._module = Module
    memory = torch.zeros(4096, dtype=torch.uint8)
    assert device.pin(memory) == reason
    device.unpin(memory)
    assert asked == [(memory.data_ptr(), 4096, _streams._PORTABLE), memory.data_ptr()]
