"""torch.func, fake tensors and torch.compile under a stash: they work, or the error says what to do."""

import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import backstash
from backstash import Stash, graph, hooks
from backstash.errors import InplaceError, UsageError
from backstash.report import saved_report
from oracle import WAYS, check, gradients, run, same_bits

SIDE = 192
SOURCE = Path(backstash.__file__).parent


def leaf(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (SIDE, SIDE)), generator=generator).requires_grad_()


def f(x):
    return (x.sin() * x.exp()).sum()


def test_vmap(tmp_path):
    def program():
        x, w = leaf(8, SIDE, 32), leaf(32, SIDE, seed=2)
        h = x * 2
        loss = torch.func.vmap(lambda row: torch.tanh(row @ w).sin() * row.sum())(h)
        return lambda: gradients(loss, x, w)

    check(program, tmp_path)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_jvp_and_linearize(tmp_path):
    def program():
        x, tangent = leaf(), leaf(seed=2)
        value, slope = torch.func.jvp(f, (x * 2,), (tangent * 2,))
        _, along = torch.func.linearize(f, x.detach())
        return lambda: (*gradients(slope * value, x, tangent), along(tangent.detach()))

    check(program, tmp_path)


def test_jacfwd(tmp_path):
    def program():
        x = leaf(4, 300)
        jacobian = torch.func.jacfwd(lambda t: (t.sin() @ t.t().exp()).sum(0))(x * 2)
        return lambda: gradients(jacobian, x)

    check(program, tmp_path)


def test_a_transform_s_own_tensor_stays(tmp_path):
    """It has the storage of another tensor and shapes that are only true inside the transform."""
    stash, back = Stash(disk=tmp_path, min_bytes=0, inflight=0), []

    def inside(row):
        back.append(stash.unpack(stash.pack(row)).shape)
        return row

    torch.func.vmap(inside)(leaf().detach())
    assert back == [(SIDE,)]
    assert stash.stats().left["a functorch transform's tensor"].count == 1
    stash.close()


def test_vmap_over_autograd_grad(tmp_path):
    def program():
        x = leaf()
        h = (x * 2).sin()
        rows = torch.eye(SIDE)
        return lambda: torch.autograd.grad(
            h.sum(1), x, (rows,), is_grads_batched=True, retain_graph=True
        )

    check(program, tmp_path)


def test_functional_jacobian_and_hessian(tmp_path):
    """torch.autograd.functional is ordinary autograd."""

    def program():
        x = leaf(40, seed=3).detach()
        jacobian = torch.autograd.functional.jacobian(lambda t: t.sin() * t.sum(), x)
        hessian = torch.autograd.functional.hessian(lambda t: (t.sin() * t.exp()).sum(), x)
        return lambda: (jacobian, hessian)

    check(program, tmp_path)


REVERSE = {
    "grad": lambda: torch.func.grad(f)(leaf()),
    "vjp": lambda: torch.func.vjp(f, leaf())[1](torch.ones(())),
    "jacrev": lambda: torch.func.jacrev(f)(leaf()),
    "hessian": lambda: torch.func.hessian(lambda t: t.sin().sum())(leaf(9)),
    "vmap of grad": lambda: torch.func.vmap(torch.func.grad(f))(leaf()),
}


TRANSFORMS = "torch.func.grad, vjp, jacrev or hessian ran"


def values(result):
    return result if isinstance(result, tuple) else (result,)


