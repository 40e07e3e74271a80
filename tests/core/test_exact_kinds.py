"""Kinds of tensors: each moves exactly, or stays where it is and `stats().left` says why."""

import copy
import threading

import pytest
import torch
import torch.autograd.forward_ad as forward_mode
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from backstash import Stash
from oracle import WAYS, check, gradients, on_disk, run, same_bits

SIDE = 192
PARAMETER = "a parameter or another leaf that requires a gradient, or a view of one"


def leaf(*shape, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_()


class Keeps(torch.autograd.Function):
    """Saves any tensor and gives it back, bit by bit, as what the test compares."""

    @staticmethod
    def forward(ctx, x, *saved):
        ctx.save_for_backward(*saved)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Keeps.seen = ctx.saved_tensors
        return grad, *(None for _ in Keeps.seen)


def keeping(make):
    """A program that saves what ``make()`` returns and compares it as it comes back."""

    def program():
        x = leaf(2)
        loss = Keeps.apply(x, *make()).sum()

        def backward():
            loss.backward()
            seen, Keeps.seen = Keeps.seen, None
            return seen

        return backward

    return program


def raw(dtype, *shape):
    """Random bits of any dtype, NaNs with payloads and all."""
    width = dtype.itemsize
    data = torch.randint(0, 256, (*shape[:-1], shape[-1] * width), dtype=torch.uint8)
    return data.view(dtype) if dtype is not torch.bool else data > 127


NUMBERS = [
    torch.bool,
    *(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)),
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    *(getattr(torch, name) for name in sorted(dir(torch)) if name.startswith(("float8", "float4"))),
    *(getattr(torch, name) for name in ("uint4", "int3", "bits8", "bits16", "bits1x8")),
]


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("cut", ["whole", "row", "column"])
def test_every_dtype_moves_to_the_bit(tmp_path, dtype, cut):
    def make():
        whole = raw(dtype, SIDE, SIDE)
        return (whole if cut == "whole" else whole[3] if cut == "row" else whole[:, 3:9],)

    def bits(tensor):
        assert tensor.dtype == dtype
        elements = torch.as_strided(
            tensor.view(torch.uint8)
            if dtype.itemsize == 1
            else tensor.view(CARRIER[dtype.itemsize]),
            tensor.shape,
            tensor.stride(),
        )
        return elements.contiguous().view(torch.uint8), torch.tensor(tensor.stride())

    want = [part for tensor in run(keeping(make)) for part in bits(tensor)]
    for way in WAYS:
        with Stash(**{"disk": tmp_path, **WAYS[way]}) as stash:
            got = [part for tensor in run(keeping(make), stash) for part in bits(tensor)]
        stash.close()
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True)), way
        if way == "all on disk":
            # The column begins as far from an aligned address as it did, three elements.
            before = 3 * dtype.itemsize if cut == "column" else 0
            assert stash.stats().written_bytes == want[0].nbytes + before


