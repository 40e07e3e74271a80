"""The queue that owns nothing: what is dead or not wanted takes no room, and looking for it costs little."""

import pytest

from backstash._runtime import weak as _weak
from backstash._runtime.weak import WeakQueue


class Item:
    def __init__(self, wanted=True):
        self.wanted = wanted


@pytest.fixture
def asked(monkeypatch):
    """Which items the queues of this test were asked about; they look from four entries on."""
    monkeypatch.setattr(_weak, "_LEAST", 4)
    return []


def queue_of(items, asked):
    queue = WeakQueue(lambda item: asked.append(item) or item.wanted)
    for item in items:
        queue.append(item)
    return queue


def test_the_oldest_comes_first_unless_it_is_dead_or_not_wanted(asked):
    items = [Item() for _ in range(4)]
    queue = queue_of(items[:3], asked)
    queue.appendleft(items[3])
    items[0].wanted = False
    del items[1]
    assert len(queue.refs) == 4
    assert [queue.popleft() for _ in range(4)] == [items[2], None, None, items[1]]
    with pytest.raises(IndexError):
        queue.popleft()


def test_one_queue_before_another(asked):
    items = [Item() for _ in range(4)]
    queue, other = queue_of(items[:2], asked), queue_of(items[2:], asked)
    queue.take_before(other)
    assert not other.refs
    assert [queue.popleft() for _ in range(4)] == [*items[2:], *items[:2]]


def test_it_is_looked_through_each_time_it_has_doubled(asked):
    items = [Item() for _ in range(18)]
    queue = queue_of(items[:4], asked)
    assert asked == []
    queue.append(items[4])
    assert asked == items[:4]  # and from now on at eight
    for item in items[5:8]:
        queue.append(item)
    assert len(asked) == 4
    queue.append(items[8])
    assert asked[4:] == items[:8]
    for item in items[:14]:
        item.wanted = False
    for item in items[9:]:
        queue.append(item)
    assert asked[12:] == items[:16]
    assert len(queue.refs) == 4  # the two of sixteen that are wanted, and two since
    assert [queue.popleft() for _ in range(4)] == items[14:]


def test_the_dead_take_no_room(asked):
    queue = queue_of((Item() for _ in range(1000)), asked)
    assert len(queue.refs) <= 4 and not asked


def test_what_is_put_there_in_the_middle_of_a_look_stays(asked):
    """A finalizer that the collector runs may do that."""
    items, late = [Item() for _ in range(5)], Item()

    def wanted(item):
        if not asked:
            asked.append(item)
            queue.append(late)
        return True

    queue = WeakQueue(wanted)
    for item in items:
        queue.append(item)
    assert [queue.popleft() for _ in range(6)] == [*items[:4], late, items[4]]


def test_a_cleared_queue_begins_again(asked):
    items = [Item() for _ in range(20)]
    queue = queue_of(items, asked)
    queue.clear()
    assert not queue.refs
    asked.clear()
    for item in items[:5]:
        queue.append(item)
    assert asked == items[:4]
