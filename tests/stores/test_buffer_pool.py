import errno
import gc
import io
import mmap
import threading
from typing import ClassVar

import pytest
import torch

from backstash.stores import _buffer_pool
from backstash.stores._buffer_pool import BufferPool, mapped


def test_memory_is_page_aligned_and_large_enough():
    pool = BufferPool(idle_bytes=1 << 20)
    for nbytes in (1, 4096, 4097, 70_000, 1 << 20, (2 << 20) + 64, 9 << 20):
        memory = pool.take(nbytes)
        assert memory.dtype == torch.uint8
        assert memory.numel() >= nbytes
        assert memory.data_ptr() % 4096 == 0


def test_a_mapping_comes_back_when_its_last_view_dies_and_not_before():
    pool = BufferPool(idle_bytes=1 << 20)
    memory = pool.take(100_000)
    address = memory.data_ptr()
    view = memory[10:20].view(torch.int16)
    del memory
    other = pool.take(100_000)
    assert other.data_ptr() != address
    assert pool.idle_bytes == 0
    del view
    assert pool.take(100_000).data_ptr() == address


def test_no_more_than_the_limit_waits():
    pool = BufferPool(idle_bytes=300_000)
    held = [pool.take(100_000) for _ in range(5)]
    held.clear()
    assert pool.idle_bytes == 2 * 131_072
    pool.trim()
    assert pool.idle_bytes == 0


