"""Kernels that call what autocast handles: inside of a dispatch mode PyTorch does not."""

import contextlib
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from backstash import Action, Stash, recomputable
from backstash.errors import StashWarning, UsageError
from backstash.graph import Binomial, allow_mutation_on_saved_tensors, checkpoint_loop

library = torch.library.Library("backstash_autocast_inside", "DEF")
FORMS = {
    "product(Tensor a, Tensor b) -> Tensor": (lambda a, b: (a @ b).float(), "CPU"),
    "outer(Tensor a, Tensor b) -> Tensor": (lambda a, b: OPS.product(a, b), "CPU"),
    "handled(Tensor a, Tensor b) -> Tensor": (lambda a, b: (a @ b).float(), "CPU"),
    "composite(Tensor a, Tensor b) -> Tensor": (
        lambda a, b: OPS.product(a, b),
        "CompositeImplicitAutograd",
    ),
    "composite_quiet(Tensor a, Tensor b) -> Tensor": (
        lambda a, b: under(False)(OPS.product)(a, b),
        "CompositeImplicitAutograd",
    ),
    "below(Tensor a, Tensor b) -> Tensor": (lambda a, b: below(a, b), "CPU"),
    "named(*, Tensor[] all) -> Tensor": (lambda all: (all[0] @ all[1]).float(), "CPU"),
    "made(int n) -> Tensor": (
        lambda n: (torch.linspace(0, 1, n * n).view(n, n) @ torch.rand(n, n)).float(),
        "CompositeExplicitAutograd",
    ),
    "handled_or_made(Tensor? a, int n) -> Tensor": (
        lambda a, n: OPS.made(n) + OPS.made(n),
        "CompositeExplicitAutograd",
    ),
    "quiet(Tensor a, Tensor b) -> Tensor": (lambda a, b: under(False)(torch.mm)(a, b), "CPU"),
    "falls(Tensor a, Tensor b) -> Tensor": (lambda a, b: (a @ b).float(), "CPU"),
    "own(Tensor a, Tensor b) -> Tensor": (lambda a, b: (a @ b).float(), "CPU"),
}


def below(a, b):
    """Turns autocast off below autograd, where composites are not decomposed."""
    with torch._C._AutoDispatchBelowAutograd():
        return under(False)(torch.einsum)("ij,jk->ik", a, b).float()


for schema, (kernel, key) in FORMS.items():
    library.define(schema)
    library.impl(schema.partition("(")[0], kernel, key)
for name in ("handled", "handled_or_made"):
    torch.library.register_autocast(
        f"backstash_autocast_inside::{name}", "cpu", torch.float32, lib=library
    )
library.impl("below", below, "AutogradCPU")
library.impl("falls", torch.library.fallthrough_kernel, "AutocastCPU")
library.impl(
    "own",
    lambda keys, a, b: under()(OPS.own.default.redispatch)(keys & AFTER_AUTOGRAD, a, b),
    "AutogradCPU",
    with_keyset=True,
)
OPS = torch.ops.backstash_autocast_inside
AFTER_AUTOGRAD = torch._C._after_autograd_keyset
NO_CONTEXT = contextlib.nullcontext


@torch.library.custom_op("backstash_autocast_inside::function", mutates_args=())
def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a @ b).float()


