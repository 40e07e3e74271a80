"""clip_gradients and edit_gradients."""

import pytest
import torch
from torch import nn

from backstash.errors import UsageError
from backstash.hooks import clip_gradients, edit_gradients


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    (model(x) * 10).pow(2).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_clip_by_value(chain: nn.Sequential) -> None:
    x = torch.randn(5, 4)
    plain = gradients(chain, x)
    with clip_gradients(chain, value=1.0):
        clipped = gradients(chain, x)
    assert all(torch.equal(c, p.clamp(-1, 1)) for c, p in zip(clipped, plain, strict=True))
    assert any(not torch.equal(c, p) for c, p in zip(clipped, plain, strict=True))
    with clip_gradients(chain, value=(-0.5, 2.0), names="2.*"):
        clipped = gradients(chain, x)
    assert torch.equal(clipped[0], plain[0]) and torch.equal(clipped[2], plain[2].clamp(-0.5, 2.0))


def test_clip_by_the_norm_of_each_tensor(chain: nn.Sequential) -> None:
    x = torch.randn(5, 4)
    plain = gradients(chain, x)
    bound = sorted(g.norm().item() for g in plain)[1] * 1.01
    with clip_gradients(chain, norm=bound) as clip:
        clipped = gradients(chain, x)
    for new, old in zip(clipped, plain, strict=True):
        scale = min(1.0, bound / old.norm().item())
        torch.testing.assert_close(new, old * scale)
    assert "not global-norm clipping" in repr(clip)
    assert "not global-norm clipping" in " ".join(clip_gradients.__doc__.split())
    assert clip.reduction == "none"


@pytest.mark.parametrize(
    ("dtype", "value", "norm"),
    [
        (torch.float16, 60000.0, 1e-4),
        (torch.float16, 60000.0, 1.0),
        (torch.bfloat16, 1e25, 1.0),
        (torch.float32, 1e25, 1.0),
        (torch.complex64, 1e25, 1.0),
        (torch.float32, 1e-30, 1e-35),
    ],
)
def test_clip_of_large_gradients(dtype: torch.dtype, value: float, norm: float) -> None:
    y = torch.zeros(2, dtype=dtype, requires_grad=True)
    with clip_gradients({"y": y}, norm=norm):
        y.backward(torch.full_like(y, value))
    assert y.grad.dtype == dtype
    wide = y.grad.to(torch.complex128 if dtype.is_complex else torch.float64)
    assert wide.norm().item() == pytest.approx(norm, rel=4e-3)


def test_clip_keeps_zero_and_nan() -> None:
    y = torch.zeros(3, requires_grad=True)
    with clip_gradients({"y": y}, norm=1.0):
        (y * 0).sum().backward()
        assert torch.equal(y.grad, torch.zeros(3))
        (y * float("nan")).sum().backward()
        assert y.grad.isnan().all()


def test_clip_of_a_sparse_gradient() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    with clip_gradients(table, value=1.0):
        (table(torch.tensor([1, 1, 3])) * 3).sum().backward()
    assert table.weight.grad.is_sparse
    assert torch.equal(table.weight.grad.to_dense()[1], torch.ones(2))


def test_a_shared_gradient_is_not_changed_in_place() -> None:
    y = torch.ones(3, requires_grad=True)
    given = torch.full((3,), 5.0)
    with clip_gradients({"y": y}, value=1.0):
        y.view_as(y).backward(given)  # hands on the very tensor
    assert torch.equal(given, torch.full((3,), 5.0)) and torch.equal(y.grad, torch.ones(3))


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"value": 1.0, "norm": 1.0},
        {"value": 0},
        {"value": -1.0},
        {"value": (1.0, -1.0)},
        {"value": "1"},
        {"norm": 0},
        {"norm": float("inf")},
    ],
)
def test_clip_refuses_what_is_no_bound(chain: nn.Sequential, arguments: dict) -> None:
    with pytest.raises(UsageError, match=r"value=|norm="):
        clip_gradients(chain, **arguments)


def test_edit_a_parameter_and_an_inplace_relu(chain: nn.Sequential) -> None:
    x = torch.randn(5, 4)
    seen = []
    edits = {"2.bias": torch.zeros_like, "1": lambda g: g.clamp(min=0), "0": seen.append}
    with edit_gradients(edits, chain):
        grads = gradients(chain, x)
    hidden = chain[0](x).detach().requires_grad_()
    relu = torch.relu(hidden)
    relu.retain_grad()
    (chain[2](relu) * 10).pow(2).sum().backward()
    assert not grads[3].any()
    assert torch.equal(seen[0], relu.grad.clamp(min=0) * (hidden > 0))


