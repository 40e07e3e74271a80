"""torch_geometric: graph attention on a random graph."""

import common
import torch
from torch_geometric.nn import GATConv

torch.manual_seed(0)
x, edges, y = (
    torch.randn(2000, 64),
    torch.randint(0, 2000, (2, 16000)),
    torch.randint(0, 7, (2000,)),
)
layers = torch.nn.ModuleList(
    [GATConv(64, 16, heads=8), GATConv(128, 16, heads=8), GATConv(128, 7, heads=4, concat=False)]
)


def loss():
    hidden = x
    for layer in layers:
        hidden = torch.nn.functional.elu(layer(hidden, edges))
    return torch.nn.functional.cross_entropy(hidden, y)


common.train(layers.parameters(), loss, steps=15)