def test_memory_may_die_on_another_thread():
    pool = BufferPool(idle_bytes=1 << 20)
    held = [pool.take(50_000) for _ in range(10)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert pool.idle_bytes == 10 * 65_536


def test_the_pool_may_die_before_its_memory():
    pool = BufferPool(idle_bytes=1 << 20)
    memory = pool.take(5000)
    memory.fill_(7)
    del pool
    assert int(memory.sum()) == 7 * memory.numel()


def test_where_the_heap_reuses_memory_it_is_asked_first(monkeypatch):
    import backstash.stores._buffer_pool as memory

    monkeypatch.setattr(memory, "preloaded_allocator", lambda: "tcmalloc")
    pool = BufferPool(idle_bytes=1 << 20)
    for nbytes in (100, 1 << 20, (8 << 20) + 64):
        taken = pool.take(nbytes)
        assert taken.data_ptr() % 4096 == 0
        assert taken.numel() >= nbytes


# Which mapping is lent, kept or given up.


@pytest.mark.parametrize(
    ("nbytes", "size"),
    [
        (0, 4096), (1, 4096), (4096, 4096), (4097, 8192), (8193, 16384), (65_536, 65_536),
        ((1 << 20) + 1, 2 << 20), (2 << 20, 2 << 20), ((2 << 20) + 1, 4 << 20), (5 << 20, 6 << 20),
    ],
)  # fmt: skip
def test_near_sizes_share_mappings(nbytes, size):
    assert _buffer_pool._class_of(nbytes) == size
    if nbytes:
        assert BufferPool(idle_bytes=0).take(nbytes).numel() == size


def test_what_comes_back_waits_up_to_the_limit_and_no_further():
    pool = BufferPool(idle_bytes=3 * 4096)
    held = [pool.take(4096) for _ in range(4)]
    del held[:3]
    assert pool.idle_bytes == 3 * 4096  # the very limit
    held.clear()
    assert pool.idle_bytes == 3 * 4096
    again = [pool.take(4096)]
    assert pool.idle_bytes == 2 * 4096
    again.append(pool.take(8192))  # of another size: nothing that waits serves it
    assert pool.idle_bytes == 2 * 4096
    pool.trim()
    assert pool.idle_bytes == 0
    again.clear()
    assert pool.idle_bytes == 3 * 4096
    assert [pool.take(4096).numel(), pool.take(8192).numel()] == [4096, 8192]


def test_trim_counts_what_has_just_died_too():
    pool = BufferPool(idle_bytes=1 << 20)
    memory = pool.take(4096)
    del memory
    pool.trim()
    assert pool.idle_bytes == 0
    again = [pool.take(4096), pool.take(4096)]
    assert again[0].data_ptr() != again[1].data_ptr()
    assert pool.idle_bytes == 0  # neither had waited


@pytest.mark.parametrize(
    "make", [lambda: BufferPool(idle_bytes=0).take(8192), lambda: mapped(8192)]
)
def test_a_system_without_memory_says_how_much_was_asked_for(monkeypatch, make):
    def none(*_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", none)
    with pytest.raises(MemoryError, match=r"8192 bytes.*Cannot allocate memory"):
        make()


def test_mapped_memory_is_exactly_as_large_as_asked_for():
    for nbytes in (4096, 3 * 4096, (2 << 20) + 4096):
        memory = mapped(nbytes)
        assert (memory.numel(), memory.dtype, memory.data_ptr() % 4096) == (nbytes, torch.uint8, 0)
        memory.fill_(3)


class Mapping(mmap.mmap):
    """Notes what is advised, and refuses what the test says."""

    advised: ClassVar[list] = []
    refuses = -1

    def madvise(self, option, *rest):
        self.advised.append((option, len(self)))
        if option == self.refuses:
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().madvise(option, *rest)


@pytest.fixture
def advised(monkeypatch):
    monkeypatch.setattr(Mapping, "advised", [])
    monkeypatch.setattr(mmap, "mmap", Mapping)
    return Mapping.advised


def test_large_memory_is_in_huge_pages_where_there_are_any(advised, monkeypatch):
    pool = BufferPool(idle_bytes=0)
    pool.take(1 << 20)
    assert advised == []
    pool.take(2 << 20)
    assert advised == [(mmap.MADV_HUGEPAGE, 2 << 20)]
    monkeypatch.setattr(Mapping, "refuses", mmap.MADV_HUGEPAGE)
    assert pool.take(2 << 20).fill_(1).sum() == 2 << 20
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert pool.take(2 << 20).numel() == 2 << 20 and len(advised) == 2


def test_no_child_shares_memory_that_a_device_writes_to(advised, monkeypatch):
    mapped(4096)
    assert advised == [(mmap.MADV_DONTFORK, 4096)]
    monkeypatch.delattr(mmap, "MADV_DONTFORK")
    assert mapped(4096).numel() == 4096 and len(advised) == 1


def test_memory_is_private_to_the_process(monkeypatch):
    made, original = [], mmap.mmap
    monkeypatch.setattr(mmap, "mmap", lambda *asked: made.append(asked) or original(*asked))
    mapped(4096)
    monkeypatch.delattr(mmap, "MAP_PRIVATE")  # a system that has no such thing
    assert BufferPool(idle_bytes=0).take(4096).numel() == 4096
    assert made == [(-1, 4096, 2 | mmap.MAP_ANONYMOUS), (-1, 4096)]


# Which allocator there is.


@pytest.mark.parametrize(
    ("maps", "name"),
    [
        ("7f00 r-xp /usr/lib/libtcmalloc_minimal.so.4\n", "tcmalloc"),
        ("7f00 r-xp /usr/lib/libjemalloc.so.2\n", "jemalloc"),
        ("7f00 r-xp /v/lib/libtbbmalloc_proxy.so.2\n", "tbb"),
        ("7f00 r-xp /v/lib/libtbbmalloc.so.2\n", ""),
        ("7f00 r-xp /usr/lib/libc.so.6\n/home/tcmalloc/x\n", ""),
        (None, ""),
    ],
)
def test_the_allocator_is_read_from_what_is_mapped(monkeypatch, maps, name):
    def opened(path, **_):
        assert path == "/proc/self/maps"
        if maps is None:
            raise FileNotFoundError(path)
        return io.StringIO(maps)

    monkeypatch.setattr("builtins.open", opened)
    found = _buffer_pool.preloaded_allocator.__wrapped__()
    monkeypatch.undo()
    assert found == name


def test_the_allocator_is_looked_for_once():
    assert _buffer_pool.preloaded_allocator() is _buffer_pool.preloaded_allocator()
    assert _buffer_pool.preloaded_allocator.cache_info().misses == 1


@pytest.mark.parametrize("aligned", [True, False])
def test_memory_of_the_heap_is_taken_where_it_lies_on_a_page(monkeypatch, aligned):
    asked, empty = [], torch.empty

    def heap(nbytes, **options):
        asked.append(nbytes)
        buffer = empty(nbytes + 8192, **options)
        start = -buffer.data_ptr() % 4096 + (0 if aligned else 64)
        return buffer[start : start + nbytes]

    monkeypatch.setattr(_buffer_pool, "preloaded_allocator", lambda: "tcmalloc")
    pool = BufferPool(idle_bytes=1 << 20)
    monkeypatch.setattr(torch, "empty", heap)
    small, large = pool.take((256 << 10) - 1), pool.take(256 << 10)
    monkeypatch.undo()
    assert asked == [256 << 10] and small.numel() == 256 << 10
    assert large.numel() == 256 << 10 and large.data_ptr() % 4096 == 0
    del small, large
    assert pool.idle_bytes == (256 << 10) * (1 if aligned else 2)


@pytest.mark.parametrize("allocator", ["", "jemalloc", "tbb"])
def test_elsewhere_the_heap_is_not_asked(monkeypatch, allocator):
    monkeypatch.setattr(_buffer_pool, "preloaded_allocator", lambda: allocator)
    pool = BufferPool(idle_bytes=1 << 20)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("the heap was asked"))
    assert pool.take(1 << 20).numel() == 1 << 20


# What an interrupted call left half done.


def test_memory_that_was_not_yet_put_down_is_not_taken_back():
    class Interrupted(dict):
        def __setitem__(self, *_):
            raise KeyboardInterrupt

    pool = BufferPool(idle_bytes=1 << 20)
    pool._lent = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        pool.take(4096)
    gc.collect()
    assert len(pool._back) == 1
    pool._lent = {}
    assert pool.idle_bytes == 0 and not pool._back
    assert pool.take(4096).numel() == 4096


def test_restoring_counts_what_waits_and_strikes_out_who_is_gone():
    pool = BufferPool(idle_bytes=1 << 20)
    held = [pool.take(nbytes) for nbytes in (4096, 4096, 4096, 8192, 8192)]
    del held[1:4]
    assert pool.idle_bytes == 4096 + 4096 + 8192
    first, last = pool._lent.values()
    pool._lent[0] = (lambda: None), first[1]  # whose end was not reported
    pool._idle_bytes = 5
    del held[0]
    pool.restore()
    assert list(pool._lent.values()) == [last]
    assert pool.idle_bytes == 3 * 4096 + 8192