function.register_autograd(
    lambda ctx, grad: (grad @ ctx.saved_tensors[1].mT, ctx.saved_tensors[0].mT @ grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def autocast(enabled=True):
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


def under(enabled=True):
    """Return a decorator that calls a function in a context of its own."""

    def decorated(call):
        def called(*args):
            with autocast(enabled):
                return call(*args)

        return called

    return decorated


def set_by_hand(*enabled):
    """As :func:`under`, without a context."""

    def decorated(call):
        def called(*args):
            was = torch.is_autocast_enabled("cpu")
            for each in enabled:
                torch.set_autocast_enabled("cpu", each)
            try:
                return call(*args)
            finally:
                torch.set_autocast_enabled("cpu", was)

        return called

    return decorated


class Product(nn.Module):
    """Calls the operator in a context of its own, or in none."""

    def __init__(self, inside=lambda call: call, call=OPS.product):
        super().__init__()
        self.call = inside(call)

    def forward(self, x):
        y = torch.sin(x)
        with torch.no_grad():
            z = self.call(y, y)
        return torch.cos(y * z)


def gradients(net, stash, outside, steps=1):
    found = []
    for _ in range(steps):
        torch.manual_seed(0)
        x = torch.randn(16, 16, requires_grad=True)
        with outside(), stash or contextlib.nullcontext():
            loss = net(x).float().sum()
        loss.backward()
        found.append(x.grad)
    return found


@contextlib.contextmanager
def recording(net, way):
    """Yield a stash that recomputes the module, or what a policy chooses of the context."""
    if way == "module":
        stash = Stash(min_bytes=0)
        stash.recompute(net)
    else:
        stash = Stash(min_bytes=0, policy=lambda saved: Action("recompute"))
    with contextlib.closing(stash):
        yield stash


def agree(make, outside=NO_CONTEXT, steps=5):
    """Compare the gradients with plain PyTorch's, in both ways."""
    (true,) = gradients(make(), None, outside)
    for way in ("module", "context"):
        net = make()
        with recording(net, way) as stash:
            for each in gradients(net, stash, outside, steps):
                assert torch.equal(each, true), way


CALLS = {
    "a kernel": OPS.product,
    "a kernel of Python's": function,
    "an inner kernel": OPS.outer,
    "with an autocast kernel": OPS.handled,
    "without a tensor, with an autocast kernel": lambda a, b: OPS.handled_or_made(None, 16),
    "with an autocast kernel that falls through": OPS.falls,
    "that turns it off": OPS.quiet,
    "by name, in a list": lambda a, b: OPS.named(all=[a, b]),
    "without a tensor": lambda a, b: OPS.made(16),
    "in inference mode": lambda a, b: torch.inference_mode()(torch.einsum)(
        "ij,jk->ik", a, b
    ).clone(),
    "bilinear": lambda a, b: functional.bilinear(a, a, b[None]).float(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_kernel_computes_as_under_no_mode(call):
    for outside in (NO_CONTEXT, autocast, partial(autocast, False)):
        agree(partial(Product, call=call), outside)
        agree(partial(Product, under(), call), outside)
        agree(partial(Product, under(False), call), outside)
    agree(partial(Product, set_by_hand(True), call))
    agree(partial(Product, set_by_hand(False, True, False), call), autocast)
    agree(partial(Product, lambda call: under(False)(under()(call)), call), autocast)


def test_they_differ_from_those_without_autocast():
    """Else the tests above would compare nothing."""
    for name, call in CALLS.items():
        (with_it,) = gradients(Product(call=call), None, autocast)
        (without,) = gradients(Product(call=call), None, NO_CONTEXT)
        expected = name in (
            "with an autocast kernel",
            "that turns it off",
        )
        assert torch.equal(with_it, without) == expected, name


@pytest.mark.parametrize("way", ["module", "context"])
def test_a_kernel_that_casts_a_weight_leaves_no_cast_without_a_gradient_in_the_cache(way):
    """A kernel without a formula for backward runs with autograd on, also where no gradient is wanted."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(16, 16))

        def forward(self, x):
            with torch.no_grad():
                y = OPS.product(x, self.weight)
            return functional.linear(x, self.weight).float() * y

    found = []
    for net in (Net(), Net()):
        with recording(net, way) as stash:
            gradients(net, stash if found else None, autocast)
        found.append(net.weight.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("way", ["module", "context"])
@pytest.mark.parametrize("call", [OPS.composite, OPS.own, torch.linalg.pinv], ids=str)
def test_where_the_state_is_not_known_it_is_an_error(call, way):
    """``own`` enters autocast in its formula, and ``pinv`` is called by others."""

    def make(call=call, inside=lambda call: call):
        return Product(inside, (lambda a, b: call(a)) if call is torch.linalg.pinv else call)

    places = [(make(), autocast), (make(inside=under()), NO_CONTEXT)]
    if call is OPS.own:
        places.append((make(), NO_CONTEXT))
    for net, outside in places:
        with recording(net, way) as stash, pytest.raises(UsageError, match="autocast is on inside"):
            gradients(net, stash, outside)
    if call is not OPS.own:
        agree(make)
    (other,) = gradients(make(), None, NO_CONTEXT)
    assert other is not None


@torch.jit.script
def scripted(a, b):
    return torch.ops.backstash_autocast_inside.composite_quiet(a, b)


@torch.jit.script
def scripted_below(a, b):
    return torch.ops.backstash_autocast_inside.below(a, b)


@torch.jit.script
def scripted_product(a, b):
    return torch.ops.backstash_autocast_inside.product(a, b)


@pytest.mark.parametrize("way", ["module", "context"])
@pytest.mark.parametrize(
    "call", [scripted, scripted_below, scripted_product], ids=["of Python's", "composite", "kernel"]
)
def test_below_torchscript_it_is_an_error(call, way):
    """TorchScript leaves no frame of Python where it calls the operator whose kernel turns autocast off. Its
    own error has no text, so a warning has it."""
    for make, outside in (
        (partial(Product, call=call), autocast),
        (partial(Product, under(), call), NO_CONTEXT),
    ):
        net = make()
        with (
            recording(net, way) as stash,
            pytest.warns(StashWarning, match="autocast is on inside of"),
            pytest.raises(RuntimeError, match="TorchScript interpreter"),
        ):
            gradients(net, stash, outside)
        (other,) = gradients(make(), None, outside)
        assert other is not None
    if call is scripted_product:
        agree(partial(Product, call=call))


@torch.jit.script
def scripted_einsum(a, b):
    return torch.einsum("ij,jk->ik", [a, b])


def test_a_scripted_product_is_exact_where_a_tape_begins_in_it():
    """Its kernel calls composites that then are under the tape: ``resolve_conj``."""
    torch.manual_seed(0)
    first, second, x = nn.Linear(6, 6), nn.Linear(6, 6), torch.randn(4, 6)
    weights = [first.weight, second.weight]

    def step(stash):
        with autocast(), stash or contextlib.nullcontext():
            loss = (scripted_einsum(first(x), second.weight) * x).float().square().sum()
        return torch.autograd.grad(loss, weights)

    true = step(None)
    with pytest.warns(StashWarning, match="cannot be kept"):
        stash = Stash(budget="1MiB", min_bytes=0)
        for _ in range(8):
            assert all(map(torch.equal, step(stash), true))
            assert stash.plan is not None
    stash.close()


def test_pinv_where_autocast_is_off():
    agree(partial(Product, under(False), lambda a, b: torch.linalg.pinv(a)))
    agree(partial(Product, call=lambda a, b: torch.linalg.pinv(a)), partial(autocast, False))


@pytest.mark.parametrize("way", ["module", "context"])
def test_under_a_mode_of_the_program_s_it_is_off_as_in_plain_pytorch(way):
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def inside(call):
        def called(*args):
            with Mode():
                return call(*args)

        return called

    agree(partial(Product, inside), autocast)


def test_a_tape_that_begins_amid_an_operation():
    """In a step that begins inside of a context, with a product: its kernel runs without autocast."""
    weight = torch.randn(16, 16, requires_grad=True)
    stash = Stash(min_bytes=0, policy=lambda saved: Action("recompute"))

    def step():
        torch.manual_seed(0)
        x = torch.randn(16, 16, requires_grad=True)
        y = functional.linear(x, weight).float()
        with torch.no_grad():
            z = OPS.product(y, y)
        (y.sin() * z).cos().sum().backward()
        return x.grad

    with autocast():
        true = step()
        with stash:
            for _ in range(4):
                assert torch.equal(step(), true)
    stash.close()


def test_what_a_declared_operator_computes_under_autocast_is_held():
    """A replay has no autocast. Without it, the same module's operator is replayed."""
    recomputable(OPS.product)
    net, stash = Product(), Stash(min_bytes=0)
    stash.recompute(net)
    for outside in (NO_CONTEXT, autocast) * 2:
        (true,) = gradients(Product(), None, outside)
        assert all(torch.equal(each, true) for each in gradients(net, stash, outside, 4))
    stash.close()


class Bilinear(nn.Module):
    """Its result is saved, and discarded where a replay can compute it."""

    def forward(self, x):
        y = torch.sin(x)
        return torch.cos(
            functional.bilinear(y, y, torch.ones(1, 1, 1) * x.detach()[None]) * y
        ).tanh()


def test_a_route_is_followed_where_autocast_is_as_it_was():
    net, stash = Bilinear(), Stash(min_bytes=0)
    stash.recompute(net)
    for outside, steps in ((NO_CONTEXT, 5), (autocast, 6), (NO_CONTEXT, 3), (autocast, 3)):
        (true,) = gradients(Bilinear(), None, outside)
        assert all(torch.equal(each, true) for each in gradients(net, stash, outside, steps))
    assert stash.stats().recomputed_bytes
    stash.close()
    agree(Bilinear, autocast)


@pytest.mark.parametrize("net", [Product(), Bilinear()], ids=["custom", "PyTorch's"])
def test_the_steps_of_a_loop(net):
    """A step runs again in backward, in a mode that records what it writes."""
    torch.manual_seed(0)
    x = torch.randn(16, 16, requires_grad=True)
    with autocast():
        true = net(net(net(net(x)))).sum()
        found = checkpoint_loop(net, x, 4, schedule=Binomial(2)).sum()
    (expected,) = torch.autograd.grad(true, x)
    assert torch.equal(torch.autograd.grad(found, x)[0], expected)


@pytest.mark.parametrize("net", [Product(), Bilinear()], ids=["custom", "PyTorch's"])
def test_where_saved_tensors_may_be_modified(net):
    (true,) = gradients(net, None, autocast)
    with allow_mutation_on_saved_tensors():
        (found,) = gradients(net, None, autocast)
    assert torch.equal(found, true)
