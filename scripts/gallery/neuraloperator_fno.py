"""neuraloperator: a Fourier neural operator."""

import common
import torch
from neuralop.models import FNO

torch.manual_seed(0)
model = FNO(n_modes=(12, 12), hidden_channels=32, in_channels=1, out_channels=1, n_layers=4)
x, y = torch.randn(8, 1, 64, 64), torch.randn(8, 1, 64, 64)
common.train(model.parameters(), lambda: (model(x) - y).square().mean())
