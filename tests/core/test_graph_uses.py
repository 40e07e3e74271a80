"""Every use of a graph: kept, differentiated again, interleaved, dropped, cut short, checkpointed, nested."""

import copy
import gc
import io
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from backstash import Stash
from backstash.errors import InplaceError
from oracle import WAYS, check, gradients, on_disk, run, same_bits

SIDE = 192


def leaf(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (SIDE, SIDE)), generator=generator).requires_grad_()


def chain(x, weight):
    h = x
    for _ in range(4):
        h = torch.tanh(h @ weight) * h.sigmoid()
    return h


def inputs():
    return leaf(), leaf(seed=2)


class Marker:
    pass


def watch(tensor):
    """A weak reference that dies with the node that made ``tensor``."""
    marker = tensor.grad_fn.metadata["marker"] = Marker()
    return weakref.ref(marker)


def test_a_retained_graph_may_be_used_again(tmp_path):
    def program():
        x, w = inputs()
        loss = chain(x, w)

        def backward():
            grads = [each for _ in range(3) for each in gradients(loss, x, w, retain_graph=True)]
            return (*grads, *gradients(loss, x, w))

        return backward

    check(program, tmp_path)


def test_three_uses_of_a_retained_graph_read_once(tmp_path):
    def program():
        x, w = inputs()
        loss = chain(x, w)
        return lambda: [gradients(loss, x, retain_graph=True)[0] for _ in range(3)]

    stats = on_disk(program, tmp_path).stats()
    assert stats.written_bytes == stats.eligible_bytes
    # Not exact: of each of eleven blocks, the units of 4096 bytes are read that it lies in.
    assert stats.eligible_bytes <= stats.read_bytes <= stats.eligible_bytes + 11 * 4096


@pytest.mark.parametrize("inside", [True, False], ids=["packed too", "outside"])
def test_second_and_third_order(tmp_path, inside):
    def program():
        x, w = inputs()
        loss = chain(x, w).sin().sum()

        def backward():
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), w, create_graph=True)
            return first.detach(), second.detach(), *gradients(second.exp(), x, w)

        if inside:
            results = backward()
            return lambda: results
        return backward

    check(program, tmp_path)


