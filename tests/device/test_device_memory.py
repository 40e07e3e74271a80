"""How much an accelerator can spare: when it is asked, and what follows from the answer."""

import pytest

from backstash._device.memory import DeviceMemory

RESERVE = 256 << 20


class Device:
    """Says what a test says, and counts how often."""

    def __init__(self, free, failures=0):
        self.free, self.failed, self.asked = free, failures, 0

    def free_bytes(self):
        self.asked += 1
        return self.free

    def failures(self):
        return self.failed


def test_half_of_what_is_free_may_be_read_ahead_before_it_is_asked_again():
    device = Device(RESERVE + 200)
    memory = DeviceMemory(device)
    assert memory.has(40) and device.asked == 1
    assert memory.has(60) and device.asked == 1  # all of the half
    device.free = RESERVE + 20
    assert memory.has(1) and device.asked == 2
    assert memory.has(9) and device.asked == 2
    assert not memory.has(11) and device.asked == 3
    assert not memory.has(11) and device.asked == 4


@pytest.mark.parametrize(
    "free, fits", [(RESERVE, False), (RESERVE + 1, False), (RESERVE + 2, True)]
)
def test_a_reserve_is_left(free, fits):
    assert DeviceMemory(Device(free)).has(1) == fits


def test_nothing_always_fits():
    device = Device(RESERVE)
    assert DeviceMemory(device).has(0) and device.asked == 0


def test_a_shortage_is_of_six_of_the_largest():
    device = Device(600)
    memory = DeviceMemory(device)
    assert memory.shortage(100) == 0 and device.asked == 1
    device.free = 500
    assert memory.shortage(10) == 100 and device.asked == 2
    assert memory.shortage(10) == 100 and device.asked == 3


def test_it_is_asked_again_when_half_of_what_was_free_was_saved():
    device = Device(60 + 100)
    memory = DeviceMemory(device)
    assert [memory.shortage(10) for _ in range(6)] == [0] * 6
    assert device.asked == 1
    assert memory.shortage(10) == 0 and device.asked == 2


def test_a_failed_allocation_is_known_until_it_is_forgotten():
    device = Device(0, failures=3)
    memory = DeviceMemory(device)
    assert memory.failed is False
    memory.shortage(1)
    assert memory.failed is False  # those were before
    device.failed = 4
    assert memory.failed is False
    memory.shortage(1)
    assert memory.failed is True
    memory.forget_failures()
    assert memory.failed is False
    memory.shortage(1)
    assert memory.failed is False
