import threading

import torch

from backstash.stores._memory import Pool


def test_memory_is_page_aligned_and_large_enough():
    pool = Pool(idle_bytes=1 << 20)
    for nbytes in (1, 4096, 4097, 70_000, 1 << 20, (2 << 20) + 64, 9 << 20):
        memory = pool.take(nbytes)
        assert memory.dtype == torch.uint8
        assert memory.numel() >= nbytes
        assert memory.data_ptr() % 4096 == 0


def test_a_mapping_comes_back_when_its_last_view_dies_and_not_before():
    pool = Pool(idle_bytes=1 << 20)
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
    pool = Pool(idle_bytes=300_000)
    held = [pool.take(100_000) for _ in range(5)]
    held.clear()
    assert pool.idle_bytes == 2 * 131_072
    pool.trim()
    assert pool.idle_bytes == 0


def test_memory_may_die_on_another_thread():
    pool = Pool(idle_bytes=1 << 20)
    held = [pool.take(50_000) for _ in range(10)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert pool.idle_bytes == 10 * 65_536


def test_the_pool_may_die_before_its_memory():
    pool = Pool(idle_bytes=1 << 20)
    memory = pool.take(5000)
    memory.fill_(7)
    del pool
    assert int(memory.sum()) == 7 * memory.numel()


def test_where_the_heap_reuses_memory_it_is_asked_first(monkeypatch):
    import backstash.stores._memory as memory

    monkeypatch.setattr(memory, "preloaded_allocator", lambda: "tcmalloc")
    pool = Pool(idle_bytes=1 << 20)
    for nbytes in (100, 1 << 20, (8 << 20) + 64):
        taken = pool.take(nbytes)
        assert taken.data_ptr() % 4096 == 0
        assert taken.numel() >= nbytes
