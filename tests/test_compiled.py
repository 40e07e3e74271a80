"""The rows of docs/how-to/compile.md: what a stash holds of what torch.compile made.

Counts of bytes are not exact: what a compiled graph saves is the compiler's affair.
"""

import contextlib
import importlib
import threading
import warnings

import pytest
import torch
from torch import nn

from backstash import Stash
from backstash.errors import StashWarning
from backstash.testing import MemoryStore
from long_tests import takes_long

SIDE = 64
IGNORED = r"runs inside torch.compile.*nothing of it is held.*torch\.compiler\.reset\(\)"


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def stash(disk_dir):
    made = Stash(disk=disk_dir, min_bytes=1024)
    yield made
    made.close()


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(SIDE, SIDE), nn.GELU()) for _ in range(3)))


def gradients(model, around=None):
    """Of one step, with forward alone inside ``around``."""
    x = torch.linspace(-1, 1, SIDE * SIDE).view(SIDE, SIDE)
    for each in model.parameters():
        each.grad = None
    if around is None:
        loss = model(x).square().sum()
    else:
        with around:
            loss = model(x).square().sum()
    loss.backward()
    return [each.grad for each in model.parameters()]


def equal(one, other):
    return all(map(torch.equal, one, other))


def whole(model, backend):
    return torch.compile(model, backend=backend)


def full(model, backend):
    return torch.compile(model, backend=backend, fullgraph=True)


def in_place(model, backend):
    for block in model:
        block.compile(backend=backend)
    return model


def wrapped(model, backend):
    return nn.Sequential(*(torch.compile(block, backend=backend) for block in model))


INDUCTOR = pytest.param(
    "inductor",
    marks=takes_long,
)


# Dynamo looks at the gradient of what another graph made.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", INDUCTOR])
@pytest.mark.parametrize("way", [whole, full, in_place, wrapped])
def test_a_stash_around(stash, way, backend):
    alone = contextlib.nullcontext()
    if backend == "inductor":  # no processes that outlive the test
        alone = importlib.import_module("torch._inductor.config").patch(compile_threads=1)
    with alone:
        expected = gradients(way(model_of(), backend))
        torch.compiler.reset()
        assert equal(gradients(way(model_of(), backend), stash), expected)
    assert stash.stats().written_bytes >= 4 * SIDE * SIDE * 4 and stash.stats().blocks == 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", [whole, in_place])
@pytest.mark.parametrize("on", ["model", "compiled", "blocks"])
def test_attached_before_the_first_call(stash, way, backend, on):
    expected = gradients(way(model_of(), backend))
    torch.compiler.reset()
    model = model_of()
    compiled = way(model, backend)
    for each in {"model": [model], "compiled": [compiled], "blocks": model}[on]:
        stash.attach(each)
    assert equal(gradients(compiled), expected)
    assert stash.stats().written_bytes >= 3 * SIDE * SIDE * 4


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_child_that_is_attached_and_then_compiled(stash, backend):
    model = model_of()
    with stash.attach(model[1]):
        compiled = whole(model, backend)
        found = gradients(compiled)
    assert 0 < stash.stats().written_bytes <= 2 * SIDE * SIDE * 4
    assert equal(found, gradients(model_of()))


def test_with_fullgraph_the_compiler_names_the_remedy(stash):
    model = model_of()
    with (
        stash.attach(model[1]),
        pytest.raises(Exception, match=r"attach or hook what torch.compile"),
    ):
        gradients(full(model, "eager"))


@pytest.mark.parametrize("is_child", [True, False])
def test_attached_too_late_it_warns(stash, is_child):
    model = model_of()
    compiled = whole(model, "aot_eager")
    gradients(compiled)
    with pytest.warns(StashWarning, match=IGNORED):
        handle = stash.attach(model[1] if is_child else model)
    gradients(compiled)
    assert stash.stats().saves == 0, "what the warning is about"
    torch.compiler.reset()  # the remedy
    gradients(compiled)
    assert stash.stats().written_bytes > 0
    handle.remove()


def test_what_was_compiled_in_place_is_compiled_again(stash):
    model = model_of()
    model.compile(backend="aot_eager")
    expected = gradients(model)
    with stash.attach(model[1]):  # a warning is an error in these tests
        found = gradients(model)
    assert equal(found, expected)
    assert stash.stats().written_bytes > 0


def test_what_is_not_inside_does_not_warn(stash):
    model, other = model_of(), model_of()
    compiled = whole(model, "eager")
    gradients(compiled)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for outside in (compiled, other, other[1]):
            stash.attach(outside).remove()
        torch.compiler.reset()
        stash.attach(model[1]).remove()
    assert caught == []


class Slow(MemoryStore):
    """Ends no write before the test allows it."""

    def __init__(self):
        super().__init__()
        self.may_write = threading.Event()

    def write(self, slot, address):
        self.may_write.wait(60)
        super().write(slot, address)


def warnings_of(way, disk, **options):
    stash = Stash(disk=disk, min_bytes=1024, **options)
    model = way(model_of(), "aot_eager")
    x = torch.linspace(-1, 1, 8192 * SIDE).view(8192, SIDE)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            with stash:
                loss = model(x).square().sum()
            loss.backward()
    if isinstance(disk, Slow):
        disk.may_write.set()
    stash.close()
    return [str(each.message) for each in said if each.category is StashWarning]


def test_one_graph_that_saves_most_of_a_step_is_reported_once(disk_dir):
    (message,) = warnings_of(whole, disk_dir, prefetch="4MiB")
    assert "compile block by block" in message and "block.compile()" in message


def test_one_graph_is_reported_before_anything_has_been_written():
    assert len(warnings_of(whole, Slow(), prefetch="4MiB", inflight="64MiB")) == 1


def test_neither_blocks_nor_a_graph_that_comes_back_at_once_are_reported(disk_dir):
    assert warnings_of(in_place, disk_dir, prefetch="4MiB") == []
    assert warnings_of(whole, disk_dir) == []


class OnAttributes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.x = x * 2
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.x


def test_tensors_on_attributes_of_ctx_are_seen_by_no_hook(stash):
    x = torch.ones(SIDE, SIDE, requires_grad=True)
    with stash:
        loss = OnAttributes.apply(x).sum()
    assert stash.stats().saves == 0
    loss.backward()
    assert torch.equal(x.grad, x.detach() * 2)


def test_under_compiled_autograd(stash):
    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = whole(model_of(), "aot_eager")
        found = gradients(compiled, stash)
    assert equal(found, gradients(model_of()))
    assert stash.stats().written_bytes >= 4 * SIDE * SIDE * 4
