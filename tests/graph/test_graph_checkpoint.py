"""``graph.checkpoint``: what a selective checkpoint keeps is in the stash; gradients are plain PyTorch's."""

import contextlib
import functools

import pytest
import torch
from torch.utils import checkpoint as stock
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from backstash import Stash
from backstash.errors import InplaceError, UsageError
from backstash.graph import checkpoint

SIDE = 64
BYTES = SIDE * SIDE * 8
MM = torch.ops.aten.mm.default
SAVING = [name for name in CheckpointPolicy.__members__ if "RECOMPUTE" not in name]


def selective(chosen, policy=CheckpointPolicy.MUST_SAVE):
    """A ``context_fn`` that gives ``policy`` to calls of the operators in ``chosen``."""

    def choose(context, operator, *args, **kwargs):
        return policy if operator in chosen else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, choose)


def kept(chosen, policy=CheckpointPolicy.MUST_SAVE, **options):
    return functools.partial(checkpoint, context_fn=selective(chosen, policy), **options)


def chosen_by(choose):
    """A checkpoint that asks ``choose`` for the policy of each call."""
    contexts = functools.partial(create_selective_checkpoint_contexts, choose)
    return functools.partial(checkpoint, context_fn=contexts)


def inputs():
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(SIDE, SIDE, dtype=torch.double, generator=generator) for _ in range(2)]
    return [each.requires_grad_() for each in made]


def block(x, w):
    h = (x @ w).tanh()
    h = torch.nn.functional.dropout(h @ w, 0.3)
    return (h.t() @ w).relu().sum()


