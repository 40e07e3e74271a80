"""capture(grads=True): what backward brings, against autograd's own answer."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from backstash.hooks import HookWarning, NotCapturedError, capture


def test_gradients_through_an_inplace_relu(residual: nn.Module) -> None:
    x = torch.randn(2, 4, requires_grad=True)
    with capture(residual, "*", inputs=True, grads=True, calls="all", clone=True) as got:
        out = residual(x)
        out.pow(2).sum().backward()
    first = residual.fc1(x).detach().requires_grad_()
    hidden = torch.relu(first)
    hidden.retain_grad()
    second = residual.fc2(hidden)
    second.retain_grad()
    torch.relu(second + x.detach()).pow(2).sum().backward()
    assert torch.equal(got["fc2"].grad, second.grad)
    assert torch.equal(got["fc1"].grad, first.grad)
    assert torch.equal(got["fc2"].input_grad, hidden.grad)
    once, again = got["relu"].calls
    assert torch.equal(once.grad, hidden.grad) and torch.equal(once.input_grad, first.grad)
    assert torch.equal(again.input_grad, second.grad)
    assert torch.equal(got[""].input_grad, x.grad)


def test_gradients_change_nothing(residual: nn.Module) -> None:
    x = torch.randn(2, 4, requires_grad=True)

    def gradients() -> list[torch.Tensor]:
        residual.zero_grad()
        x.grad = None
        residual(x).pow(2).sum().backward()
        return [x.grad, *(p.grad for p in residual.parameters())]

    plain = gradients()
    with capture(residual, "*", inputs=True, grads=True, clone=True):
        hooked = gradients()
    assert all(torch.equal(a, b) for a, b in zip(plain, hooked, strict=True))


def test_gradients_in_the_structure_of_the_output(structured: nn.Module) -> None:
    with capture(structured, ["tuple", "dict", "record"], inputs=True, grads=True) as got:
        structured(torch.ones(2, 3)).sum().backward()
    ones = torch.ones(2, 3)
    a, none, b = got["tuple"].grad
    assert none is None and torch.equal(a, ones * 4) and torch.equal(b, ones * 2)
    assert torch.equal(got["dict"].grad["y"], ones)
    assert torch.equal(got["dict"].grad["inner"]["z"][0], ones)
    assert torch.equal(got["dict"].input_grad, ones * 4)
    assert torch.equal(got["record"].grad.logits, ones)
    assert got["record"].grad.note == "kept"


def test_input_gradient_is_of_this_module_alone() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    x = torch.ones(1, 3, requires_grad=True)
    y = x * 1
    with capture(model, ["a", "b"], inputs=True, grads=True) as got:
        (model["a"](y) + 2 * model["b"](y) + y).sum().backward()
    assert torch.equal(got["a"].input_grad[0], model["a"].weight.sum(0))
    assert torch.equal(got["b"].input_grad[0], 2 * model["b"].weight.sum(0))


def test_a_parameter_as_output_keeps_no_hook(table: nn.Module, state_of) -> None:
    before = state_of(table)
    with capture(table, "", grads=True) as got:
        for _ in range(3):
            (table() * 2 + 3 * table.weight).sum().backward()
        assert torch.equal(got[""].grad, torch.full((3,), 2.0))
        assert not table.weight._backward_hooks
    assert state_of(table) == before
    assert torch.equal(table.weight.grad, torch.full((3,), 15.0))


def test_no_hook_stays_on_a_living_graph(chain: nn.Sequential) -> None:
    with capture(chain, "2", grads=True) as got:
        out = chain(torch.randn(5, 4))
        out.sum().backward(retain_graph=True)
        kept = got["2"].grad
    assert not out._backward_hooks
    (3 * out.sum()).backward()
    assert torch.equal(got["2"].grad, kept)


def test_backward_after_the_block_is_said(chain: nn.Sequential) -> None:
    with pytest.warns(HookWarning, match=r"0 \(grad\).*inside the with block"):
        with capture(chain, "0", grads=True, clone=True) as got:
            out = chain(torch.randn(5, 4))
    out.sum().backward()
    with pytest.raises(NotCapturedError, match="run backward inside the with block"):
        _ = got["0"].grad


def test_handles_of_dead_graphs_do_not_pile_up(chain: nn.Sequential) -> None:
    with capture(chain, "*", grads=True) as got:
        for _ in range(400):
            chain(torch.randn(1, 4)).sum().backward()
        assert len(got._registration._graph_hooks) < 1000


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_is_no_second_call(residual: nn.Module, reentrant: bool) -> None:
    x = torch.randn(2, 4, requires_grad=True)
    with capture(residual, ["fc1", "fc2"], grads=True, calls="all", clone=True) as plain:
        residual(x).sum().backward()
    with capture(residual, ["fc1", "fc2"], grads=True, calls="all", clone=True) as got:
        checkpoint(residual, x, use_reentrant=reentrant).sum().backward()
    for name in ("fc1", "fc2"):
        assert len(got[name].calls) == 1
        assert torch.equal(got[name].grad, plain[name].grad)
        assert torch.equal(got[name].output, plain[name].output)


def test_gradients_of_a_packed_sequence() -> None:
    rnn = nn.LSTM(3, 4)
    x = torch.randn(5, 2, 3, requires_grad=True)
    lengths = torch.tensor([5, 3])
    with capture(rnn, "", inputs=True, grads=True) as got:
        packed, _ = rnn(nn.utils.rnn.pack_padded_sequence(x, lengths))
        packed.data.square().sum().backward()
    assert type(got[""].output[0]) is nn.utils.rnn.PackedSequence
    assert torch.equal(got[""].output[0].batch_sizes, packed.batch_sizes)
    assert torch.equal(got[""].grad[0].data, 2 * packed.data)
    padded, _ = nn.utils.rnn.pad_packed_sequence(
        nn.utils.rnn.PackedSequence(got[""].input_grad.data, packed.batch_sizes)
    )
    assert torch.equal(padded, x.grad)


class Pair(tuple):
    """Is created from other arguments than its items, and has a field of its own."""

    def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> "Pair":
        made = super().__new__(cls, (first, second.exp()))
        made.name = "pair"
        return made


def test_gradients_of_tuples_that_are_not_created_from_their_items() -> None:
    class Tuples(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple:
            return Pair(x * 2, x), torch.max(x * 3, 1)

    model = Tuples()
    x = torch.zeros(2, 3, requires_grad=True)
    with capture(model, "", grads=True) as got:
        pair, most = model(x)
        (pair[0].sum() + 5 * pair[1].sum() + most.values.sum()).backward()
    kept, kept_most = got[""].output
    assert type(kept) is Pair and kept.name == "pair" and torch.equal(kept[1], torch.ones(2, 3))
    assert type(kept_most) is torch.return_types.max
    assert [each.max().item() for each in got[""].grad[0]] == [1, 5]
    assert torch.equal(got[""].grad[1].values, torch.ones(2)) and got[""].grad[1].indices is None
