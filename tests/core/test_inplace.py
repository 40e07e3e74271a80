"""Changes in place: the error that PyTorch raises, or the true gradient; never a wrong one."""

import threading
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from backstash import Disk, Stash
from backstash._tiers.prefetch import Prefetcher
from backstash.errors import InplaceError
from backstash.stores._file import UnnamedFile
from backstash.testing import Gated
from oracle import WAYS, gradients, same_bits

SIDE = 192  # of float32: above the default min_bytes
PATIENCE_SECONDS = 30


def leaf(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).requires_grad_()


def outcome(program, change, stash=None):
    """The gradients of ``program``, or the error that its backward raises."""
    torch.manual_seed(0)
    with stash or nullcontext():
        backward = program(change)
    try:
        return backward()
    except RuntimeError as error:
        return error


def check(program, directory, *, must_raise=True):
    """Where plain PyTorch raises, a stash raises its own error or gives what is true without the change."""
    plain = outcome(program, True)
    assert isinstance(plain, RuntimeError) == must_raise, plain
    true = outcome(program, False)
    raised = set()
    for way in WAYS:
        stash = Stash(**{"disk": directory, **WAYS[way]})
        got = outcome(program, True, stash)
        stash.close()
        if isinstance(got, RuntimeError):
            assert must_raise and isinstance(got, InplaceError), f"{way}: {got!r}"
            assert "modified by an inplace operation" in str(got)
            raised.add(way)
        else:
            assert all(same_bits(*pair) for pair in zip(got, true, strict=True)), way
    return raised


CHANGES = {
    "mul_": lambda h: h.mul_(3),
    "iadd": lambda h: h.__iadd__(1),
    "setitem": lambda h: h.__setitem__((2, 3), 5.0),
    "copy_": lambda h: h.copy_(torch.ones_like(h)),
    "relu_": lambda h: F.relu_(h),
    "no_grad": lambda h: torch.no_grad()(h.zero_)(),
    "a row": lambda h: h[3].zero_(),
    "columns": lambda h: h[:, 5:].zero_(),
    "transposed": lambda h: h.t().add_(1),
    "flat view": lambda h: h.view(-1)[7:9].fill_(1),
    "expanded view": lambda h: h[:1].expand(1, SIDE).add_(1),
    "view as bytes": lambda h: h.detach().view(torch.uint8).zero_(),
    "detached": lambda h: h.detach().add_(1),
    "view of detached": lambda h: h.detach()[2:].t().add_(1),
    "out=": lambda h: torch.sin(torch.ones(SIDE, SIDE), out=h.detach()),
    "masked": lambda h: h.masked_fill_(h > 0, 2.0),
    "put": lambda h: h.detach().index_put_((torch.tensor([1, 5]),), torch.zeros(SIDE)),
    "normal_": lambda h: h.detach().normal_(),
    "foreach": lambda h: torch._foreach_mul_([h.detach()], 2.0),
    "swapped rows": lambda h: h.detach().copy_(h.detach().flip(0)),
}

ALL_LANDED = {"all on disk", "no read ahead"}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_after_the_save(tmp_path, name):
    def program(change):
        x = leaf(SIDE, SIDE)
        h = x * 2
        loss = h.sin()
        if change:
            CHANGES[name](h)
        return lambda: gradients(loss, x)

    raised = check(program, tmp_path)
    assert raised >= {"keep all", "no tier below"} and not raised & ALL_LANDED


@pytest.mark.parametrize("kind", ["mask", "index", "buffer-like", "half"])
def test_a_change_of_what_needs_no_gradient(tmp_path, kind):
    def program(change):
        x = leaf(SIDE, SIDE)
        index = torch.arange(SIDE).expand(SIDE, SIDE).contiguous()
        held = {
            "mask": lambda: x.detach() > 0,
            "index": lambda: index,
            "buffer-like": lambda: x.detach() * 2,
            "half": lambda: x.detach().half(),
        }[kind]()
        if kind == "mask":
            loss = torch.where(held, x, 0.0)
        elif kind == "index":
            loss = x.gather(1, held)
        else:
            loss = x * held
        loss = loss.sin()  # what needs no gradient goes down when a later operation saves
        if change:
            held.zero_()
        return lambda: gradients(loss, x)

    raised = check(program, tmp_path)
    assert raised >= {"keep all", "no tier below"} and not raised & ALL_LANDED


