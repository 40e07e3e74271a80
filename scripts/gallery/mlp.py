"""Torch alone: a perceptron and AdamW, in which little is saved."""

import common
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
x = torch.randn(1024, 256)
common.train(model.parameters(), lambda: model(x).square().mean())