class Transforms(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        return REVERSE[self.name]()


HELD = {
    "with": lambda stash, name: stash(lambda: REVERSE[name]())(),
    "twice": lambda stash, name: stash(stash(lambda: REVERSE[name]()))(),
    "attached": lambda stash, name: attached_call(stash, Transforms(name)),
    "report": lambda stash, name: reported_call(stash, name),
}


def attached_call(stash, module):
    with stash.attach(module):
        return module(leaf())


def reported_call(stash, name):
    with saved_report() as saved, stash:
        result = REVERSE[name]()
    assert "torch.func (grad, vjp, jacrev, hessian) ran 1 times" in " ".join(saved.notes)
    return result


@pytest.mark.parametrize("name", REVERSE)
@pytest.mark.parametrize("form", HELD)
def test_the_stash_steps_aside_for_reverse_mode_transforms(tmp_path, name, form):
    want = values(REVERSE[name]())
    stash = Stash(disk=tmp_path, min_bytes=0)
    got = values(HELD[form](stash, name))
    assert all(same_bits(*pair) for pair in zip(got, want, strict=True))
    (left,) = (left for reason, left in stash.stats().left.items() if TRANSFORMS in reason)
    assert (left.count, left.nbytes) == ((2 if form == "twice" else 1), 0)
    saves = stash.stats().saves
    with stash:  # and it is back
        loss = f(leaf())
    assert stash.stats().saves == saves + 4
    loss.backward()
    stash.close()


def test_the_stash_is_back_after_a_transform_that_fails(tmp_path):
    stash = Stash(disk=tmp_path, min_bytes=0)
    with stash:
        with pytest.raises(ZeroDivisionError):
            torch.func.grad(lambda x: 1 / 0)(leaf())
        saves = stash.stats().saves
        f(leaf())
        assert stash.stats().saves == saves + 4
    stash.close()


@pytest.mark.parametrize("order", ["inside", "outside"])
def test_with_another_pair_of_hooks_the_refusal_is_torch_s_own_and_nothing_breaks(tmp_path, order):
    stash, other = Stash(disk=tmp_path), torch.autograd.graph.save_on_cpu()
    first, second = (stash, other) if order == "inside" else (other, stash)
    with first, second:
        with pytest.raises(RuntimeError, match="support saved tensor hooks"):
            torch.func.grad(f)(leaf())
        f(leaf()).backward()
    f(leaf()).backward()
    assert TRANSFORMS not in " ".join(stash.stats().left)
    stash.close()


def test_a_transform_within_a_transform_and_on_several_threads(tmp_path):
    twice = torch.func.grad(lambda x: torch.func.grad(f)(x).sin().sum())
    want = twice(leaf())
    stash, got = Stash(disk=tmp_path), []

    def work():
        for _ in range(20):
            with stash:
                got.append(twice(leaf()))
                loss = f(leaf())
            loss.backward()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 80 and all(same_bits(each, want) for each in got)
    assert next(n.count for r, n in stash.stats().left.items() if TRANSFORMS in r) == 80
    stash.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_transform_under_a_stash(tmp_path, backend, fullgraph):
    """The tracer disables hooks by itself, and where that was refused, never enabled them again."""
    torch._dynamo.reset()

    def step(x):
        return (x * torch.func.grad(f)(x.detach() * 2)).sin().exp()

    x = leaf()
    want = gradients(step(x), x)
    compiled = torch.compile(step, backend=backend, fullgraph=fullgraph)
    stash = Stash(disk=tmp_path, min_bytes=0)
    for _ in range(2):
        with stash:
            x = leaf()
            assert same_bits(*gradients(compiled(x), x), *want)
            again = leaf()
            checkpoint(f, again * 2, use_reentrant=False).backward()
    x = leaf()
    assert same_bits(*gradients(compiled(x), x), *want), "without the stash"
    assert stash.stats().saves > 0
    stash.close()
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_transform_that_is_refused_leaves_hooks_enabled(tmp_path):
    torch._dynamo.reset()
    stash = Stash(disk=tmp_path)
    compiled = torch.compile(lambda x: torch.func.grad(f)(x) * 2, backend="eager")
    with pytest.raises((RuntimeError, UsageError)), stash, torch.autograd.graph.save_on_cpu():
        compiled(leaf())
    again = leaf()
    checkpoint(f, again * 2, use_reentrant=False).backward()
    stash.close()
    torch._dynamo.reset()


INSIDE = {
    "with": lambda stash: with_stash(stash),
    "wrapped": lambda stash: stash(f),
    "twice": lambda stash: stash(with_stash(stash)),
    "attached": lambda stash: attached_inside(stash),
    "in a grad in a grad": lambda stash: lambda x: torch.func.grad(stash(f))(x).sin().sum(),
}


def with_stash(stash):
    def inside(x):
        with stash:
            return f(x)

    return inside


def attached_inside(stash):
    class Applies(nn.Module):
        def forward(self, x):
            return f(x)

    module = Applies()
    stash.attach(module)
    return module


@pytest.mark.parametrize("entered", [False, True])
@pytest.mark.parametrize("form", INSIDE)
def test_a_stash_that_is_entered_inside_a_reverse_mode_transform_steps_aside(
    tmp_path, form, entered
):
    plain = (lambda x: torch.func.grad(f)(x).sin().sum()) if form.startswith("in ") else f
    want = torch.func.grad(plain)(leaf())
    stash = Stash(disk=tmp_path, min_bytes=0)
    function = torch.func.grad(INSIDE[form](stash))
    got = stash(function)(leaf()) if entered else function(leaf())
    assert same_bits(got, want)
    (left,) = (left for reason, left in stash.stats().left.items() if TRANSFORMS in reason)
    assert left.count == (2 if form == "twice" else 1) + entered
    saves = stash.stats().saves
    with stash:  # and nothing is left of it
        loss = f(leaf())
    assert stash.stats().saves == saves + 4
    loss.backward()
    f(leaf()).backward()
    assert stash.stats().saves == saves + 4
    stash.close()


def test_a_stash_that_is_left_inside_a_transform_is_left(tmp_path):
    stash = Stash(disk=tmp_path, min_bytes=0)
    stash.__enter__()

    def inside(x):
        stash.__exit__(None, None, None)
        return f(x)

    assert same_bits(torch.func.grad(inside)(leaf()), torch.func.grad(f)(leaf()))
    f(leaf()).backward()
    assert stash.stats().saves == 0
    stash.close()


def test_transforms_work_outside_the_context_of_a_stash(tmp_path):
    stash = Stash(disk=tmp_path, min_bytes=0)
    with stash:
        x = leaf()
        loss = f(x * 2)
    outside = torch.func.grad(lambda t: f(t * 2))(leaf().detach())
    assert torch.equal(outside, *gradients(loss, x))
    stash.close()


def test_where_hooks_are_disabled_the_error_is_torch_s_own(tmp_path):
    stash = Stash(disk=tmp_path)
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("not here, says the caller"),
        pytest.raises(RuntimeError, match="not here, says the caller"),
        stash,
    ):
        pass
    stash.close()