def test_a_change_of_an_output_that_its_operation_saved(tmp_path):
    def program(change):
        x = leaf(SIDE, SIDE)
        loss = x.exp()
        if change:
            loss.detach().add_(1)
        return lambda: gradients(loss, x)

    check(program, tmp_path)


def test_a_small_tensor_that_is_left_is_watched(tmp_path):
    def program(change):
        x = leaf(9)
        h = x * 2
        loss = h.sin()
        if change:
            h[3:].zero_()
        return lambda: gradients(loss, x)

    raised = check(program, tmp_path)
    assert "defaults" in raised


@pytest.mark.parametrize("cut", [lambda h: h[3], lambda h: h[:, 3:9], lambda h: h[3, :1].expand(9)])
def test_a_small_part_is_a_clean_copy(tmp_path, cut):
    def program(change):
        x = leaf(SIDE, SIDE)
        h = x * 2
        loss = cut(h).sin()
        if change:
            h.zero_()
        return lambda: gradients(loss, x)

    assert check(program, tmp_path) == {"no tier below"}


def test_an_optimizer_that_steps_between_forward_and_backward(tmp_path):
    def program(change):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh(), nn.Linear(SIDE, SIDE))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        x = leaf(SIDE, SIDE)
        loss = model(x)
        if change:
            optimizer.step()
        return lambda: gradients(loss, x, *model.parameters())

    assert check(program, tmp_path) == set(WAYS)  # parameters stay, so the error is certain


def test_a_frozen_weight_that_changes(tmp_path):
    def program(change):
        weight = nn.Parameter(leaf(SIDE, SIDE).detach(), requires_grad=False)
        x = leaf(4, SIDE)
        loss = F.linear(x, weight)
        if change:
            weight.zero_()
        return lambda: gradients(loss, x)

    assert check(program, tmp_path) == set(WAYS)


def test_legal_changes_in_place(tmp_path):
    def program(change):
        x = leaf(SIDE, SIDE)
        h = x * 2
        h.mul_(3).add_(1)
        h[2:].mul_(0.5)
        y = h.clone().add_(1)
        y[:, 3:].tanh_()
        h.t().add_(y)
        y = y + 1
        y.sigmoid_()
        return lambda: gradients(h * y, x)

    assert check(program, tmp_path, must_raise=False) == set()


def test_a_save_after_a_change_is_of_the_changed_bytes(tmp_path):
    def program(change):
        x = leaf(SIDE, SIDE)
        held = x.detach() * 2
        first = x * held
        held.mul_(4)
        second = x * held
        held.mul_(4)
        third = x * held
        grads = []

        def backward():
            for loss in (third, second, first):
                try:
                    grads.append(*gradients(loss, x))
                except RuntimeError:
                    grads.append(None)
            return grads

        return backward

    plain = outcome(program, True)
    assert [grad is None for grad in plain] == [False, True, True]
    for way in WAYS:
        with Stash(**{"disk": tmp_path, **WAYS[way]}) as stash:
            got = outcome(program, True, stash)
        stash.close()
        held = leaf(SIDE, SIDE).detach() * 2
        for grad, true in zip(got, (held * 16, held * 4, held), strict=True):
            assert grad is None or same_bits(grad, true), way
        assert got[0] is not None


# When a write ends is for the test to say.


@pytest.fixture
def gated(tmp_path):
    store = Gated(Disk(tmp_path))
    yield store
    store.writes.set()
    store.close()


def test_a_change_while_the_bytes_are_being_written(gated):
    gated.writes.clear()
    x = leaf(1024, 1024)
    stash = Stash(disk=gated)
    with stash:
        h = x * 2
        loss = h.sin()
    assert gated.begun.acquire(timeout=PATIENCE_SECONDS)
    h.zero_()
    gated.writes.set()
    with pytest.raises(InplaceError, match="modified by an inplace operation"):
        gradients(loss, x)
    stash.close()


def test_a_change_after_the_write_and_before_anyone_has_looked(gated):
    """The copy is clean, but nothing can show that it is: an error, as plain PyTorch raises."""
    gated.writes.clear()
    x = leaf(1024, 1024)
    stash = Stash(disk=gated)
    with stash:
        h = x * 2
        loss = h.sin()
    gated.writes.set()
    stash._workers.close()  # the write has ended, and this thread has not been back since
    h.zero_()
    with pytest.raises(InplaceError):
        gradients(loss, x)
    stash.close()


