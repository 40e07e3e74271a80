"""Torch alone: a few wide convolutions, whose saved tensors are few and large."""

import common
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24), nn.LeakyReLU(0.2),
    nn.Conv2d(24, 24, 3, padding=1), nn.BatchNorm2d(24), nn.LeakyReLU(0.2), nn.Conv2d(24, 1, 3, padding=1),
)  # fmt: skip
x = torch.randn(48, 3, 64, 64)
common.train(model.parameters(), lambda: model(x).square().mean(), optimizer=torch.optim.Adam)