# Fake tensors.


def test_fake_tensors_pass_through(tmp_path):
    stash = Stash(disk=tmp_path, min_bytes=0)
    with FakeTensorMode(), stash:
        x = torch.randn(1 << 14, 1 << 14, requires_grad=True)
        h = (x * 2).sin()
        loss = (h * h.exp()).sum()
        (grad,) = torch.autograd.grad(loss, x)
    assert grad.shape == x.shape
    stats = stash.stats()
    assert stats.written_bytes == 0
    assert "a FakeTensor, which does not list its inner tensors (__tensor_flatten__)" in stats.left
    stash.close()


def test_a_stash_made_within_fake_tensor_mode_and_used_without(tmp_path):
    with FakeTensorMode():
        stash = Stash(disk=tmp_path, min_bytes=0, inflight=0)
    x = leaf()
    with stash:
        loss = (x * 2).sin()
    assert same_bits(*gradients(loss, x), 2 * (leaf() * 2).cos().detach())
    stash.close()


def test_fake_mode_entered_between_forward_and_backward_of_real_tensors(tmp_path):
    """A tool that estimates something in the middle of a step."""

    def program():
        x = leaf()
        loss = (x * 2).sin().exp()
        with FakeTensorMode():
            (torch.randn(9, 9, requires_grad=True) * 2).sin().sum().backward()
        return lambda: gradients(loss, x)

    check(program, tmp_path)


def test_a_dispatch_mode_around_everything(tmp_path):
    def program():
        x = leaf()
        with FlopCounterMode(display=False) as flops:
            loss = (x @ (x * 2)).sin()
            grads = gradients(loss, x)
        return lambda: (*grads, flops.get_total_flops())

    check(program, tmp_path)


def test_meta_tensors_stay(tmp_path):
    stash = Stash(disk=tmp_path, min_bytes=0)
    with stash, torch.device("meta"):
        x = torch.empty(SIDE, SIDE, requires_grad=True)
        loss = (x * 2).sin().sum()
    loss.backward()
    assert x.grad.device.type == "meta"
    assert "device meta" in stash.stats().left
    stash.close()


# torch.compile.


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(SIDE), nn.Linear(SIDE, 2 * SIDE)
        self.down = nn.Linear(2 * SIDE, SIDE)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))) * 2)


@pytest.fixture
def blocks():
    torch._dynamo.reset()
    torch.manual_seed(5)
    yield nn.Sequential(Block(), Block())
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("form", ["model", "blocks"])
def test_compiled_inside_a_stash(tmp_path, blocks, backend, form):
    if form == "model":
        compiled = torch.compile(blocks, backend=backend)
    else:
        compiled = nn.Sequential(*(torch.compile(block, backend=backend) for block in blocks))

    def program():
        x = leaf()
        loss = compiled(x * 2).sin()
        return lambda: gradients(loss, x, *blocks.parameters())

    want = run(program)
    for way in WAYS:
        stash = Stash(**{"disk": tmp_path, **WAYS[way]})
        got = run(program, stash)
        assert all(same_bits(*pair) for pair in zip(got, want, strict=True)), way
        stats = stash.stats()
        assert stats.saves > 0
        if way == "all on disk":
            # Not exact: what a compiled graph saves is the compiler's affair.
            assert stats.written_bytes > SIDE * SIDE * 4
        stash.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("order", ["attached, then compiled", "compiled, then attached"])
