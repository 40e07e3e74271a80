"""Derived blocks that a worker makes ahead of need."""

import gc
import threading
import weakref

import pytest
import torch
from torch.nn import functional as F

from backstash import Action, Stash
from backstash._tiers import making
from backstash.codecs import EXACT
from backstash.errors import InplaceError

SIZE = 128 * 128 * 4
LAYERS = 5


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    """As many as anybody wants."""
    monkeypatch.setattr(making, "_cores", lambda: 1024)


class ByHand:
    """A stash whose worker makes what the test says, when it says so."""

    def __init__(self, action="recompute", **options):
        options = {"keep": None, "min_bytes": 1024, "prefetch": 8 * SIZE, **options}
        self.stash = Stash(policy=lambda saved: Action(action), **options)
        self.begun = []
        self.stash._makers.begin = self.begun.append

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stash.close()

    @property
    def prefetcher(self):
        return self.stash._session.device_tiers[0].prefetcher

    @property
    def makings(self):
        """What is begun, and wanted."""
        calls = [each._call for each in self.begun if each._call is not None]
        return [call[1][0]() for call in calls if call[1][0]() is not None]

    def work(self):
        """Make all that was begun, on another thread."""
        while self.begun:
            thread = threading.Thread(target=self.begun.pop(0).run)
            thread.start()
            thread.join()

    def forward(self, around=lambda y: y):
        with self.stash:
            return net(around)


def weights():
    torch.manual_seed(0)
    return [torch.randn(128, 128).div(8).requires_grad_() for _ in range(LAYERS)]


def net(around=lambda y: y):
    """Of each layer the GELU's result can be made again from its input, and dropout's noise be packed."""
    ws = weights()
    x = torch.randn(128, 128)
    for w in ws:
        x = F.dropout(around(F.gelu(x @ w)), 0.5)
    return x.square().sum(), ws


def expected():
    loss, ws = net()
    return torch.autograd.grad(loss, ws)


def same(found):
    return all(map(torch.equal, found, expected()))


@pytest.mark.parametrize("action", ["recompute", "pack"])
@pytest.mark.parametrize("below", [False, True])
def test_what_a_worker_made_is_what_was_saved(action, below, tmp_path):
    with ByHand(action, **({"disk": tmp_path} if below else {})) as by_hand:
        loss, ws = by_hand.forward(lambda y: seen(y, by_hand.work))
        assert same(torch.autograd.grad(loss, ws))
        assert by_hand.stash.stats().prefetch_hits >= LAYERS - 2
        assert by_hand.prefetcher.ahead.nbytes == 0


@pytest.mark.parametrize("action", ["recompute", "pack"])
def test_a_real_worker(action, tmp_path):
    with Stash(keep=None, min_bytes=1024, policy=lambda saved: Action(action)) as stash:
        loss, ws = net()
    assert same(torch.autograd.grad(loss, ws))
    assert stash.stats().prefetch_hits >= LAYERS - 2
    stash.close()


def test_operands_that_come_back_from_the_disk(tmp_path):
    with ByHand(disk=tmp_path, keep=0, prefetch="128MiB") as by_hand:
        for _ in range(2):
            loss, ws = by_hand.forward(lambda y: seen(y, by_hand.work))
            assert same(torch.autograd.grad(loss, ws))
        # What was still being written when it was looked for may be read after its last use, until here.
        del loss, ws
        assert by_hand.stash.stats().ahead_bytes == 0


def seen(y, act):
    """Call ``act`` when backward comes by."""
    if y.requires_grad:
        y.register_hook(lambda gradient: act())
    return y


def test_who_needs_it_makes_it_where_no_worker_has_come():
    with ByHand() as by_hand:
        loss, ws = by_hand.forward()
        assert same(torch.autograd.grad(loss, ws))
        assert len(by_hand.begun) == LAYERS - 1  # the first layer's input is not derived
        assert all(each.finished for each in by_hand.begun)


def test_two_at_most_are_under_way_and_they_count_in_the_window():
    with ByHand() as by_hand:
        counts = []

        def look():
            unfinished = sum(not each.finished for each in by_hand.begun)
            counts.append((unfinished, by_hand.prefetcher.ahead.nbytes))

        loss, ws = by_hand.forward(lambda y: seen(y, look))
        torch.autograd.grad(loss, ws)
        assert max(counts) == (2, 2 * SIZE)


@pytest.mark.parametrize("window, most", [(0, 0), (SIZE, 1), (2 * SIZE, 2)])
def test_the_window(window, most):
    with ByHand(prefetch=window) as by_hand:
        counts = []

        def look():
            counts.append(by_hand.prefetcher.ahead.nbytes)

        loss, ws = by_hand.forward(lambda y: seen(y, look))
        assert same(torch.autograd.grad(loss, ws))
        assert max(counts) == most * SIZE