def test_a_change_after_the_copy_was_seen_to_be_whole(gated):
    x = leaf(1024, 1024)
    stash = Stash(disk=gated)
    with stash:
        h = x * 2
        loss = h.sin()
    stash._workers.close()
    stash.stats()  # lands it
    h.zero_()
    assert same_bits(*gradients(loss, x), (leaf(1024, 1024) * 2).cos().detach() * 2)
    stash.close()


def test_no_change_while_the_bytes_are_being_written(gated):
    gated.writes.clear()
    x = leaf(1024, 1024)
    stash = Stash(disk=gated)
    with stash:
        loss = (x * 2).sin()
    (grad,) = gradients(loss, x)  # in flight: from the memory that is being written
    gated.writes.set()
    assert same_bits(grad, (leaf(1024, 1024) * 2).cos().detach() * 2)
    stash.close()


class Slow(torch.autograd.Function):
    """Changes its input in place, and its version only when the test says so, as any operation does."""

    @staticmethod
    def forward(ctx, x, changed, go_on):
        x.data.zero_()
        changed.set()
        assert go_on.wait(PATIENCE_SECONDS)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


@pytest.mark.parametrize("tiers", [1024, 96], ids=["large", "small"])
@pytest.mark.parametrize("keep", [0, "64KiB"])
def test_only_its_own_thread_may_say_that_a_copy_is_whole(gated, tiers, keep):
    """A change in place is seen late by other threads: the bytes differ before the version does."""
    x = leaf(tiers, tiers)
    nbytes = tiers * tiers * 4
    stash = Stash(disk=gated, min_bytes=0, keep=0 if keep == 0 else nbytes)
    changed, go_on, results = threading.Event(), threading.Event(), []

    def work():
        try:
            with stash:
                h = x * 2
                loss = h.sin()
                Slow.apply(h, changed, go_on)
            results.append(gradients(loss, x))
        except RuntimeError as error:
            results.append(error)

    gated.writes.clear()
    thread = threading.Thread(target=work)
    thread.start()
    assert changed.wait(PATIENCE_SECONDS)
    gated.writes.set()
    with stash:  # this thread presses h out of its place, sees its write end, and lands what it may
        other = leaf(tiers, tiers, seed=2)
        mine = [(other * number).exp() for number in range(4)]
    stash.stats()
    stash._workers.close()
    stash.stats()
    go_on.set()
    thread.join(PATIENCE_SECONDS)
    (result,) = results
    true = (leaf(tiers, tiers) * 2).cos().detach() * 2
    assert isinstance(result, InplaceError) or same_bits(*result, true)
    del mine
    stash.close()


def test_memory_that_moves_under_a_write(gated):
    """A storage that is resized has other memory and no new version, which plain PyTorch allows."""
    gated.writes.clear()
    stash = Stash(disk=gated)
    x = leaf(1024, 1024)
    held = torch.ones(1024, 1024)
    with stash:
        loss = x * held
    assert gated.begun.acquire(timeout=PATIENCE_SECONDS)
    held.untyped_storage().resize_(64 << 20)
    fill = [torch.full((1024, 1024), 7.0) for _ in range(4)]  # may get the memory it had
    gated.writes.set()
    stash._workers.close()
    stash.stats()
    assert same_bits(*gradients(loss, x), torch.ones(1024, 1024))
    del fill
    stash.close()


def test_memory_that_is_gone_when_its_write_begins(tmp_path):
    """Large memory is unmapped when its storage is resized: to touch it then would end the process."""
    gated = Gated(Disk(tmp_path))
    gated.writes.clear()
    stash = Stash(disk=gated)
    x = leaf(3000, 5000)
    held = torch.ones(3000, 5000)
    with stash:
        loss = x * held
    assert gated.begun.acquire(timeout=PATIENCE_SECONDS)
    held.untyped_storage().resize_(200 << 20)
    gated.writes.set()
    stash._workers.close()
    stash.stats()
    assert same_bits(*gradients(loss, x), torch.ones(3000, 5000))
    del loss
    stash.close()
    gated.close()