def test_compiled_and_attached(tmp_path, blocks, backend, order):
    x = leaf()
    want = gradients(blocks(x * 2).sin(), x, *blocks.parameters())
    stash = Stash(disk=tmp_path, min_bytes=0, inflight=0)
    if order == "attached, then compiled":
        with stash.attach(blocks):
            compiled = torch.compile(blocks, backend=backend)
            got = gradients(compiled(x * 2).sin(), x, *blocks.parameters())
    else:
        compiled = torch.compile(blocks, backend=backend)
        with stash.attach(compiled):
            got = gradients(compiled(x * 2).sin(), x, *blocks.parameters())
    assert stash.stats().written_bytes > SIDE * SIDE * 4  # not exact: as above
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)  # a compiler may order sums in its own way
    stash.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_change_in_place_of_what_a_compiled_graph_saved(tmp_path, blocks, backend):
    compiled = torch.compile(lambda h: h.sin(), backend=backend)
    for way in WAYS:
        stash = Stash(**{"disk": tmp_path, **WAYS[way]})
        x = leaf()
        with stash:
            h = x * 2
            loss = compiled(h)
        h.add_(1)
        try:
            (grad,) = gradients(loss, x)
            assert same_bits(grad, 2 * (leaf() * 2).cos().detach()), way
        except InplaceError as error:
            assert "modified by an inplace operation" in str(error)
        stash.close()


@pytest.mark.filterwarnings("ignore")
def test_a_context_inside_a_compiled_function_breaks_the_graph_and_works(tmp_path):
    torch._dynamo.reset()
    stash = Stash(disk=tmp_path, min_bytes=0)

    def step(x):
        h = x * 2
        with stash:
            h = h.sin() * h
        return h.exp()

    x = leaf()
    want = gradients(step(x), x)
    got = gradients(torch.compile(step, backend="aot_eager")(x), x)
    assert same_bits(*got, *want)
    stash.close()
    torch._dynamo.reset()


ENTRANCES = {
    "stash": lambda model, stash: stash,
    "attached": lambda model, stash: stash.attach(model[0][1]),
    "save_on_cpu": lambda model, stash: graph.save_on_cpu(),
    "saved_tensors_hooks": lambda model, stash: graph.saved_tensors_hooks(torch.clone, torch.clone),
    "saved_report": lambda model, stash: saved_report(model),
    "capture": lambda model, stash: hooks.capture(model, "0.1"),
    "trace": lambda model, stash: hooks.trace(model, to=None),
    "watch_gradients": lambda model, stash: hooks.watch_gradients(model, per="module", to=None),
    "find_nonfinite": lambda model, stash: hooks.find_nonfinite(model),
}


@pytest.mark.filterwarnings("ignore")  # what the compiler says of what it traces by itself
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_the_compiler_begins_in_no_function_of_ours(monkeypatch, entrance):
    """It does not fail either: an ``nn.Sequential`` that is compiled runs as it is, and all in it is tried."""
    from torch._dynamo import convert_frame

    torch._dynamo.reset()
    torch.manual_seed(5)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(SIDE, SIDE), nn.GELU(), nn.LayerNorm(SIDE)) for _ in range(2))
    )
    x = leaf()
    true = gradients(model(x), x, *model.parameters())
    tried = []
    compile_frame = convert_frame._compile

    def spy(code, *others, **named):
        tried.append(code.co_filename)
        return compile_frame(code, *others, **named)

    monkeypatch.setattr(convert_frame, "_compile", spy)
    stash = Stash(min_bytes=0)
    for block in model:
        block.compile(backend="eager")
    with ENTRANCES[entrance](model, stash):
        found = gradients(model(x), x, *model.parameters())
    assert all(same_bits(*pair) for pair in zip(found, true, strict=True))
    assert [each for each in tried if str(SOURCE) in each] == []
    torch.compile(lambda: stash.unpack(stash.pack(x)), backend="eager")()
    assert tried, "nothing was seen"
    stash.close()
    torch._dynamo.reset()


def test_a_function_wrapped_by_a_stash_is_compiled(tmp_path):
    torch._dynamo.reset()
    stash, seen = Stash(disk=tmp_path, min_bytes=0), []

    def fn(x):
        seen.append(torch.compiler.is_compiling())
        return x.sin().exp()

    x = leaf()
    want = gradients(fn(x), x)
    seen.clear()
    got = gradients(torch.compile(stash(fn), backend="aot_eager")(x), x)
    assert same_bits(*got, *want) and seen == [True]
    assert stash.stats().saves > 0
    stash.close()
    torch._dynamo.reset()
