"""``saved_on``, ``save_for_backward(to=)`` and ``saved_tensors``: a stash for one function or one call."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd import graph as stock

from backstash import Disk, Stash
from backstash.errors import UsageError
from backstash.graph import (
    allow_mutation_on_saved_tensors,
    disable_saved_tensors_hooks,
    save_for_backward,
    saved,
    saved_on,
    saved_tensors,
    saved_tensors_hooks,
)

current = torch._C._autograd._top_saved_tensors_default_hooks


@pytest.fixture
def directory(disk_dir: Any) -> str:
    return str(disk_dir)


@pytest.fixture
def stash(directory: str) -> Iterator[Stash]:
    with_disk = Stash(disk=directory, min_bytes=0)
    yield with_disk
    with_disk.close()


def places(tensor: Tensor) -> list[tuple[str, str]]:
    assert tensor.grad_fn is not None
    return [(each.name, each.where) for each in saved(tensor.grad_fn)]


def product_function(to: Any) -> type[Function]:
    """x * exp(x), which saves an input, an output and nothing, all to ``to``."""

    class Product(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, fails: bool = False) -> tuple[Tensor, Tensor]:
            y = x.exp()
            save_for_backward(ctx, x, None, y, to=to)
            if fails:
                raise KeyError("forward failed")
            return x * y, y

        @staticmethod
        def backward(ctx: Any, grad: Tensor, grad_exp: Tensor) -> Any:
            x, nothing, y = saved_tensors(ctx)
            assert nothing is None
            return grad * (y + x * y) + grad_exp * y, None

    return Product


class Exp(Function):
    """The newer form, with ``setup_context``."""

    to: Any = None

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        save_for_backward(ctx, output, to=Exp.to)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = saved_tensors(ctx)
        return grad * y


def double() -> Tensor:
    return torch.tensor([0.5, -0.25, 1.0], dtype=torch.float64, requires_grad=True)


def test_save_for_backward_to_a_stash_and_double_backward(stash: Stash) -> None:
    function = product_function(stash)
    x = double() * 1
    y = function.apply(x)[0]
    assert places(y) == [("tensors[0]", "disk"), ("tensors[2]", "disk")]
    y.sum().backward()
    assert torch.autograd.gradcheck(function.apply, double())
    assert torch.autograd.gradgradcheck(function.apply, double())


def test_setup_context_and_double_backward(stash: Stash, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Exp, "to", stash)
    assert places(Exp.apply(double())) == [("tensors[0]", "disk")]
    assert torch.autograd.gradgradcheck(Exp.apply, double())


def test_nothing_is_left_active_whether_or_not_there_is_a_graph(stash: Stash) -> None:
    function = product_function(stash)
    x = double()
    function.apply(x)
    assert current(True) is None
    with torch.no_grad():
        function.apply(x)
    function.apply(x.detach())
    assert current(True) is None
    kept: BaseException
    with pytest.raises(KeyError) as raised:
        function.apply(x, True)
    kept = raised.value
    assert current(True) is None
    assert places(x.exp()) == [("result", "in place")]
    del raised, kept
    gc.collect()
    assert current(True) is None


def test_to_goes_before_the_hooks_around_it_which_stay_as_they_were(stash: Stash) -> None:
    function = product_function(stash)
    x, packed = double() * 1, []
    for kind in (stock.saved_tensors_hooks, saved_tensors_hooks):
        packed.clear()
        with kind(lambda t: packed.append(1) or t.clone(), lambda t: t):
            before = current(True)
            y = function.apply(x)[0]
            assert packed == [] and current(True) == before
            z = y.exp()
        assert packed == [1] and places(y)[0][1] == "disk"
        z.sum().backward(retain_graph=True)
    assert current(True) is None


@pytest.mark.parametrize("on_disk", [False, True])
def test_under_allowed_mutation_it_stays_exact(directory: str, on_disk: bool) -> None:
    stash = Stash(disk=directory if on_disk else None, min_bytes=0)
    function = product_function(stash)
    x, reference = double(), double()
    with allow_mutation_on_saved_tensors():
        b = x * 1
        y, e = function.apply(b)
        b.detach().zero_()
        e.detach().zero_()
        y.sum().backward()
    (reference * reference.exp()).sum().backward()
    assert torch.allclose(x.grad, reference.grad, rtol=1e-14)
    stash.close()


def test_what_to_raises_comes_out_of_apply_and_nothing_is_left() -> None:
    class Full:
        def pack(self, tensor: Tensor) -> Any:
            raise OSError("full")

        def unpack(self, packed: Any) -> Tensor:
            raise AssertionError

    with pytest.raises(OSError, match="full"):
        product_function(Full()).apply(double())
    assert current(True) is None


def test_without_to_it_is_torchs_own() -> None:
    y = product_function(None).apply(double())[0]
    assert places(y) == [("tensors[0]", "in place"), ("tensors[2]", "in place")]
    assert torch.autograd.gradgradcheck(product_function(None).apply, double())


def test_what_is_no_pair_is_refused() -> None:
    with pytest.raises(UsageError, match="pack and unpack"):
        product_function("/scratch").apply(double())
    with pytest.raises(UsageError, match="saved_on"):
        saved_on("/scratch")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Function and a callable"):
        saved_on(Stash())(3)


def test_where_hooks_are_disabled_it_says_so(stash: Stash) -> None:
    with disable_saved_tensors_hooks("not here"), pytest.raises(RuntimeError, match="not here"):
        saved_on(stash)(torch.exp)(double())
    with disable_saved_tensors_hooks("not here"), pytest.raises(RuntimeError, match="not here"):
        product_function(stash).apply(double())
    assert current(True) is None and stash.stats().saves == 0


def plain_function() -> type[Function]:
    class Cube(Function):
        """Cubes."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad * 3 * x**2

    return Cube


def test_saved_on_a_function_class(stash: Stash) -> None:
    plain = plain_function()
    cube = saved_on(stash)(plain)
    x = double() * 1
    y = cube.apply(x)
    assert places(y) == [("tensors[0]", "disk")] and y.grad_fn.name() == "CubeBackward"
    assert cube.__doc__ == "Cubes." and issubclass(cube, plain)
    assert places(plain.apply(x)) == [("tensors[0]", "in place")]
    assert torch.autograd.gradgradcheck(cube.apply, double())


def test_saved_on_a_function_of_the_newer_form(stash: Stash) -> None:
    y = saved_on(stash)(Exp).apply(double())
    assert places(y) == [("tensors[0]", "disk")]
    y.sum().backward()


def test_saved_on_a_built_in_and_a_wrapped_call(stash: Stash) -> None:
    matrix = (torch.eye(3, dtype=torch.float64) * torch.tensor([1.0, 2.0, 4.0])).requires_grad_()
    values = saved_on(stash)(torch.linalg.svd)(matrix)[1]
    assert {where for _, where in places(values)} == {"disk"}
    values.sum().backward()
    reference = matrix.detach().clone().requires_grad_()
    torch.linalg.svd(reference)[1].sum().backward()
    assert torch.equal(matrix.grad, reference.grad)


def test_saved_on_a_store_makes_the_stash(directory: str) -> None:
    store = Disk(directory)
    y = saved_on(store)(torch.exp)(double())
    assert places(y) == [("result", "disk")]
    y.sum().backward()
    store.close()


def test_saved_on_any_context_of_hooks() -> None:
    packed: list[int] = []
    hooks = saved_tensors_hooks(lambda t: packed.append(1) or t.clone(), lambda t: t)
    saved_on(hooks)(torch.exp)(double()).sum().backward()
    assert packed == [1]
