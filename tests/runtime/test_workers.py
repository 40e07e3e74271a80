"""Worker threads, what is done where there are none, and a piece of work, which is done once."""

import os
import subprocess
import sys
import threading
import weakref
from itertools import product

import pytest

from backstash._runtime import workers as _workers
from backstash._runtime.transfer import Transfer
from backstash._runtime.workers import Work, Workers
from backstash._saved.thread_state import ThreadState


class NoThread(threading.Thread):
    """As where the system gives no more of them."""

    asked = 0

    def start(self):
        NoThread.asked += 1
        raise RuntimeError("can't start new thread")


def ends_badly():
    raise OSError("no")


@pytest.fixture(params=["no threads", "another process"])
def without_threads(request, monkeypatch):
    workers = Workers(2)
    if request.param == "no threads":
        monkeypatch.setattr(_workers.threading, "Thread", NoThread)
    else:
        pid = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    return workers


def test_without_threads_the_caller_s_does_the_work(without_threads):
    workers, seen = without_threads, []
    for number in range(2):
        done = workers.submit(lambda *given: seen.append((given, threading.get_ident())), number, 7)
        assert done.done() and done.exception() is None
    here = threading.get_ident()
    assert seen == [((0, 7), here), ((1, 7), here)]
    failed = workers.submit(ends_badly)
    assert isinstance(failed.exception(), OSError)
    workers.close()


def test_a_refused_thread_is_noted_and_not_asked_for_again(monkeypatch):
    NoThread.asked = 0
    monkeypatch.setattr(_workers.threading, "Thread", NoThread)
    workers = Workers(2)
    assert workers.note == ""
    workers.submit(lambda: None)
    assert "no worker thread (can't start new thread)" in workers.note
    workers.submit(lambda: None)
    assert NoThread.asked == 1


def test_a_second_thread_that_is_refused_is_no_loss(monkeypatch):
    workers, ended = Workers(2), threading.Event()
    workers.submit(lambda: None)
    monkeypatch.setattr(_workers.threading, "Thread", NoThread)
    workers.submit(ended.set)
    assert ended.wait(30) and workers.note == ""
    monkeypatch.undo()
    workers.close()


def test_work_runs_on_as_many_threads_as_it_was_given():
    workers, seen = Workers(2), []
    both, ended = threading.Barrier(2, timeout=30), threading.Barrier(3, timeout=30)

    def work():
        seen.append(both.wait())
        ended.wait()

    for _ in range(2):
        workers.submit(work)
    ended.wait()
    assert set(seen) == {0, 1} and workers.note == ""
    workers.close()
    workers.close()
    assert workers.submit(lambda: None).done()  # too late for a thread


def test_threads_end_with_the_object_that_is_not_closed():
    workers, ended = Workers(2), threading.Event()
    workers.submit(ended.set)
    workers.submit(lambda: None)
    assert ended.wait(30)
    threads = list(workers._threads)
    del workers
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_nobody_s_threads_are_waited_for_in_another_process(monkeypatch):
    workers, ended = Workers(1), threading.Event()
    workers.submit(ended.set)
    assert ended.wait(30)
    pid = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: pid + 1)
        patch.setattr(threading.Thread, "join", lambda self: pytest.fail("it is not here"))
        workers.close()
    workers.close()


def test_to_wait_for_work_is_to_do_it_unless_somebody_does():
    seen = []
    work = Work(seen.append, 1)
    assert not work.done()
    assert work.exception() is None and work.done()
    assert work.run() is False  # queued as well: it is done already
    assert seen == [1]
    go_on, running = threading.Event(), threading.Event()

    def slow():
        running.set()
        go_on.wait(30)
        seen.append(2)

    work = Work(slow)
    thread = threading.Thread(target=work.run)
    thread.start()
    assert running.wait(30) and not work.cancel() and not work.done()
    go_on.set()
    assert work.exception() is None and seen == [1, 2]
    thread.join()


def test_work_is_a_transfer_that_has_moved_its_bytes_when_it_is_done():
    seen = []
    work = Work(seen.append, 1)
    assert isinstance(work, Transfer) and not Work.ends_in_order, "threads overtake one another"
    assert (work.done(), work.ended(), work.error) == (False, False, None)
    assert work.wait() is None
    assert (work.done(), work.ended(), work.error, seen) == (True, True, None, [1])
    work.wait()
    assert seen == [1]
    failed = Work(ends_badly)
    failed.wait()
    assert failed.done() and failed.ended() and isinstance(failed.error, OSError)


