"""Worker threads, and what is done where there are none."""

import os
import threading

import pytest

from backstash import _workers
from backstash._lanes import Lane
from backstash._workers import Workers


class NoThreads:
    """As ``ThreadPoolExecutor`` where the system gives no more threads."""

    def __init__(self, *_):
        self.asked = 0

    def submit(self, *_):
        self.asked += 1
        raise RuntimeError("can't start new thread")

    def shutdown(self, wait):
        pass


def ends_badly():
    raise OSError("no")


@pytest.fixture(params=["no threads", "another process"])
def without_threads(request, monkeypatch):
    workers = Workers(2)
    if request.param == "no threads":
        monkeypatch.setattr(_workers, "ThreadPoolExecutor", NoThreads)
    else:
        pid = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    return workers


def test_without_threads_the_caller_s_does_the_work(without_threads):
    workers, seen = without_threads, []
    for number in range(2):
        done = workers.submit(lambda *given: seen.append((given, threading.get_ident())), number, 7)
        assert done.done() and done.exception() is None and done.result() is None
    here = threading.get_ident()
    assert seen == [((0, 7), here), ((1, 7), here)]
    failed = workers.submit(ends_badly)
    assert isinstance(failed.exception(), OSError)
    workers.close()


def test_a_refused_thread_is_noted_and_not_asked_for_again(monkeypatch):
    monkeypatch.setattr(_workers, "ThreadPoolExecutor", NoThreads)
    workers = Workers(2)
    assert workers.note == ""
    workers.submit(lambda: None)
    assert "no worker thread (can't start new thread)" in workers.note
    workers.submit(lambda: None)
    assert workers._pool.asked == 1


def test_work_runs_on_as_many_threads_as_it_was_given():
    workers = Workers(2)
    both = threading.Barrier(2, timeout=30)
    running = [workers.submit(both.wait) for _ in range(2)]
    assert {each.result(30) for each in running} == {0, 1}
    assert isinstance(workers.submit(ends_badly).exception(30), OSError)
    assert workers.note == ""
    workers.close()
    assert workers.submit(lambda: None).done() and workers.note  # too late for a thread


def test_nobody_s_threads_are_waited_for_in_another_process(monkeypatch):
    workers = Workers(1)
    workers.submit(lambda: None).result(30)
    pool, workers._pool = workers._pool, NoThreads()
    workers._pool.shutdown = lambda wait: pytest.fail("those threads are not here")
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    workers.close()
    pool.shutdown()


def test_who_may_judge_a_copy():
    """Its own thread, or anybody once that one has ended."""
    mine, found = Lane(), []
    go_on = threading.Event()

    def work():
        found.append(Lane())
        go_on.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    while not found:
        threading.Event().wait(0.001)
    assert mine.may_land(mine) is True
    assert mine.may_land(found[0]) is False
    go_on.set()
    thread.join()
    assert mine.may_land(found[0]) is True
    assert found[0].thread is thread
