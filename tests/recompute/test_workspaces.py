"""oneDNN's LSTM returns a workspace for backward, of which it does not write every byte."""

import copy

import pytest
import torch
from torch import nn

from backstash import Stash
from backstash._recompute import call
from backstash._torch.schemas import operation_of

ROWS, STEPS, WIDTH = 8, 16, 64
OUTPUT = ROWS * STEPS * WIDTH * 4


class Stacked(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True, **options)

    def forward(self, x):
        return self.layer(x)[0][..., :WIDTH]


def train(net, *, steps=5, length=STEPS):
    """The gradients of each step, whose sequences are of other lengths every other time."""
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(ROWS, length >> step % 2, WIDTH, requires_grad=True)
        junk = [torch.full((size << 16,), step + 1, dtype=torch.uint8) for size in range(1, 24)]
        del junk  # fresh memory would be zeros each time
        loss = net(x).square().sum()
        found.append(torch.autograd.grad(loss, [x, *net.parameters()]))
    return found


def recomputed(net, **options):
    """The same of a net whose layers are recomputed, and the statistics of the stash."""
    stash = Stash(min_bytes=0, **options)
    with stash.recompute(*net):
        found = train(net)
    statistics = stash.stats()
    stash.close()
    return found, statistics


def assert_same(found, expected):
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert all(map(torch.equal, one, other)), step


@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}], ids=repr
)
@pytest.mark.parametrize("verify", ["first", "auto"])
def test_the_workspace_of_an_lstm_is_recomputed(options, verify):
    net = nn.Sequential(*(Stacked(**options) for _ in range(3)))
    expected = train(copy.deepcopy(net))
    found, statistics = recomputed(net, verify=verify)
    assert_same(found, expected)
    of_outputs = len(net) * (3 * OUTPUT + 2 * OUTPUT // 2)
    assert statistics.recomputed_bytes > 10 * of_outputs, "the workspaces are most of it"


def test_where_all_bits_are_compared_the_workspace_stays():
    net = nn.Sequential(*(Stacked() for _ in range(3)))
    expected = train(copy.deepcopy(net))
    found, statistics = recomputed(net, verify="always")
    assert_same(found, expected)
    assert 0 < statistics.recomputed_bytes < 10 * len(net) * 4 * OUTPUT


@pytest.mark.parametrize("differs", [True, False])
def test_it_is_recomputed_only_if_another_result_of_its_operation_is_the_same(monkeypatch, differs):
    compare = call._are_same

    def compared(one, other):
        is_output = tuple(one.shape[1:]) == (ROWS, WIDTH) and one.shape[0] > 1
        return False if is_output and differs else compare(one, other)

    monkeypatch.setattr(call, "_are_same", compared)
    net = nn.Sequential(Stacked())
    expected = train(copy.deepcopy(net))
    found, statistics = recomputed(net)
    assert_same(found, expected)
    assert (statistics.recomputed_bytes > 10 * 4 * OUTPUT) is not differs


def test_it_stays_if_nothing_else_of_its_operation_is_compared():
    net, stash = nn.Sequential(Stacked()), Stash()
    expected = train(copy.deepcopy(net), length=STEPS // 4)
    with stash.recompute(*net):
        assert_same(train(net, length=STEPS // 4), expected)
    assert not stash.stats().recomputed_bytes
    assert any("no other result" in reason for reason in stash.stats().left)
    stash.close()


def test_other_memory_of_bytes_is_no_workspace():
    class Bytes(nn.Module):
        def forward(self, x):
            kept = (x > 0).flatten().to(torch.uint8)
            return x.tanh() * kept.view_as(x)

    assert operation_of(torch.ops.aten.mkldnn_rnn_layer.default).has_workspace
    assert not operation_of(torch.ops.aten._to_copy.default).has_workspace
    net = nn.Sequential(Bytes(), nn.Linear(WIDTH, WIDTH))
    expected = train(copy.deepcopy(net))
    found, _ = recomputed(net)
    assert_same(found, expected)
