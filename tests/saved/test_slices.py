"""Loops over time, which save slices of one storage: as one block from the second step on, to the bit."""

import pytest
import torch
from torch import nn

from backstash import Stash
from backstash.errors import InplaceError


class Recurrent(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        state, outputs = None, []
        for at in range(x.shape[1]):
            state = self.cell(x[:, at], state)
            outputs.append(state if isinstance(state, torch.Tensor) else state[0])
        return torch.stack(outputs, 1)


def step(net, x, stash=None):
    leaf = x.clone().requires_grad_()
    if stash is None:
        loss = net(leaf).square().mean()
    else:
        with stash:
            loss = net(leaf).square().mean()
    wanted = [leaf, *net.parameters()]
    return [loss.detach(), *torch.autograd.grad(loss, wanted)]


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_gradients_of_a_loop_are_exact_and_its_input_is_one_block(tmp_path, kind):
    torch.manual_seed(0)
    net = nn.Sequential(*(Recurrent(kind(16, 16)) for _ in range(3)))
    x = torch.randn(64, 24, 16)
    stash, written = Stash(disk=tmp_path, min_bytes="64KiB"), []
    for _ in range(4):
        before = stash.stats().written_bytes
        for mine, plain in zip(step(net, x, stash), step(net, x), strict=True):
            assert torch.equal(mine, plain)
        written.append(stash.stats().written_bytes - before)
    assert written[0] == x.nbytes, "the last result; slices were copied, each less than moves"
    assert written[1:] == [3 * x.nbytes] * 3, "the inputs of the second and the third layer, too"
    stash.close()


def test_a_slice_that_is_changed_in_place_raises_as_in_plain_pytorch(tmp_path):
    """One whose storage is a block of which the others were saved, too."""
    stash = Stash(disk=tmp_path, min_bytes="64KiB", keep="1MiB")
    for _ in range(2):
        x = torch.randn(64, 24, 16)
        packed = [stash.pack(x[:, at]) for at in range(24)]
    assert len({each.block for each in packed}) == 1
    assert torch.equal(stash.unpack(packed[5]), x[:, 5])
    x[:, 7] = 0
    with pytest.raises(InplaceError, match="modified by an inplace operation"):
        stash.unpack(packed[5])
    stash.close()
