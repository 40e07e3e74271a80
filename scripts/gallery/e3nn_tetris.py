"""e3nn: equivariant tensor products on small point clouds."""

import common
import torch
from e3nn import o3
from e3nn.nn import Gate

torch.manual_seed(0)
positions = torch.randn(64, 8, 3)
edges = positions[:, :, None] - positions[:, None]
harmonics = o3.spherical_harmonics("0e + 1o + 2e", edges, normalize=True, normalization="component")
gate = Gate("16x0e", [torch.relu], "8x0e", [torch.sigmoid], "8x1o")
first = o3.FullyConnectedTensorProduct("0e + 1o + 2e", "4x0e", gate.irreps_in)
second = o3.FullyConnectedTensorProduct(gate.irreps_out, "0e + 1o + 2e", "8x0e")
node = torch.ones(64, 8, 8, 4)


def loss():
    hidden = gate(first(harmonics, node)).mean(2, keepdim=True).expand(-1, -1, 8, -1)
    return second(hidden, harmonics).mean((1, 2)).square().mean()


common.train([*first.parameters(), *second.parameters()], loss, steps=20)