def test_nobody_makes_a_transfer_that_moves_nothing():
    with pytest.raises(TypeError, match="abstract"):
        Transfer()


def test_work_that_is_called_off_is_not_done():
    seen = []
    work = Work(seen.append, 1)
    assert work.cancel()
    assert work.run() is True
    assert (seen, work.done(), work.exception()) == ([], True, None)
    assert not work.cancel()  # it has ended


def test_work_that_is_interrupted_is_done_again_by_the_next():
    seen = []

    def twice():
        seen.append(1)
        if len(seen) == 1:
            raise KeyboardInterrupt

    work = Work(twice)
    with pytest.raises(KeyboardInterrupt):
        work.run()
    assert not work.done()
    assert work.exception() is None and seen == [1, 1]


def test_work_that_is_interrupted_when_it_is_done_is_not_done_again():
    seen = []
    work = Work(seen.append, 1)
    work.run()
    work.finished = False  # the interrupt came just before it was noted
    assert work.run() is True and work.done() and seen == [1]


def test_work_that_has_ended_holds_neither_its_arguments_nor_its_error_s_frames():
    class Thing:
        pass

    def fails(thing):
        try:
            raise OSError("inner")
        except OSError as error:
            inner = error
        raise ValueError("outer") from inner

    def fails_in_handler(thing):
        try:
            raise OSError("inner")
        except OSError:
            raise ValueError("outer")  # noqa: B904

    for function, catch in product((fails, fails_in_handler), (Exception, BaseException)):
        thing = Thing()
        gone = weakref.ref(thing)
        work = Work(function, thing)
        work.run(catch=catch)
        del thing
        assert gone() is None
        assert isinstance(work.error, ValueError)
        assert isinstance(work.error.__cause__ or work.error.__context__, OSError)
        assert sys.exc_info() == (None, None, None)


def test_a_thread_holds_no_work_that_is_done():
    class Queue:
        def get(self):
            if not hasattr(self, "ref"):
                work = Work(int)
                self.ref = weakref.ref(work)
                return work
            assert self.ref() is None
            return None

        def put(self, item):
            self.last = item

    queue = Queue()
    _workers._serve(queue)
    assert queue.last is None  # which is for the next thread


def test_workers_may_be_closed_by_one_of_them():
    """A finalizer runs on whatever thread comes along."""
    workers = Workers(1)
    closing = workers.submit(workers.close)
    workers.close()
    assert closing.exception() is None


def test_at_the_end_every_thread_is_seen_off(monkeypatch):
    monkeypatch.setattr(_workers, "_all", weakref.WeakSet())
    workers = [Workers(2), Workers(1)]
    for each in workers:
        each.submit(int)
    threads = [thread for each in workers for thread in each._threads]
    # One that an interrupt has made nobody know must not keep the interpreter.
    assert len(threads) == 2 and all(thread.daemon for thread in threads)
    _workers._end_all()
    assert not any(thread.is_alive() for thread in threads)


LAST = """
import threading
from backstash._runtime.workers import Workers

def late():
    threading.main_thread().join()  # until the interpreter ends
    for number in range(10**6):
        pass
    print("done", flush=True)

workers = Workers(1)
workers.submit(late)
"""


def test_what_has_begun_is_ended_before_the_interpreter_goes():
    ended = subprocess.run([sys.executable, "-c", LAST], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


def test_who_may_judge_a_copy():
    """Its own thread, or anybody once that one has ended."""
    mine, found = ThreadState(), []
    go_on = threading.Event()

    def work():
        found.append(ThreadState())
        go_on.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    while not found:
        threading.Event().wait(0.001)
    assert mine.may_judge(mine) is True
    assert mine.may_judge(found[0]) is False
    go_on.set()
    thread.join()
    assert mine.may_judge(found[0]) is True
    assert found[0].thread() is thread


def test_what_is_called_off_owns_nothing_any_more():
    """A worker may come for it much later: while a disk hangs, say."""

    class Memory:
        pass

    memory = Memory()
    alive = weakref.ref(memory)
    work = Work(lambda memory: None, memory)
    del memory
    assert alive() is not None
    assert work.cancel() and alive() is None
    assert work.run() and work.finished and work.error is None and not work.cancel()