class Calls(TorchDispatchMode):
    """Counts the calls of matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is MM
        return function(*args, **kwargs or {})


def gradients(call, function=block, again=False):
    """The gradients of ``function`` by ``call``, and how many products backward took."""
    given = inputs()
    torch.manual_seed(7)
    loss = call(function, *given)
    with Calls() as calls:
        found = torch.autograd.grad(loss, given, retain_graph=again)
        if again:
            assert equal(torch.autograd.grad(loss, given), found)
    return found, calls.count


def plain(function, *args):
    return function(*args)


def equal(ones, others):
    return all(map(torch.equal, ones, others))


@pytest.fixture
def stash(tmp_path):
    with_disk = Stash(disk=tmp_path, min_bytes=0)
    yield with_disk
    with_disk.close()


@pytest.mark.parametrize("name", SAVING)
def test_what_is_kept_goes_into_the_stash(stash, name):
    expected, fewest = gradients(plain)
    found, products = gradients(stash(kept({MM}, CheckpointPolicy[name])))
    assert equal(found, expected)
    assert products == fewest, "none is computed again"
    assert stash.stats().eligible_bytes == 3 * BYTES, "the products; the inputs are leaves"
    assert stash.stats().blocks == 0


@pytest.mark.parametrize("name", SAVING)
def test_without_a_stash_it_stays_in_place(name):
    expected, fewest = gradients(plain)
    found, products = gradients(kept({MM}, CheckpointPolicy[name]))
    assert equal(found, expected) and products == fewest


def test_nothing_kept_is_all_computed_again(stash):
    expected, fewest = gradients(plain)
    for options in ({}, {"context_fn": selective(())}):
        found, products = gradients(stash(functools.partial(checkpoint, **options)))
        assert equal(found, expected) and products > fewest


@pytest.mark.parametrize("chosen", [{MM}, {MM, torch.ops.aten.tanh.default}])
def test_equal_to_torchs_own(stash, chosen):
    theirs = functools.partial(stock.checkpoint, use_reentrant=False, context_fn=selective(chosen))
    assert equal(gradients(stash(kept(chosen)))[0], gradients(theirs)[0])


def test_a_graph_may_be_used_twice(stash):
    expected, _ = gradients(plain)
    assert equal(gradients(stash(kept({MM})), again=True)[0], expected)
    assert stash.stats().blocks == 0


def test_in_place_a_graph_may_be_used_twice_and_keeps_no_history():
    found, _ = gradients(kept({MM}), again=True)
    assert equal(found, gradients(plain)[0])


@pytest.mark.parametrize("operator", [torch.ops.aten.mul_.Tensor, torch.ops.aten.t.default])
def test_a_write_in_place_and_a_view_are_done_again(stash, operator):
    def writing(x, w):
        h = (x @ w).sin().clone()
        h.mul_(3)
        return (h.t() @ w).exp().sum()

    held = kept({operator})
    assert equal(gradients(stash(held), writing)[0], gradients(plain, writing)[0])


def test_random_numbers_after_a_kept_draw_are_the_same(stash):
    def drawing(x, w):
        kept = torch.rand_like(x)
        return (x * kept * torch.rand_like(x)).exp().sum() + w.sum()

    expected, _ = gradients(plain, drawing)
    first = [CheckpointPolicy.MUST_SAVE]

    def choose(context, operator, *args, **kwargs):
        is_draw = operator is torch.ops.aten.rand_like.default
        return first.pop() if is_draw and first else CheckpointPolicy.PREFER_RECOMPUTE

    held = chosen_by(choose)
    assert equal(gradients(stash(held), drawing)[0], expected)


def test_everything_kept_that_can_be(stash):
    held = chosen_by(lambda context, operator, *args, **kwargs: True)

    def without_writes(x, w):
        return ((x @ w).tanh().t() @ w).relu().view(-1).sum()

    found, _ = gradients(stash(held), without_writes)
    assert equal(found, gradients(plain, without_writes)[0])


def test_a_change_in_place_of_what_is_kept_is_an_error_or_its_value_of_then(stash):
    def writing(x, w):
        product = x @ w
        result = product.sin()
        product.detach().zero_()
        return result.sum()

    held = kept({MM})
    with pytest.raises(InplaceError, match="modified by an inplace operation"):
        gradients(held, writing)
    with contextlib.suppress(InplaceError):  # where the write came before the copy
        assert equal(
            gradients(stash(held), writing)[0],
            gradients(plain, lambda x, w: (x @ w).sin().sum())[0],
        )


def test_a_function_that_does_something_else_is_an_error(stash):
    shapes = [SIDE, SIDE // 2]

    def changing(x, w):
        side = shapes.pop(0)
        return (x[:side] @ w).sin().sum() + x.exp().sum()

    held = kept({MM}, determinism_check="none", early_stop=False)
    with pytest.raises(UsageError, match="was called differently"):
        gradients(stash(held), changing)


def test_a_checkpoint_in_a_checkpoint(stash):
    def outer(x, w):
        return checkpoint(block, x, w, context_fn=selective({MM})) + (x @ w).sum()

    expected, _ = gradients(plain, outer)
    found, _ = gradients(stash(kept({MM})), outer)
    assert equal(found, expected) and equal(
        expected, gradients(plain, lambda x, w: block(x, w) + (x @ w).sum())[0]
    )


def test_a_graph_that_is_dropped_frees_its_blocks(stash):
    given = inputs()
    with stash:
        loss = checkpoint(block, *given, context_fn=selective({MM}))
    assert stash.stats().blocks == 3
    del loss
    assert stash.stats().blocks == 0


def test_options_are_passed_to_a_torch_that_takes_them(monkeypatch):
    passed = {}

    def newer(function, *args, use_reentrant=None, respect_saved_tensors_hooks=None, **options):
        passed.update(options, respect=respect_saved_tensors_hooks, reentrant=use_reentrant)
        return function(*args)

    monkeypatch.setattr(stock, "checkpoint", newer)
    assert checkpoint(lambda x: x + 1, 1, early_stop=False) == 2
    assert passed == {"early_stop": False, "respect": True, "reentrant": False}


def test_the_reentrant_kind_is_refused():
    with pytest.raises(UsageError, match=r"use_reentrant=True\): allowed is False"):
        checkpoint(torch.exp, torch.ones(1), use_reentrant=True)
