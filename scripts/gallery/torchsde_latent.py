"""torchsde: a stochastic differential equation, differentiated through its solver."""

import common
import torch
import torchsde
from torch import nn

torch.manual_seed(0)


class Latent(nn.Module):
    noise_type, sde_type = "diagonal", "ito"

    def __init__(self):
        super().__init__()
        self.drift = nn.Sequential(nn.Linear(16, 128), nn.Softplus(), nn.Linear(128, 16))
        self.noise = nn.Sequential(
            nn.Linear(16, 128), nn.Softplus(), nn.Linear(128, 16), nn.Sigmoid()
        )

    def f(self, t, y):
        return self.drift(y)

    def g(self, t, y):
        return self.noise(y)


sde, start, times = Latent(), torch.zeros(256, 16), torch.linspace(0, 1, 10)


def loss():
    motion = torchsde.BrownianInterval(0.0, 1.0, size=(256, 16), entropy=3)
    return torchsde.sdeint(sde, start, times, bm=motion, method="euler", dt=0.02).square().mean()


common.train(sde.parameters(), loss, steps=8)
