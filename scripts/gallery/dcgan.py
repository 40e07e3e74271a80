"""PyTorch's dcgan in small: a generator and a discriminator in turn."""

import common
import torch
from torch import nn

training = common.Training()


def up(inputs, outputs, stride=2, padding=1):
    return [
        nn.ConvTranspose2d(inputs, outputs, 4, stride, padding, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(True),
    ]


def down(inputs, outputs):
    return [
        nn.Conv2d(inputs, outputs, 4, 2, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.LeakyReLU(0.2, True),
    ]


generator = nn.Sequential(
    *up(100, 256, 1, 0),
    *up(256, 128),
    *up(128, 64),
    *up(64, 32),
    nn.ConvTranspose2d(32, 3, 4, 2, 1),
    nn.Tanh(),
)
critic = nn.Sequential(
    nn.Conv2d(3, 32, 4, 2, 1), nn.LeakyReLU(0.2, True), *down(32, 64), *down(64, 128), *down(128, 256),
    nn.Conv2d(256, 1, 4), nn.Flatten(),
)  # fmt: skip
optim_g, optim_c = (torch.optim.Adam(each.parameters(), lr=2e-4) for each in (generator, critic))
real, loss_of = torch.rand(32, 3, 64, 64), nn.BCEWithLogitsLoss()
ones, zeros = torch.ones(32, 1), torch.zeros(32, 1)
for _ in range(12):
    critic.zero_grad()
    loss_of(critic(real), ones).backward()
    fake = generator(torch.randn(32, 100, 1, 1))
    loss_of(critic(fake.detach()), zeros).backward()
    optim_c.step()
    generator.zero_grad()
    loss = loss_of(critic(fake), ones)
    loss.backward()
    optim_g.step()
    training.step(loss)
training.end([*generator.parameters(), *critic.parameters()])
