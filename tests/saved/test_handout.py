"""A custom function's backward that returns what it saved: as in plain PyTorch, whatever the stash holds where.

``AccumulateGrad`` takes a first gradient over as ``.grad`` unless the tensor has other owners, and adds later
ones to it in place. What an unpack hook returns has no other owner.
"""

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from backstash import Action, Stash, graph
from backstash.testing import TwinDevice, stash_on
from long_tests import mostly_long

LARGE = 1 << 15  # elements: 128 KiB
PLACES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "no tier": lambda path: {},
    "disk": lambda path: {"disk": path},
    "kept": lambda path: {"disk": path, "keep": None},
    "some kept": lambda path: {"disk": path, "keep": "300KiB"},
    "parameters too": lambda path: {
        "disk": path,
        "policy": lambda saved: Action("disk"),
        "min_bytes": 0,
    },
}


def returning(choose: Callable[[Any], Any]) -> Any:
    """A function that saves its arguments, and whose backward returns what ``choose(ctx)`` does."""

    class Returning(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            return sum((tensor * tensor).sum() for tensor in tensors)

        @staticmethod
        def backward(ctx, gradient):
            chosen = choose(ctx)
            return chosen if isinstance(chosen, tuple) else (chosen,)

    return Returning


FirstSaved = returning(lambda ctx: ctx.saved_tensors[0])


def shares(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("elements", [8, LARGE])
def test_weight_decay_leaves_the_weight_alone(place, elements, tmp_path):
    weight = nn.Parameter(torch.randn(elements))
    before = weight.detach().clone()
    with Stash(**PLACES[place](tmp_path)) as stash:
        for step in range(1, 4):
            FirstSaved.apply(weight).backward()
            assert not shares(weight.grad, weight)
            assert torch.equal(weight, before)
            assert torch.equal(weight.grad, step * before if step < 3 else before + before + before)
    stash.close()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("elements", [8, LARGE])
def test_a_gradient_computed_in_forward_serves_every_backward(place, elements, tmp_path):
    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            gradient = torch.full_like(x, 0.5)
            ctx.save_for_backward(gradient)
            return (x * gradient).sum()

        @staticmethod
        def backward(ctx, _):
            return ctx.saved_tensors[0]

    x = torch.randn(elements, requires_grad=True)
    with Stash(**PLACES[place](tmp_path)) as stash:
        loss = Fused.apply(x)
    for step in range(1, 6):
        loss.backward(retain_graph=True)
        assert torch.equal(x.grad, torch.full_like(x, 0.5 * step))
    stash.close()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("elements", [8, LARGE])
def test_a_constant_of_the_program_is_not_accumulated_into(place, elements, tmp_path):
    constant, x = torch.ones(elements), torch.randn(elements, requires_grad=True)
    function = returning(lambda ctx: (ctx.saved_tensors[1], None))
    with Stash(**PLACES[place](tmp_path)) as stash:
        for step in range(1, 4):
            function.apply(x, constant).backward()
            assert torch.equal(constant, torch.ones(elements))
            assert torch.equal(x.grad, torch.full_like(x, step))
    stash.close()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("elements", [8, LARGE])
def test_two_inputs_whose_gradient_is_one_saved_tensor(place, elements, tmp_path):
    a, b = (torch.randn(elements, requires_grad=True) for _ in range(2))
    ones = torch.ones(elements)
    twice = returning(lambda ctx: (ctx.saved_tensors[2], ctx.saved_tensors[2], None))
    with Stash(**PLACES[place](tmp_path)) as stash:
        twice.apply(a, b, ones).backward()
        assert not shares(a.grad, b.grad)
        del ones
        FirstSaved.apply(a).backward()
    assert torch.equal(b.grad, torch.ones(elements))
    stash.close()


def test_where_nobody_else_has_the_memory_it_is_taken_over(tmp_path):
    # As in plain PyTorch: a fused loss's gradient costs no copy.
    addresses = []

    def choose(ctx):
        (saved,) = ctx.saved_tensors
        addresses.append(saved.data_ptr())
        return saved

    class Fused(returning(choose)):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(torch.full_like(x, 0.5))
            return x.sum()

    for kwargs in ({}, {"disk": tmp_path}, {"disk": tmp_path, "keep": None}):
        x = torch.randn(LARGE, requires_grad=True)
        with Stash(**kwargs) as stash:
            loss = Fused.apply(x)
        loss.backward()
        assert x.grad.data_ptr() == addresses[-1]
        stash.close()


@pytest.mark.parametrize("place", PLACES)
def test_a_hook_on_the_weight_may_return_what_a_node_saved(place, tmp_path):
    weight = nn.Parameter(torch.randn(8))
    before = weight.detach().clone()
    with Stash(**PLACES[place](tmp_path)) as stash:
        output = weight * weight
    node = output.grad_fn
    handle = weight.register_hook(lambda gradient: node._saved_self)
    for step in range(1, 4):
        output.sum().backward(retain_graph=True)
        assert torch.equal(weight, before)
        assert torch.equal(weight.grad, step * before if step < 3 else before + before + before)
    handle.remove()
    stash.close()


@pytest.mark.parametrize("place", PLACES)
def test_a_subclass_made_of_tensors(place, tmp_path):
    def train(context):
        torch.manual_seed(0)
        weight = TwoTensor(torch.randn(LARGE), torch.randn(LARGE)).requires_grad_()
        other = weight * 2
        recorded = []
        with context:
            loss = FirstSaved.apply(other)
        for _ in range(4):
            loss.backward(retain_graph=True)
            recorded += [
                weight.a.clone(),
                other.a.clone(),
                weight.grad.a.clone(),
                weight.grad.b.clone(),
            ]
        with context:
            loss = FirstSaved.apply(weight)
        weight.grad = None
        for _ in range(3):
            loss.backward(retain_graph=True)
            recorded += [weight.a.clone(), weight.grad.a.clone(), weight.grad.b.clone()]
        return recorded

    stash = Stash(**PLACES[place](tmp_path))
    assert all(map(torch.equal, train(stash), train(nullcontext())))
    stash.close()


@pytest.mark.parametrize("place", PLACES)
def test_a_function_that_records_a_graph_in_its_backward(place, tmp_path):
    def choose(ctx):
        with torch.enable_grad():
            return ctx.saved_tensors[0]

    weight = nn.Parameter(torch.randn(LARGE))
    before = weight.detach().clone()
    with Stash(**PLACES[place](tmp_path)) as stash:
        for _ in range(2):
            returning(choose).apply(weight).backward()
    stash.close()
    assert torch.equal(weight, before) and torch.equal(weight.grad, 2 * before)


@pytest.mark.parametrize("place", PLACES)
def test_gradients_of_gradients(place, tmp_path):
    def train(context):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(LARGE))
        recorded = []
        for _ in range(3):
            with context:
                (first,) = torch.autograd.grad(
                    FirstSaved.apply(weight * 2), weight, create_graph=True
                )
                (first * first).sum().backward()
            recorded += [weight.detach().clone(), weight.grad.clone()]
        return recorded

    stash = Stash(**PLACES[place](tmp_path))
    assert all(map(torch.equal, train(stash), train(nullcontext())))
    stash.close()


def test_what_only_leaves_in_place():
    weight = nn.Parameter(torch.randn(8))
    before = weight.detach().clone()
    with graph.only(lambda tensor: False):
        for _ in range(2):
            FirstSaved.apply(weight).backward()
    assert torch.equal(weight, before) and torch.equal(weight.grad, 2 * before)


def test_no_hook_stays_on_a_node(tmp_path):
    weight = nn.Parameter(torch.randn(8))
    accumulate = graph.get_gradient_edge(weight).node
    with Stash(disk=tmp_path) as stash:
        FirstSaved.apply(weight).backward()
    assert len(accumulate.metadata) == 0
    stash.close()


# Random functions, compared with plain PyTorch.

CHOICES: list[Callable[[Tensor], Any]] = [
    lambda saved: saved,
    lambda saved: saved,
    lambda saved: saved.view(-1).view(saved.shape),
    lambda saved: saved[:],
    lambda saved: saved.clone(),
    lambda saved: saved * 2,
    lambda saved: saved[:1].expand(saved.shape),
    lambda saved: None,
]
THROUGH: list[Callable[[Tensor], Tensor]] = [  # that hand a gradient on as it is, or a view of it
    lambda x: x,
    lambda x: x,
    lambda x: x * 1.5,
    lambda x: x.clone(),
    lambda x: x.view(2, -1).view(-1),
    lambda x: x + torch.zeros(1),
    lambda x: x.expand(x.shape),
]


def random_function(draw: random.Random, inputs: int, unpacks: int, *, clean: bool) -> Any:
    """Saves ``inputs`` tensors; its backward unpacks ``unpacks`` times, and returns copies if ``clean``."""
    picks = [
        (draw.randrange(unpacks), draw.randrange(99), draw.choice(CHOICES)) for _ in range(inputs)
    ]
    extra = draw.random() < 0.5

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            output = sum(tensors) * 1.0
            own = [output] if extra else [torch.full_like(output, 0.25)]
            ctx.save_for_backward(*tensors, *tensors[:1], *own)
            return output

        @staticmethod
        def backward(ctx, gradient):
            saved = [ctx.saved_tensors for _ in range(unpacks)]
            chosen = [choice(saved[of][at % len(saved[of])]) for of, at, choice in picks]
            return tuple(each.clone() if clean and each is not None else each for each in chosen)

    return Function


def program(
    seed: int, context: Any, *, clean: bool = False
) -> tuple[list[Any], set[tuple[int, int]]]:
    """Values of everything after each backward, or its error; and which of them share memory."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    elements = draw.choice([8, LARGE])
    leaves = [nn.Parameter(torch.randn(elements)) for _ in range(4)]
    constants = [torch.randn(elements) for _ in range(2)]
    held: list[Tensor] = []  # that the program has in addition
    recorded: list[Any] = []
    sharing: set[tuple[int, int]] = set()

    def look() -> None:
        everything = [*leaves, *constants, *held]
        grads = [leaf.grad if leaf.grad is not None else torch.empty(0) for leaf in leaves]
        recorded.append([each.detach().clone() for each in (*everything, *grads)])
        for i, grad in enumerate(grads):
            for j, other in enumerate((*grads[:i], *everything)):
                if grad.numel() and shares(grad, other):
                    sharing.add((i, j))

    for _ in range(draw.randint(1, 3)):
        outputs = []
        with context:
            for _ in range(draw.randint(1, 3)):
                inputs = [
                    draw.choice(THROUGH)(draw.choice([*leaves, *constants])) for _ in range(3)
                ]
                if draw.random() < 0.5:
                    held += inputs
                function = random_function(draw, 3, draw.randint(1, 2), clean=clean)
                if any(each.requires_grad for each in inputs):
                    outputs.append(function.apply(*inputs))
                del inputs
        for output in outputs:
            for _ in range(3):
                retain = draw.random() < 0.7
                try:
                    output.sum().backward(retain_graph=retain)
                except RuntimeError as error:
                    recorded.append(error)
                else:
                    recorded.append(None)
                look()
                if not retain:
                    break
        if draw.random() < 0.3:
            for leaf in leaves:
                leaf.grad = None
    return recorded, sharing


def equal(one: list[Any], other: list[Any]) -> bool:
    """Whether two runs recorded the same: values to the bit, and errors in the same places."""
    for a, b in zip(one, other, strict=True):
        if isinstance(a, list) and isinstance(b, list):
            if not all(map(torch.equal, a, b)):
                return False
        elif type(a) is not type(b):
            return False
    return True


@pytest.mark.parametrize("chance", mostly_long([0.0, 0.5, 1.0], 0.5))
@pytest.mark.parametrize("options", [{"keep": 0}, {"keep": None}, {"keep": "300KiB"}])
def test_random_functions_on_an_accelerator(options, chance, tmp_path):
    compared = 0
    for seed in range(25):
        plain, plain_shares = program(seed, nullcontext())
        device = TwinDevice(chance=chance, seed=seed)
        stash = stash_on(device, host="300KiB", disk=tmp_path, **options)
        ours, ours_shares = program(seed, stash)
        stash.close()
        assert ours_shares <= plain_shares and device.faults == [], seed
        right, _ = program(seed, nullcontext(), clean=True)
        if equal(plain, right):
            compared += 1
            assert equal(ours, plain), seed
    assert compared > 8


@pytest.mark.parametrize("place", PLACES)
def test_random_functions_as_in_plain_pytorch(place, tmp_path):
    compared = 0
    for seed in range(30):
        plain, plain_shares = program(seed, nullcontext())
        stash = Stash(**PLACES[place](tmp_path))
        ours, ours_shares = program(seed, stash)
        stash.close()
        assert ours_shares <= plain_shares, seed  # never what plain PyTorch keeps separate
        right, _ = program(seed, nullcontext(), clean=True)
        if equal(plain, right):  # else plain PyTorch has itself accumulated into what was saved
            compared += 1
            assert equal(ours, plain), seed
    assert compared > 10