def test_memory_that_is_gone_between_its_write_and_its_checksum(tmp_path, monkeypatch):
    """The checksum is made of the tensor's memory too."""
    stash = Stash(disk=Disk(tmp_path, verify=True))
    x = leaf(3000, 5000)
    held = torch.ones(3000, 5000)
    wrote, resized, write = threading.Event(), threading.Event(), UnnamedFile.write

    def held_up(file, address, nbytes, offset):
        write(file, address, nbytes, offset)
        wrote.set()
        assert resized.wait(PATIENCE_SECONDS)

    monkeypatch.setattr(UnnamedFile, "write", held_up)
    with stash:
        loss = x * held
    assert wrote.wait(PATIENCE_SECONDS)
    held.untyped_storage().resize_(200 << 20)
    resized.set()
    stash._workers.close()
    stash.stats()
    assert same_bits(*gradients(loss, x), torch.ones(3000, 5000))
    del loss
    stash.close()


@pytest.mark.parametrize("tiers", [1024, 256], ids=["large", "small"])
def test_memory_that_moves_before_it_goes(tmp_path, tiers):
    stash = Stash(disk=tmp_path, keep=tiers * tiers * 4, inflight=0)
    x = leaf(tiers, tiers)
    held = torch.ones(tiers, tiers)
    with stash:
        loss = x * held
        held.untyped_storage().resize_(64 << 20)
        fill = [torch.full((tiers, tiers), 7.0) for _ in range(4)]
        rest = [x * each for each in fill]
    assert same_bits(*gradients(loss, x), torch.ones(tiers, tiers))
    del fill, rest
    stash.close()


# What comes back may be changed too.


class Doubles(torch.autograd.Function):
    """Changes in place what it is given back: legal once, and the next unpack must not see it."""

    @staticmethod
    def forward(ctx, x, saved):
        ctx.save_for_backward(saved)
        return x * saved

    @staticmethod
    def backward(ctx, grad):
        (saved,) = ctx.saved_tensors
        return grad * saved.mul_(2), None


@pytest.mark.parametrize(
    "view", [lambda h: h, lambda h: h.t(), lambda h: h[1:], lambda h: h.detach()]
)
def test_backward_changes_what_it_was_given_and_another_node_wants_it(tmp_path, view):
    def program(change):
        x = leaf(SIDE, SIDE)
        h = x.detach() * 2
        first = (x * view(h)).sum() if view(h).shape == x.shape else (x[1:] * view(h)).sum()
        second = Doubles.apply(x, h).sum() if change else (x * (h * 2)).sum()
        return lambda: (*gradients(second, x), *gradients(first, x))

    raised = check(program, tmp_path)
    assert not raised & ALL_LANDED


def test_backward_changes_what_it_was_given_and_runs_again(tmp_path):
    def program(change):
        x = leaf(SIDE, SIDE)
        h = x.detach() * 2
        loss = Doubles.apply(x, h) if change else x * (h * 2)
        once = lambda: gradients(loss, x, retain_graph=True)  # noqa: E731
        return lambda: (*once(), *once(), *once())

    raised = check(program, tmp_path)
    assert not raised & ALL_LANDED


def test_backward_changes_a_part_that_is_saved_again(tmp_path):
    """The part in place is the stash's own copy, so its origin is what it was."""
    for way in WAYS:
        stash = Stash(**{"disk": tmp_path, **WAYS[way]})
        x = leaf(SIDE)
        with stash:
            held = torch.full((SIDE, SIDE), 3.0)
            first = Doubles.apply(x, held[3])
            gradients(first, x, retain_graph=True)
            second = x * held[3]
        (grad,) = gradients(second, x)
        assert torch.all(grad == held[3]), way
        del first
        stash.close()