def test_a_worker_that_fails_costs_nothing_else(monkeypatch):
    def fail(self, *given):
        raise MemoryError("no memory")

    monkeypatch.setattr(making.Making, "make", fail)
    with ByHand() as by_hand:
        loss, ws = by_hand.forward(lambda y: seen(y, by_hand.work))
        assert same(torch.autograd.grad(loss, ws))
        assert by_hand.stash.stats().prefetch_hits == 0
        assert not by_hand.prefetcher._made.is_off


def test_other_bits_are_not_used_and_no_more_are_made():
    with ByHand() as by_hand:

        def spoil():
            for each in by_hand.makings:
                each._given = [torch.zeros_like(value) for value in each._given]
            by_hand.work()

        loss, ws = by_hand.forward(lambda y: seen(y, spoil))
        assert same(torch.autograd.grad(loss, ws))
        assert by_hand.stash.stats().prefetch_hits == 0
        assert by_hand.prefetcher._made.is_off
        loss, ws = by_hand.forward()
        assert same(torch.autograd.grad(loss, ws))
        assert by_hand.begun == []


def test_another_number_of_threads_in_the_worker_is_not_used():
    with ByHand() as by_hand:

        def work():
            for each in by_hand.makings:
                each._derivation.threads = 77
            by_hand.work()

        loss, ws = by_hand.forward(lambda y: seen(y, work))
        before = torch.get_num_threads()
        assert same(torch.autograd.grad(loss, ws))
        assert torch.get_num_threads() == before
        assert by_hand.stash.stats().prefetch_hits == 0


def test_a_change_after_it_was_made_is_an_error_where_it_is_needed(tmp_path):
    with ByHand(disk=tmp_path) as by_hand:
        inputs = []

        def change():
            by_hand.work()
            with torch.no_grad():
                inputs[2].add_(1)  # which the third layer's GELU was given

        with by_hand.stash:
            ws = weights()
            x = torch.randn(128, 128)
            for at, w in enumerate(ws):
                inputs.append(x @ w)
                x = F.gelu(inputs[-1])
                if at == 3:
                    inputs[3].register_hook(lambda gradient: change())
            loss = x.square().sum()
        with pytest.raises(InplaceError, match=r"\(128, 128\)"):
            torch.autograd.grad(loss, ws[3:])  # what changed is not needed for itself
        assert by_hand.prefetcher.ahead.nbytes <= 2 * SIZE
        inputs.clear()  # a hook refers to it
        del loss, x, ws


def test_a_graph_that_dies_while_it_is_made(tmp_path):
    with ByHand() as by_hand:
        loss, ws = by_hand.forward()
        torch.autograd.grad(loss, ws[-1])  # begins two, and uses none of them
        made = [weakref.ref(each) for each in by_hand.makings]
        assert len(made) == 2
        del loss, ws
        gc.collect()
        assert [each() for each in made] == [None, None]
        begun = [*by_hand.begun]
        by_hand.work()
        assert [each.error for each in begun] == [None] * len(begun)
        by_hand.stash.stats()
        assert by_hand.prefetcher.ahead.nbytes == 0


def test_what_is_made_holds_its_operands_no_longer_and_is_recorded():
    with ByHand() as by_hand, by_hand.stash.record() as recording:
        loss, ws = by_hand.forward()
        torch.autograd.grad(loss, ws[-1])
        makings = by_hand.makings
        by_hand.work()
        assert [each._given for each in makings] == [None, None]
        decoded = [event for event in recording.events if event.kind == "decode"]
        # Two by who needed them, two by the worker.
        assert [(event.cause, event.nbytes) for event in decoded] == [("recomputed", SIZE)] * 4
        del loss, ws, makings


def test_nothing_is_looked_for_where_nothing_is_derived():
    stash = Stash(keep=None, min_bytes=1024)
    assert not stash._session.device_tiers or not maker_of(stash).has_derived
    with stash:
        loss, ws = net()
    torch.autograd.grad(loss, ws)
    assert not maker_of(stash).has_derived
    stash.close()


def maker_of(stash):
    return stash._session.device_tiers[0].prefetcher._made


def test_backward_again_and_again():
    with ByHand() as by_hand:
        loss, ws = by_hand.forward(lambda y: seen(y, by_hand.work))
        for _ in range(3):
            assert same(torch.autograd.grad(loss, ws, retain_graph=True))
        assert by_hand.stash.stats().prefetch_hits >= LAYERS - 1


