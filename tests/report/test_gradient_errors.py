"""Gradients under a lossy codec compared with the exact ones, on a step of one's own."""

import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from backstash import Action, Stash
from backstash.codecs import BFloat16, Float8, Int8
from backstash.errors import UsageError
from backstash.hooks import summary
from backstash.report import gradient_errors


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 512)
        self.norm = nn.BatchNorm1d(512)
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Linear(512, 8)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return self.last(self.dropout(self.norm(self.first(x)).sin()))


@pytest.fixture
def net():
    return Net()


def step_of(net):
    x = torch.randn(256, 64)
    return lambda: net(x).square().mean()


@pytest.mark.parametrize(
    ("codec", "least", "most"),
    [(BFloat16(), 1e-5, 0.01), (Int8(), 1e-5, 0.05), (Float8(), 1e-4, 0.2)],
)
def test_each_parameter_s_error_is_that_of_its_gradient(net, codec, least, most):
    step = step_of(net)
    found = gradient_errors(step, net, Stash(codec=codec))
    assert {row.name for row in found.rows} == {
        name for name, _ in net.named_parameters() if "unused" not in name
    }
    errors = {row.name: row for row in found.rows}
    assert least < errors["last.weight"].relative_l2_error < most
    assert 1 - most < errors["last.weight"].cosine < 1
    assert errors["last.bias"].relative_l2_error == 0  # it follows from no saved tensor
    assert found.loss_is_equal and not found.is_exact
    order = [row.relative_l2_error for row in found.rows]
    assert order == sorted(order, reverse=True)
    assert "last.weight" in str(found) and "cosine" in str(found)


def test_the_figures_are_those_of_two_gradients():
    net = nn.Linear(1, 2, bias=False)
    x = torch.tensor([[1.0]])

    class Half:
        def __enter__(self):
            self.hooks = torch.autograd.graph.saved_tensors_hooks(
                lambda saved: saved, lambda saved: saved * torch.tensor([1.0, 0.0])
            )
            self.hooks.__enter__()

        def __exit__(self, *what):
            self.hooks.__exit__(*what)

    with torch.no_grad():
        net.weight.copy_(torch.tensor([[3.0], [4.0]]))
    found = gradient_errors(lambda: net(x).square().sum(), net, Half())
    (row,) = found.rows  # the gradient is (6, 8), and under it (6, 0)
    assert row.norm == 10
    assert math.isclose(row.relative_l2_error, 0.8) and math.isclose(row.cosine, 0.6)


def test_an_exact_codec_has_no_error_and_all_is_as_before(net):
    step = step_of(net)
    net.last.bias.grad = before = torch.ones(8)
    buffers = [each.clone() for each in net.buffers()]
    random = torch.get_rng_state()
    found = gradient_errors(step, net, Stash(policy=lambda saved: Action("pack")))
    assert found.is_exact and "each equal to the exact one" in str(found)
    assert net.last.bias.grad is before and net.first.weight.grad is None
    assert all(map(torch.equal, net.buffers(), buffers))
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("training", [True, False])
def test_a_graph_from_before_can_still_run_backward(net, training):
    step = step_of(net.train(training))
    loss = step()
    buffers = [each.clone() for each in net.buffers()]
    gradient_errors(step, net, Stash(codec=BFloat16()))
    assert all(map(torch.equal, net.buffers(), buffers))
    loss.backward()
    assert net.first.weight.grad is not None


def test_a_step_that_does_not_repeat_itself_is_reported():
    net, calls = nn.Linear(64, 512), []

    def step():
        calls.append(1)
        return net(torch.full((256, 64), float(len(calls)))).square().mean()

    found = gradient_errors(step, net, Stash(codec=BFloat16()))
    assert not found.loss_is_equal and "the step is not deterministic" in str(found)


def test_nan_is_the_largest_error():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    x, unpacked = torch.randn(3, 4), []

    def unpack(saved):
        unpacked.append(saved)
        return saved * math.nan if len(unpacked) == 2 else saved

    under = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack)
    found = gradient_errors(lambda: net(x).square().mean(), net, under)
    assert [row.name for row in found.rows if math.isnan(row.relative_l2_error)] == ["2.weight"]
    assert found.rows[0].name == "2.weight" and math.isnan(found.rows[0].cosine)
    assert "nan       nan" in str(found).splitlines()[1] and not found.is_exact


def test_zeros():
    net = nn.Linear(4, 4)
    found = gradient_errors(lambda: net(torch.zeros(2, 4)).sum() * 0, net, Stash())
    assert [(row.relative_l2_error, row.cosine) for row in found.rows] == [(0, 1), (0, 1)]


@pytest.mark.parametrize("what", [3.0, torch.zeros(())])
def test_a_step_returns_a_loss(net, what):
    with pytest.raises(UsageError, match="step returned"):
        gradient_errors(lambda: what, net, Stash())
    assert net.last.weight.grad is None


class Rebinding(nn.Module):
    """Puts another tensor in the place of one buffer; the elements of the other share memory."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("ones", torch.ones(1).expand(4))

    def forward(self, x):
        self.count = self.count + 1
        return self.layer(x) * self.ones


@pytest.mark.parametrize(
    "look",
    [
        lambda net, step: gradient_errors(step, net, nullcontext()),
        lambda net, step: summary(net, X),
    ],
)
def test_buffers_that_are_replaced_or_expanded_are_as_before(look):
    net = Rebinding()
    count, ones = net.count, net.ones
    look(net, lambda: net(X).square().mean())
    assert net.count is count and count.item() == 0 and net.ones is ones


X = torch.ones(2, 4)