def test_two_threads_are_given_the_same_bytes_and_one_changes_them(tmp_path, monkeypatch):
    """A thread that waited for another one's read must not take what that one has changed since."""
    asked, other_changed = threading.Event(), threading.Event()
    wait = Prefetcher._wait

    def slow_wait(*arguments):
        waits = threading.current_thread().name == "waits"
        if waits:
            asked.set()
        error = wait(*arguments)
        if waits:
            assert other_changed.wait(PATIENCE_SECONDS)
        return error

    monkeypatch.setattr(Prefetcher, "_wait", slow_wait)
    store = Gated(Disk(tmp_path))
    stash, results = Stash(disk=store, inflight=0), {}
    x = leaf(1024, 1024)
    with stash:
        held = torch.full((1024, 1024), 3.0)
        loss = Doubles.apply(x, held).sum()
    store.reads.clear()

    def work():
        name = threading.current_thread().name
        results[name] = gradients(loss, x, retain_graph=True)[0]

    threads = {name: threading.Thread(target=work, name=name) for name in ("changes", "waits")}
    for thread in threads.values():
        thread.start()
    assert asked.wait(PATIENCE_SECONDS)
    store.reads.set()
    threads["changes"].join(PATIENCE_SECONDS)
    other_changed.set()
    threads["waits"].join(PATIENCE_SECONDS)
    assert torch.all(results["changes"] == 6.0)
    assert torch.all(results["waits"] == 6.0)
    stash.close()
    store.close()


def test_a_gradient_that_is_the_saved_tensor_itself(tmp_path):
    """Accumulating into such a gradient must not change what is saved."""

    class Returns(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, saved):
            ctx.save_for_backward(saved)
            return x * saved

        @staticmethod
        def backward(ctx, grad):
            return ctx.saved_tensors[0], None

    for way in WAYS:
        stash = Stash(**{"disk": tmp_path, **WAYS[way]})
        x = leaf(SIDE, SIDE)
        with stash:
            held = torch.full((SIDE, SIDE), 2.0)
            loss = Returns.apply(x, held).sum()
        try:
            for expected in (2.0, 4.0, 6.0):
                loss.backward(retain_graph=True)
                assert torch.all(x.grad == expected), way
        except InplaceError:
            pass  # the bytes in place were changed by the accumulation, as in plain PyTorch
        stash.close()


# What the error says.


class Inner(nn.Module):
    def forward(self, h):
        self.saved = h * 2
        return self.saved.sin()


@pytest.mark.parametrize("options", [{"keep": None}, {}], ids=["kept", "in flight"])
def test_the_error_names_module_shape_and_versions(gated, options):
    gated.writes.clear()
    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity(), Inner()))
    x = leaf(SIDE, SIDE, 16)
    stash = Stash(disk=gated, **options)
    with stash:
        loss = model(x)
    model[1][1].saved.add_(1).add_(1)
    with pytest.raises(InplaceError) as info:
        gradients(loss, x)
    gated.writes.set()
    text = str(info.value)
    assert "modified by an inplace operation" in text
    assert f"shape ({SIDE}, {SIDE}, 16)" in text
    assert "1.1 saved for SinBackward0" in text
    assert "is at version 2; expected version 0" in text
    stash.close()


def error_of(stash, loss, x):
    with pytest.raises(InplaceError) as info:
        gradients(loss, x)
    stash.close()
    return str(info.value)


def test_the_error_of_a_parameter_says_whose_it_is(tmp_path):
    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.LayerNorm(SIDE)))
    x = leaf(SIDE, SIDE)
    stash = Stash(disk=tmp_path, min_bytes=0)
    norm = model[1][0]
    with stash:
        loss = F.layer_norm(model(x), (SIDE,), norm.weight, norm.bias)
    with torch.no_grad():
        norm.weight.zero_()
    text = error_of(stash, loss, x)
    assert f"shape ({SIDE},)" in text and "1.0, whose weight it is, saved" in text
    assert f"version {norm.weight._version}; expected version {norm.weight._version - 1}" in text


def test_the_error_without_a_tier_names_the_module_too():
    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity(), Inner()))
    x = leaf(SIDE, SIDE)
    stash = Stash()
    with stash:
        loss = model(x)
    model[1][1].saved.add_(1)
    assert "1.1 saved for SinBackward0" in error_of(stash, loss, x)


def test_the_error_of_a_small_tensor_says_how_to_learn_more(tmp_path):
    x = leaf(9)
    stash = Stash(disk=tmp_path)
    with stash:
        h = x * 2
        loss = h.sin()
    h.add_(1)
    text = error_of(stash, loss, x)
    assert "shape (9,)" in text and "min_bytes=0 records small ones" in text