def test_a_gradient_penalty(tmp_path):
    critic = nn.Sequential(nn.Linear(SIDE, SIDE), nn.SiLU(), nn.Linear(SIDE, SIDE), nn.Tanh())

    def program():
        x = leaf()
        (grad,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        loss = (grad.norm(dim=1) - 1).square().mean()
        return lambda: gradients(loss, x, *critic.parameters())

    check(program, tmp_path)


def test_graphs_that_are_interleaved(tmp_path):
    def program():
        (x, w), losses = inputs(), []
        h = [x * number for number in range(1, 5)]
        for _ in range(3):  # a step of each in turn
            h = [torch.tanh(each @ w) * each.sigmoid() for each in h]
        losses = [each.sum() for each in h]

        def backward():
            order = [losses[number] for number in (2, 0, 3, 1)]
            return [grad for loss in order for grad in gradients(loss, x, w)]

        return backward

    check(program, tmp_path)


def test_backward_of_one_graph_between_the_forwards_of_others(tmp_path):
    def program():
        x, w = inputs()
        results, waiting = [], None
        for number in range(1, 5):
            loss = chain(x * number, w)
            if waiting is not None:
                results.extend(gradients(waiting, x, w))
            waiting = loss
        return lambda: [*results, *gradients(waiting, x, w)]

    check(program, tmp_path)


def test_a_hundred_graphs_alive(tmp_path):
    def program():
        x = leaf(64, 64)
        losses = [(x * number).sin().exp() for number in range(100)]
        return lambda: [gradients(loss, x)[0] for loss in losses[::3] + losses[1::3] + losses[2::3]]

    check(program, tmp_path, ["all on disk", "in flight", "keep some"])


@pytest.mark.parametrize("way", WAYS)
def test_a_graph_that_is_dropped_gives_everything_back(tmp_path, way):
    x, w = inputs()
    stash = Stash(**{"disk": tmp_path, **WAYS[way]})
    with stash:
        losses = [chain(x * number, w).sum() for number in range(3)]
    gradients(losses[0], x, retain_graph=True)
    node = watch(losses[1])
    del losses
    gc.collect()
    stash._workers.close()
    stats = stash.stats()
    assert (stats.blocks, stats.disk_bytes, stats.keep_bytes, stats.inflight_bytes) == (0, 0, 0, 0)
    assert stats.ahead_bytes == 0
    assert node() is None
    stash.close()


@pytest.mark.parametrize("way", WAYS)
def test_an_output_that_its_operation_saved_does_not_hold_itself(tmp_path, way):
    for numel in (9, 64 * 1024):
        stash = Stash(**{"disk": tmp_path, **WAYS[way]})
        x = leaf(numel)
        with stash:
            y = x.exp()
        node, value = watch(y), weakref.ref(y)
        del y
        assert node() is None and value() is None
        stash.close()


def test_a_partial_backward_leaves_the_rest_usable(tmp_path):
    def program():
        x, w = inputs()
        h = chain(x, w)
        loss = (h.sin() @ w).sum()

        def backward():
            loss.backward(inputs=[w], retain_graph=True)
            first = w.grad.clone()
            (of_h,) = torch.autograd.grad(loss, h, retain_graph=True)
            loss.backward(inputs=[x])
            return first, of_h, x.grad, w.grad

        return backward

    check(program, tmp_path)


def test_backward_in_another_thread(tmp_path):
    def program():
        x, w = inputs()
        losses = [chain(x * number, w) for number in range(1, 5)]

        def backward():
            results = {}

            def work(number):
                results[number] = gradients(losses[number], x, w)

            threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return [grad for number in range(4) for grad in results[number]]

        return backward

    check(program, tmp_path)


def test_threads_that_use_one_graph_at_once(tmp_path):
    def program():
        x, w = inputs()
        loss = chain(x, w)

        def backward():
            results = []
            work = lambda: results.append(gradients(loss, x, w, retain_graph=True))  # noqa: E731
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(results) == 4
            return [grad for grads in results for grad in grads]

        return backward

    check(program, tmp_path)


def test_forward_in_threads_that_end_before_backward(tmp_path):
    def program():
        (x, w), losses = inputs(), {}

        def work(number, stash):
            with stash:
                losses[number] = chain(x * number, w)

        stash = current[0]
        threads = [threading.Thread(target=work, args=(number, stash)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return lambda: [grad for number in range(4) for grad in gradients(losses[number], x, w)]

    current = [Stash(disk=None)]
    want = run(program)
    for way in WAYS:
        current[0] = Stash(**{"disk": tmp_path, **WAYS[way]})
        got = run(program)
        assert current[0].stats().saves == 4 * 4 * 6
        current[0].close()
        assert all(same_bits(*pair) for pair in zip(got, want, strict=True)), way


# Checkpointing.


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("within", [True, False], ids=["backward inside", "backward outside"])
def test_checkpoints_inside_a_stash(tmp_path, reentrant, within):
    def program():
        x, w = inputs()
        h = x * 2
        for _ in range(3):
            h = checkpoint(chain, h, w, use_reentrant=reentrant) * h
        if within:
            results = gradients_by_backward(h, x, w)
            return lambda: results
        return lambda: gradients_by_backward(h, x, w)

    check(program, tmp_path)


def gradients_by_backward(loss, *leaves):
    """Reentrant checkpointing works with ``backward`` only."""
    loss.sum().backward()
    return [each.grad for each in leaves]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_a_stash_inside_a_checkpoint(tmp_path, reentrant):
    want = None
    for way in (None, *WAYS):
        stash = Stash(**{"disk": tmp_path, **WAYS[way]}) if way else None

        def part(h, w, stash=stash):
            if stash is None:
                return chain(h, w)
            with stash:
                h = chain(h, w)
            return h.sin() * h

        def plain(h, w):
            h = chain(h, w)
            return h.sin() * h

        x, w = inputs()
        h = x * 2
        for _ in range(2):
            h = checkpoint(part if stash else plain, h, w, use_reentrant=reentrant)
        got = gradients_by_backward(h, x, w)
        if stash is None:
            want = got
        else:
            assert all(same_bits(*pair) for pair in zip(got, want, strict=True)), way
            assert stash.stats().saves > 0
            stash.close()


# Scopes.


def test_nested_stashes(tmp_path):
    outer = Stash(disk=tmp_path, min_bytes=0, inflight=0)
    inner = Stash(disk=tmp_path, min_bytes=0, inflight=0)

    def program(outer, inner):
        x, w = inputs()
        with outer:
            h = chain(x, w)
            with inner:
                h = chain(h, w)
                with outer:
                    h = chain(h, w)
            h = chain(h, w)
        return gradients(h, x, w)

    want = program(nullcontext(), nullcontext())
    got = program(outer, inner)
    assert all(same_bits(*pair) for pair in zip(got, want, strict=True))
    assert outer.stats().saves == 3 * inner.stats().saves > 0
    outer.close()
    inner.close()


def test_a_stash_within_save_on_cpu_and_the_reverse(tmp_path):
    stash = Stash(disk=tmp_path, min_bytes=0, inflight=0)
    x, w = inputs()
    want = gradients(chain(chain(x, w), w), x, w)
    with torch.autograd.graph.save_on_cpu(), stash:
        h = chain(x, w)
        with torch.autograd.graph.save_on_cpu():
            h = chain(h, w)
    assert all(same_bits(*pair) for pair in zip(gradients(h, x, w), want, strict=True))
    assert stash.stats().saves == 4 * 6
    stash.close()


# Models.


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(SIDE, 2 * SIDE), nn.Linear(2 * SIDE, SIDE)
        self.norm = nn.BatchNorm1d(SIDE)

    def forward(self, x, *, scale=1.0):
        return self.norm(x + self.down(F.gelu(self.up(x * scale))))


def model():
    torch.manual_seed(7)
    return Model()


def test_an_attached_module(tmp_path):
    want_model, x = model(), leaf()
    want = gradients(want_model(x, scale=2.0).sin(), x, *want_model.parameters())
    for way in WAYS:
        stash, held = Stash(**{"disk": tmp_path, **WAYS[way]}), model()
        keys = list(held.state_dict())
        with stash.attach(held):
            assert list(held.state_dict()) == keys
            got = gradients(held(x, scale=2.0).sin(), x, *held.parameters())
            assert stash.stats().saves > 0
        assert all(same_bits(*pair) for pair in zip(got, want, strict=True)), way
        stash.close()


def test_replicas_in_threads(tmp_path):
    """What ``nn.DataParallel`` does: shallow copies of the module, each called in a thread of its own."""
    whole = model().eval()
    parts = leaf(4 * SIDE, SIDE).chunk(4)

    def program(stash):
        replicas = [whole._replicate_for_data_parallel() for _ in parts]
        for replica in replicas:
            replica._parameters = dict(whole._parameters)
        outputs = {}

        def work(number):
            outputs[number] = replicas[number](parts[number])

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        loss = torch.cat([outputs[number] for number in range(4)]).sin()
        return gradients(loss, *whole.parameters())

    want = program(None)
    stash = Stash(disk=tmp_path, min_bytes=0, inflight=0)
    with stash.attach(whole):
        got = program(stash)
    assert all(same_bits(*pair) for pair in zip(got, want, strict=True))
    assert stash.stats().saves >= 4 * 3
    stash.close()


def test_a_deep_copy_of_an_attached_model_shares_the_stash(tmp_path):
    stash, first = Stash(disk=tmp_path, min_bytes=0), model()
    handle = stash.attach(first)
    twin = copy.deepcopy(first)
    assert list(twin.state_dict()) == list(model().state_dict())
    handle.remove()
    x = leaf()
    want = gradients(first(x), x)
    before = stash.stats().saves
    assert same_bits(*gradients(twin(x), x), *want)
    assert stash.stats().saves > before
    stash.close()


def test_a_state_dict_of_an_attached_model_is_saved_and_loaded(tmp_path):
    stash, held = Stash(disk=tmp_path), model()
    with stash.attach(held):
        file = io.BytesIO()
        torch.save(held.state_dict(), file)
        file.seek(0)
        other = model()
        other.load_state_dict(torch.load(file, weights_only=True))
    for name, value in held.state_dict().items():
        assert same_bits(value, other.state_dict()[name]), name
    stash.close()


# Looking, and trouble.


@pytest.mark.parametrize("way", WAYS)
def test_looking_at_what_is_saved(tmp_path, way):
    stash = Stash(**{"disk": tmp_path, **WAYS[way]})
    x = leaf()
    with stash:
        h = x * 2
        y = h.sin()
    for _ in range(3):
        looked = y.grad_fn._saved_self
        assert same_bits(looked.detach(), h.detach())
        assert looked.grad_fn is h.grad_fn and looked.requires_grad
    (grad,) = gradients(y, x)
    assert same_bits(grad, 2 * (2 * leaf()).cos().detach())
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        _ = y.grad_fn._saved_self
    stash.close()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if Fails.armed:
            raise ArithmeticError("in the middle of backward")
        return grad * x


@pytest.mark.parametrize("way", WAYS)
def test_an_exception_in_the_middle_of_backward(tmp_path, way):
    stash = Stash(**{"disk": tmp_path, **WAYS[way]})
    x, w = inputs()
    Fails.armed = False
    want = gradients(chain(Fails.apply(chain(x, w)), w), x, w)
    with stash:
        loss = chain(Fails.apply(chain(x, w)), w)
    Fails.armed = True
    with pytest.raises(ArithmeticError, match="in the middle"):
        gradients(loss, x, w, retain_graph=True)
    Fails.armed = False
    got = gradients(loss, x, w)
    assert all(same_bits(*pair) for pair in zip(got, want, strict=True))
    del loss
    stash._workers.close()
    assert stash.stats().blocks == 0
    stash.close()


@pytest.mark.parametrize("way", WAYS)
def test_an_exception_in_the_middle_of_forward(tmp_path, way):
    stash = Stash(**{"disk": tmp_path, **WAYS[way]})
    x, w = inputs()
    want = gradients(chain(x, w), x, w)
    with pytest.raises(ArithmeticError), stash:
        chain(x, w)
        raise ArithmeticError
    with stash:
        loss = chain(x, w)
    assert all(same_bits(*pair) for pair in zip(gradients(loss, x, w), want, strict=True))
    del loss
    stash.close()


def test_an_error_of_one_node_leaves_the_other_graphs_whole(tmp_path):
    stash = Stash(disk=tmp_path, min_bytes=0, keep=None)
    x, w = inputs()
    with stash:
        good = chain(x, w)
        h = x * 2
        bad = h.sin()
        h.add_(1)
    with pytest.raises(InplaceError):
        gradients(bad, x, retain_graph=True)
    with pytest.raises(InplaceError):  # and it stays so
        gradients(bad, x)
    assert all(
        same_bits(*p) for p in zip(gradients(good, x, w), gradients(chain(x, w), x, w), strict=True)
    )
    stash.close()


def test_a_closed_stash_still_gives_back_what_graphs_hold(tmp_path):
    x, w = inputs()
    want = gradients(chain(x, w), x, w)
    stash = Stash(disk=tmp_path, min_bytes=0)
    with stash:
        loss = chain(x, w)
    stash.close()
    assert all(same_bits(*pair) for pair in zip(gradients(loss, x, w), want, strict=True))


def test_a_function_of_one_s_own(tmp_path):
    """The request that this library answers: what ``save_for_backward`` is given goes to disk."""

    class Swish(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, beta):
            gate = torch.sigmoid(beta * x)
            ctx.save_for_backward(x, beta, gate)
            return x * gate

        @staticmethod
        def backward(ctx, grad):
            x, beta, gate = ctx.saved_tensors
            slope = gate * (1 - gate)
            return grad * (gate + beta * x * slope), (grad * x * x * slope).sum()

    def program():
        x, beta = leaf(), leaf(())
        loss = Swish.apply(x * 1, beta * 1).sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        return lambda: (first.detach(), *gradients(first.square(), x, beta))

    check(program, tmp_path)
    # Not exact: what the operations of its backward save is PyTorch's affair.
    assert on_disk(program, tmp_path).stats().written_bytes > 2 * SIDE * SIDE * 4