def test_an_interrupt_while_it_is_made_here():
    with ByHand() as by_hand:
        loss, ws = by_hand.forward()
        old, calls = making.Making.make, []

        def interrupted(self, *given):
            calls.append(self)
            if len(calls) == 2:
                raise KeyboardInterrupt
            old(self, *given)

        making.Making.make = interrupted
        try:
            with pytest.raises(KeyboardInterrupt):
                torch.autograd.grad(loss, ws, retain_graph=True)
            assert same(torch.autograd.grad(loss, ws))
        finally:
            making.Making.make = old
        del loss, ws
        by_hand.stash.stats()
        assert by_hand.prefetcher.ahead.nbytes == 0


@pytest.mark.parametrize("threads, cores", [(1, 1), (3, 5)])
def test_no_worker_is_asked_where_threads_take_the_cores(monkeypatch, threads, cores):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for given, is_asked in ((cores, False), (cores + 1, True)):
            monkeypatch.setattr(making, "_cores", lambda given=given: given)
            with ByHand() as by_hand:
                loss, ws = by_hand.forward()
                torch.autograd.grad(loss, ws)
                assert bool(by_hand.begun) == is_asked
    finally:
        torch.set_num_threads(before)


def test_the_cores_are_shared_by_the_processes_of_a_job(monkeypatch):
    monkeypatch.setattr(making, "_cores", lambda: 6 * torch.get_num_threads())
    for processes, is_asked in (("3", True), ("4", False)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        for name in ("RANK", "LOCAL_RANK"):
            monkeypatch.setenv(name, "0")
        monkeypatch.setenv("WORLD_SIZE", processes)
        with ByHand() as by_hand:
            loss, ws = by_hand.forward()
            torch.autograd.grad(loss, ws)
            assert bool(by_hand.begun) == is_asked


def test_no_mode_of_the_program_sees_it():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with ByHand() as by_hand:
        loss, ws = by_hand.forward()
        with Mode():
            assert same(torch.autograd.grad(loss, ws))
        assert by_hand.begun == []


def test_what_a_program_may_take_away_is_copied():
    """A parameter's memory is resized after its use by FSDP: a worker that still read it would read what is
    no memory any more."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(128) for _ in range(LAYERS))

        def forward(self, x, ws):
            for norm, w in zip(self.norms, ws, strict=True):
                x = seen(norm(x) @ w, look)
            return x

    net = Net()
    with ByHand() as by_hand:
        given = []

        def look():
            for each in by_hand.makings:
                given.extend(value.data_ptr() for value in each._given)

        with by_hand.stash:
            ws = weights()
            loss = net(torch.randn(128, 128, requires_grad=True), ws).square().sum()
        torch.autograd.grad(loss, ws)
        assert given
        assert not {each.data_ptr() for each in net.parameters()} & set(given)


def test_a_large_parameter_is_not_copied_for_it():
    scale = torch.nn.Parameter(torch.rand(1024, 128))
    with ByHand() as by_hand:
        with by_hand.stash:
            x = torch.randn(1024, 128, requires_grad=True)
            for w in weights():
                x = (x * scale) @ w
            loss = x.square().sum()
        loss.backward()
        assert by_hand.stash.stats().recomputed_bytes > 0
        assert by_hand.begun == []


def test_a_plan_counts_what_is_made_as_the_computing_threads(tmp_path):
    stash = Stash(budget="1GiB", disk=tmp_path)
    assert stash._session.device_tiers[0].prefetcher._made.is_off
    stash.close()


def test_none_after_the_stash_is_closed():
    with ByHand() as by_hand:
        loss, ws = by_hand.forward()
        by_hand.stash.close()
        assert same(torch.autograd.grad(loss, ws))
        assert by_hand.begun == []


def test_recomputed_else_packed_with_a_chain():
    options = {"keep": None, "min_bytes": 1024, "codec": EXACT}
    with ByHand(**options) as by_hand:

        def run(hold=None):
            ws = weights()
            x = torch.randn(128, 128)
            for w in ws:
                h = F.gelu(x @ w)
                x = F.dropout(torch.relu(h) * torch.sigmoid(h), 0.5)
                if hold:
                    x = seen(x, hold)
            return x.square().sum(), ws

        torch.manual_seed(0)
        loss, ws = run()
        want = torch.autograd.grad(loss, ws)
        torch.manual_seed(0)
        with by_hand.stash:
            loss, ws = run(by_hand.work)
        assert all(map(torch.equal, torch.autograd.grad(loss, ws), want))
        assert by_hand.stash.stats().prefetch_hits > LAYERS