def test_bytes_changed_unseen_between_two_saves(tmp_path):
    """Plain PyTorch is wrong about the first save and right about the second."""
    stash = Stash(disk=tmp_path, inflight=0)
    x, held = leaf(SIDE, SIDE), torch.full((SIDE, SIDE), 2.0)
    try:
        with stash:
            first = x * held
            third = first.sin()  # now what the first saved goes down
            held.data.mul_(3)
            second = x * held
        (grad,) = gradients(second, x)
        assert torch.all(grad == 6.0)
    finally:
        del first, second, third
        stash.close()


@pytest.mark.parametrize("min_bytes", [1, "64KiB"], ids=["in segments", "alone"])
@pytest.mark.parametrize("then", ["the end", "another operation", "the same again"])
def test_what_an_operation_saves_before_it_fills_it(tmp_path, min_bytes, then):
    """rrelu saves its noise, then makes it; that raises no version."""

    def program():
        torch.manual_seed(0)
        y = torch.nn.functional.rrelu(x.exp(), training=True)
        if then == "another operation":
            y = y.sin()
        if then == "the same again":
            y = torch.nn.functional.rrelu(y - 1.0, training=True)
        return y.sum()

    tiers = 30 if min_bytes == 1 else 300
    x = leaf(tiers, tiers)
    expected = gradients(program(), x)
    stash = Stash(disk=tmp_path, min_bytes=min_bytes, inflight=0)
    with stash:
        loss = program()
    # At least the noise and one of rrelu's; what follows saves more.
    assert stash.stats().written_bytes == stash.stats().eligible_bytes >= 2 * x.nbytes
    assert torch.equal(gradients(loss, x)[0], expected[0])
    stash.close()


def test_what_waits_on_a_thread_that_ended_may_go_later(tmp_path):
    """A thread that ends inside a context leaves a block behind that has waited for its operation."""
    stash = Stash(disk=tmp_path, keep="1MiB")
    x, found = leaf(600, 600), []

    def work():
        stash.__enter__()
        found.append(x * torch.full((600, 600), 2.0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert stash.stats().keep_bytes == 1_440_000
    with stash:
        loss = x.exp().sin()
    assert stash.stats().keep_bytes == 0  # each is larger than the budget
    assert torch.equal(gradients(found[0], x)[0], torch.full((600, 600), 2.0))
    found.clear()
    del loss
    stash.close()


# Buffers that a program fills itself, unseen, between two saves.


class FillsUnseen(torch.autograd.Function):
    """Writes a column of a buffer through ``.data`` and returns the buffer, as torchdiffeq's solvers do."""

    @staticmethod
    def forward(ctx, buffer, value, column):
        ctx.column = column
        buffer.data[..., column] = value
        return buffer

    @staticmethod
    def backward(ctx, grad):
        return grad, grad[..., ctx.column], None


@pytest.mark.parametrize("columns", [3, 12])
@pytest.mark.parametrize("way", WAYS)
def test_a_buffer_that_is_filled_unseen_between_two_saves(tmp_path, way, columns):
    """Test a program like torchdiffeq's `odeint`, which fills a buffer through `.data` between saves."""

    def program():
        x = leaf(300)
        buffer = torch.full((300, columns), float("nan"), dtype=x.dtype)
        total, value = x, x
        for column in range(columns):
            buffer = FillsUnseen.apply(buffer, value.sin(), column)
            value = (buffer[:, : column + 1] * buffer[:, : column + 1]).sum(1) / columns
            total = total + value
        return lambda: gradients(total, x)

    check_exact(tmp_path, way, program)


def check_exact(tmp_path, way, program):
    (true,) = program()()
    assert not true.isnan().any()
    options = dict(WAYS[way])
    stash = Stash(**{"disk": tmp_path, **options})
    with stash:
        backward = program()
    (mine,) = backward()
    assert same_bits(mine, true)
    del backward
    stash.close()


def test_slices_of_a_batch_move_once_each(tmp_path):
    """What needs no gradient moves once, whichever slices of it are saved."""
    data = torch.randn(4, 100, 100)
    weight = leaf(100, 100).to(torch.float32).detach().requires_grad_()
    stash = Stash(disk=tmp_path, min_bytes=0, inflight=0)
    with stash:
        loss = sum((data[i] * weight * data[i]).sum() for i in range(4))
        loss = loss + (data[1] * weight).sum()
    assert stash.stats().written_bytes == data.nbytes  # weight is a leaf
    del loss
    stash.close()
