"""torchdiffeq: a neural ordinary differential equation, and by its adjoint."""

import common
import torch
import torchdiffeq
from torch import nn

torch.manual_seed(0)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 128), nn.Tanh(), nn.Linear(128, 8))

    def forward(self, t, y):
        return self.net(y)


field, start, times = Field(), torch.randn(512, 8), torch.linspace(0, 2, 10)


def loss():
    through = torchdiffeq.odeint(field, start, times, method="rk4", options={"step_size": 0.05})
    adjoint = torchdiffeq.odeint_adjoint(field, start, times, method="rk4")
    return through.square().mean() + adjoint.square().mean()


common.train(field.parameters(), loss, steps=8)