def test_edits_of_one_gradient_are_applied_in_order() -> None:
    w = torch.ones(2, requires_grad=True)
    y = w * 1
    with edit_gradients({"y": lambda g: g + 1, "?": lambda g: g * 10}, {"y": y}):
        y.sum().backward()
    assert torch.equal(w.grad, torch.full((2,), 20.0))


def test_edit_at_inputs_is_of_this_module_alone() -> None:
    layer = nn.Linear(3, 3)
    x = torch.ones(2, 3, requires_grad=True)
    with edit_gradients({"": lambda g: torch.full_like(g, 42.0)}, layer, at="inputs"):
        (layer(x) + x).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), 43.0))


def test_edit_at_inputs_of_an_inplace_module(chain: nn.Sequential) -> None:
    with edit_gradients({"1": torch.ones_like}, chain, at="inputs"):
        gradients(chain, torch.randn(5, 4))
    assert torch.equal(chain[0].bias.grad, torch.full((8,), 5.0))


def test_edit_of_dict_outputs_and_keyword_inputs(structured: nn.Module) -> None:
    x = torch.ones(2, 3)
    with edit_gradients({"dict": torch.zeros_like}, structured):
        structured(x).sum().backward()
    assert torch.equal(structured.first.bias.grad, torch.full((3,), 4.0))
    structured.zero_grad()
    with edit_gradients({"dict": torch.zeros_like}, structured, at="inputs"):
        structured(x).sum().backward()
    assert torch.equal(structured.first.bias.grad, torch.full((3,), 4.0))


def test_an_output_that_is_a_parameter_is_edited_once_a_call(table: nn.Module) -> None:
    with edit_gradients({"": lambda g: g * 2}, table, at="outputs"):
        for _ in range(3):
            table.zero_grad()
            table().sum().backward()
            assert torch.equal(table.weight.grad, torch.full((3,), 2.0))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda g: g[0],
            r"'2.bias' returned torch.float32 \(\) on cpu; the gradient is torch.float32 \(2,\)",
        ),
        (lambda g: g.double(), "torch.zeros_like"),
        (lambda g: 3.0, "returned a float; allowed: a tensor, or None"),
    ],
)
def test_an_edit_that_returns_something_else(chain, edit, message) -> None:
    with pytest.raises(UsageError, match=message), edit_gradients({"2.bias": edit}, chain):
        gradients(chain, torch.randn(5, 4))


def test_edit_refuses(chain: nn.Sequential, state_of) -> None:
    before = state_of(chain)
    with pytest.raises(UsageError, match=r"'2\*' matches parameters .* and modules .* pass at="):
        edit_gradients({"0.bias": print, "2*": print}, chain)
    with pytest.raises(UsageError, match="is not callable"):
        edit_gradients({"0.bias": 0.5}, chain)
    with pytest.raises(UsageError, match="edits nothing"):
        edit_gradients({}, chain)
    with pytest.raises(
        UsageError, match=r"edits is a Sequential; allowed: a dict .* before the model"
    ):
        edit_gradients(chain, {"0.bias": torch.zeros_like})
    with pytest.raises(UsageError, match='allowed: "parameters", "outputs", "inputs"'):
        edit_gradients({"0.bias": print}, chain, at="everywhere")
    with pytest.raises(UsageError, match="has no gradients to hook"):
        edit_gradients({"0.bias": print}, 3)
    assert state_of(chain) == before
    with edit_gradients({"2*": lambda g: g * 0}, chain, at="parameters"):
        assert not any(g.any() for g in gradients(chain, torch.randn(5, 4))[2:])


class Residual(nn.Module):
    """Its second module returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(4, 4), nn.Dropout()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return h + self.drop(input=h) + self.drop(h)


def test_the_output_of_a_module_that_returns_its_input_is_a_use_of_its_own() -> None:
    net = Residual().eval()
    with edit_gradients({"drop": torch.zeros_like}, net):
        net(torch.ones(2, 4)).sum().backward()
    assert torch.equal(net.first.bias.grad, torch.full((4,), 2.0))