CARRIER = {2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


KINDS = {
    "conj": lambda: (
        raw(torch.complex64, SIDE, SIDE).conj(),
        raw(torch.complex64, 9, 9).conj().t(),
    ),
    "neg": lambda: (
        torch._neg_view(leaf(SIDE, SIDE).detach()),
        raw(torch.complex64, 9, 9).conj().imag,
    ),
    "conj and neg": lambda: (torch._neg_view(raw(torch.complex64, 9, 9).conj()),),
    "channels last": lambda: (
        leaf(2, 8, 64, 64).detach().to(memory_format=torch.channels_last),
        leaf(2, 4, 8, 16, 16).detach().to(memory_format=torch.channels_last_3d),
    ),
    "no elements": lambda: (torch.empty(0), torch.empty(3, 0, 5), leaf(SIDE, SIDE).detach()[:0]),
    "no dimensions": lambda: (
        torch.tensor(2.5),
        leaf(SIDE, SIDE).detach()[3, 4],
        torch.tensor(True),
    ),
    "one of one": lambda: (torch.ones(1), torch.ones(1, 1).as_strided((1, 1), (77, 5))),
    "mask and index": lambda: (raw(torch.bool, SIDE, SIDE), raw(torch.int64, SIDE, SIDE)),
    "not a number": lambda: (
        torch.full((SIDE, SIDE), float("nan")),
        torch.tensor([-0.0, 0.0] * 99),
    ),
    "from numpy": lambda: (torch.from_numpy(leaf(SIDE, SIDE).detach().numpy().copy()[::2, ::3]),),
    "odd address": lambda: (
        torch.frombuffer(bytearray(SIDE * SIDE + 1), dtype=torch.int8, offset=1),
    ),
    "read-only": lambda: (leaf(SIDE, 1).detach().expand(SIDE, SIDE),),
    "shared memory": lambda: (leaf(SIDE, SIDE).detach().share_memory_(),),
    "requires grad, non-leaf": lambda: (leaf(SIDE, SIDE) * 2, (leaf(SIDE, SIDE) * 2).t()),
    "leaves": lambda: (
        leaf(SIDE, SIDE),
        leaf(SIDE, SIDE).t(),
        nn.Parameter(torch.ones(SIDE, SIDE)),
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_comes_back_exact(tmp_path, name):
    make = KINDS[name]
    check(keeping(make), tmp_path)
    want = run(keeping(make))
    with Stash(disk=tmp_path, min_bytes=0, inflight=0) as stash:
        got = run(keeping(make), stash)
    stash.close()
    for one, other in zip(got, want, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.stride() == other.stride()
        assert (one.is_conj(), one.is_neg()) == (other.is_conj(), other.is_neg())
        assert one.requires_grad == other.requires_grad and one.is_leaf == other.is_leaf


@pytest.mark.parametrize(
    "name",
    ["conj", "neg", "conj and neg", "channels last", "mask and index", "requires grad, non-leaf"],
)
def test_kinds_that_move_leave_nothing_in_place(tmp_path, name):
    stash = Stash(disk=tmp_path, min_bytes=0, inflight=0)
    run(keeping(KINDS[name]), stash)
    stats = stash.stats()
    stash.close()
    assert not stats.left
    assert stats.written_bytes > 0


def sparse(kind):
    dense = leaf(SIDE, SIDE).detach()
    return getattr((dense * (dense > 1)), f"to_sparse{kind}")


def quantized():
    return torch.quantize_per_tensor(leaf(SIDE, SIDE).detach(), 0.1, 0, torch.qint8)


STAYING = {
    "layout sparse_coo": lambda: (sparse("")(),),
    "layout sparse_csr": lambda: (sparse("_csr")(),),
    "layout sparse_csc": lambda: (sparse("_csc")(),),
    "layout sparse_bsr": lambda: (sparse("_bsr")((2, 2)),),
    "no bytes": lambda: (torch.empty(0, 5),),
    "a tensor of zeros without memory": lambda: (torch._efficientzerotensor((SIDE, SIDE)),),
    "device meta": lambda: (torch.empty(SIDE, SIDE, device="meta"),),
    "its memory is not aligned": KINDS["odd address"],
    PARAMETER: lambda: (nn.Parameter(torch.ones(SIDE, SIDE), requires_grad=False).t(),),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("reason", STAYING)
def test_what_cannot_move_stays_and_says_why(tmp_path, reason):
    stash = Stash(disk=tmp_path, min_bytes=0)
    got = run(keeping(STAYING[reason]), stash)
    stats = stash.stats()
    stash.close()
    assert stats.left[reason].count == 1
    assert stats.written_bytes == 0
    want = run(keeping(STAYING[reason]))
    for one, other in zip(got, want, strict=True):
        assert type(one) is type(other) and one.layout == other.layout
        if one.device.type == "cpu" and not one._is_zerotensor():
            assert same_bits(one, other)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_quantized_tensors_stay(tmp_path):
    stash = Stash(disk=tmp_path, min_bytes=0)
    (got,) = run(keeping(lambda: (quantized(),)), stash)
    assert torch.equal(got.int_repr(), quantized().int_repr())
    assert stash.stats().left["a quantized tensor"].count == 1
    stash.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sparse_products(tmp_path):
    def program():
        x = leaf(SIDE, SIDE)
        h = torch.sparse.mm(sparse("")(), x.sin()).exp()
        loss = (sparse("_csr")() @ h).cos()
        return lambda: gradients(loss, x)

    check(program, tmp_path)
    stats = on_disk(program, tmp_path).stats()
    assert {"layout sparse_coo", "layout sparse_csr"} <= set(stats.left)
    assert stats.written_bytes == 2 * SIDE * SIDE * 4  # exp's result, and cos's argument


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nested_tensors_of_strided_layout(tmp_path):
    def program():
        x = leaf(300, 64)
        nested = torch.nested.as_nested_tensor([x[:100].sin(), x[100:].sin()])
        loss = F.softmax(nested, -1).to_padded_tensor(0.0)
        return lambda: gradients(loss, x)

    check(program, tmp_path)
    assert "a nested tensor" in on_disk(program, tmp_path).stats().left


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_jagged_tensors_keep_their_offsets_and_move_their_values(tmp_path):
    def program():
        x = leaf(300, 64)
        offsets = torch.tensor([0, 100, 150, 300])
        nested = torch.nested.nested_tensor_from_jagged(x.sin(), offsets=offsets)
        loss = (nested.sin() * nested).values()
        return lambda: gradients(loss, x)

    check(program, tmp_path)
    stats = on_disk(program, tmp_path).stats()
    assert stats.written_bytes == 3 * 300 * 64 * 4  # nested, its sine, and the product
    assert "the offsets of a nested tensor" in stats.left


def two(shape=(SIDE, SIDE), view=lambda t: t):
    one, other = leaf(*shape).detach(), leaf(*shape, seed=2).detach()
    return TwoTensor(view(one), view(other)).requires_grad_()


def test_a_subclass_made_of_tensors_goes_tensor_by_tensor(tmp_path):
    def program():
        x = two()
        h = x.sin()
        loss = (h * h.exp()).sum()

        def backward():
            (grad,) = torch.autograd.grad(loss, x)
            return grad.a, grad.b

        return backward

    check(program, tmp_path)
    stats = on_disk(program, tmp_path).stats()
    assert (
        stats.written_bytes == 2 * 2 * SIDE * SIDE * 4
    )  # h and exp(h), each of two; h saved twice


def test_inner_tensors_keep_their_strides(tmp_path):
    """A product may depend on the strides of its operands to the last bit."""
    strides = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, saved):
            strides.append((saved.stride(), saved.a.stride()))
            ctx.save_for_backward(saved)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            (saved,) = ctx.saved_tensors
            strides.append((saved.stride(), saved.a.stride()))
            return grad, None

    for view in (lambda t: t.t(), lambda t: t[:, :1].expand(-1, SIDE), lambda t: t[::2, ::2]):
        strides.clear()
        with Stash(disk=tmp_path, min_bytes=0, inflight=0) as stash:
            Looks.apply(leaf(2), (two(view=view) * 1).detach()).sum().backward()
            Looks.apply(leaf(2), two(view=view).detach()).sum().backward()
        stash.close()
        assert strides[0] == strides[1] and strides[2] == strides[3]


def test_an_inner_tensor_changed_between_two_saves_is_saved_again(tmp_path):
    """What changes the parts of a wrapper need not raise the wrapper's own version."""

    def program():
        x, wrapped = leaf(2), two().detach()
        held = Keeps.apply(x, wrapped)
        wrapped.a.mul_(3)
        loss = Keeps.apply(x, wrapped).sum() + 0 * held.sum().detach()

        def backward():
            loss.backward()
            (seen,), Keeps.seen = Keeps.seen, None
            return seen.a, seen.b

        return backward

    check(program, tmp_path)
    stats = on_disk(program, tmp_path).stats()
    assert stats.written_bytes == 2 * 2 * SIDE * SIDE * 4  # both parts, and both again


@pytest.mark.parametrize(
    "change", [lambda w: w.mul_(3), lambda w: w.a.mul_(3)], ids=["whole", "inner"]
)
def test_a_wrapper_that_changes_after_its_save_is_held_as_it_was(tmp_path, change):
    want = run(keeping(lambda: (two().detach(),)))
    for way in set(WAYS) - {"no tier below"}:
        stash = Stash(**{"disk": tmp_path, **WAYS[way]})
        x, wrapped = leaf(2), two().detach()
        with stash:
            loss = Keeps.apply(x, wrapped).sum()
        change(wrapped)
        loss.backward()
        (seen,), Keeps.seen = Keeps.seen, None
        assert same_bits(seen.a, want[0].a) and same_bits(seen.b, want[0].b), way
        stash.close()


class Named(torch.Tensor):
    """A subclass that does not say what it is made of."""


def test_another_subclass_stays_and_stays_what_it_is(tmp_path):
    def program():
        x = leaf(SIDE, SIDE)
        h = (x * 2).as_subclass(Named)
        loss = (h.sin() * h).as_subclass(torch.Tensor)
        return lambda: gradients(loss, x)

    check(program, tmp_path)
    assert (
        "a Named, which does not list its inner tensors (__tensor_flatten__)"
        in on_disk(program, tmp_path).stats().left
    )


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Parameter(leaf(SIDE, SIDE).detach(), requires_grad=False)
        self.down = nn.Parameter(leaf(SIDE, 8, seed=2).detach())
        self.up = nn.Parameter(leaf(8, SIDE, seed=3).detach())
        self.register_buffer("scale", leaf(SIDE, SIDE, seed=4).detach())

    def forward(self, x):
        x = F.linear(x, self.frozen) + x @ self.frozen.t().t() + (x @ self.down) @ self.up
        return x @ self.scale + x * self.scale[:1] + F.linear(x, self.scale.t())


def test_parameters_frozen_or_not_and_buffers_stay(tmp_path):
    block = Block()

    def program():
        x = leaf(4, SIDE)
        loss = block(block(x)).sin()
        return lambda: gradients(loss, x, block.down, block.up)

    check(program, tmp_path)
    stats = on_disk(program, tmp_path).stats()
    # Not exact: the small parameters come on top.
    assert stats.left[PARAMETER].nbytes >= 4 * SIDE * SIDE * 4
    assert stats.left["a module's buffer, or a view of one"].count >= 4
    activations = 4 * SIDE * 4
    low_rank = 4 * 8 * 4
    assert stats.written_bytes == 2 * (activations + low_rank)


def test_dropout_and_pooling_move_their_masks_and_indices(tmp_path):
    def program():
        x = leaf(2, 8, 64, 64)
        h = F.dropout(x.sin(), 0.5)
        loss = F.max_pool2d(h, 2).exp() * F.adaptive_max_pool2d(h, 32)
        loss = loss[torch.tensor([1, 0])].gather(3, torch.randint(32, (2, 8, 32, 32)))
        return lambda: gradients(loss, x)

    check(program, tmp_path)
    assert set(on_disk(program, tmp_path).stats().left) == {PARAMETER}


def test_autocast(tmp_path):
    model = nn.Sequential(
        nn.Linear(SIDE, SIDE), nn.GELU(), nn.LayerNorm(SIDE), nn.Linear(SIDE, SIDE)
    )

    def program():
        x = leaf(64, SIDE)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().sin()
        return lambda: gradients(loss, x, *model.parameters())

    check(program, tmp_path)
    stats = on_disk(program, tmp_path).stats()
    # Not exact: what autocast's operations save in addition to them is PyTorch's affair.
    assert stats.written_bytes > 2 * SIDE * SIDE * 2  # the weights in bfloat16, no parameters


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forward_mode_over_a_stash(tmp_path):
    """A Hessian-vector product by a dual level: what is saved may be dual, or zeros without memory."""

    def program():
        x, direction = leaf(SIDE, SIDE), leaf(SIDE, SIDE, seed=2).detach()
        with forward_mode.dual_level():
            dual = forward_mode.make_dual(x, direction)
            h = dual * 1
            loss = (h.sin() * h.exp()).sum()
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            primal, tangent = forward_mode.unpack_dual(grad)
        return lambda: (primal.detach(), tangent.detach())

    check(program, tmp_path)
    stats = on_disk(program, tmp_path).stats()
    assert "a tensor of zeros without memory" in stats.left
    assert (
        stats.written_bytes > SIDE * SIDE * 4
    )  # not exact: what formulas save is PyTorch's affair


def test_backward_in_inference_mode(tmp_path):
    def program():
        x = leaf(SIDE, SIDE)
        h = x.sin()
        loss = (h.exp() * h[:, :1].expand(SIDE, SIDE)).sum()

        def backward():
            with torch.inference_mode():
                loss.backward()
            return (x.grad.clone(),)

        return backward

    check(program, tmp_path)


def test_a_default_device_is_not_ours(tmp_path):
    def program():
        x = leaf(SIDE, SIDE)
        loss = x.sin().exp()[:, :5].expand(2, SIDE, 5) * 2
        loss = loss * loss[:, :, :1].expand(2, SIDE, 5)

        def backward():
            torch.set_default_device("meta")
            try:
                return gradients(loss, x)
            finally:
                torch.set_default_device(None)

        return backward

    check(program, tmp_path)


def test_uninitialized_memory_that_is_filled_is_not_read(tmp_path):
    def program():
        x = leaf(SIDE, SIDE)
        torch.use_deterministic_algorithms(True)
        try:
            loss = x.sin().exp()[:, :5] * x.sin()[:, 5:10]
        finally:
            torch.use_deterministic_algorithms(False)
        return lambda: gradients(loss, x)

    check(program, tmp_path)


def test_a_copy_of_a_model_in_a_thread(tmp_path):
    block = Block()

    def program():
        x, results = leaf(4, SIDE), []

        def work():
            twin = copy.deepcopy(block)
            results.extend(gradients(twin(x), x, twin.up))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return lambda: results

    check(program, tmp_path)
