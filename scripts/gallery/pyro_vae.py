"""pyro: stochastic variational inference of a variational autoencoder."""

import common
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from torch import nn

training = common.Training()
pyro.set_rng_seed(0)
encoder = nn.Sequential(nn.Linear(784, 400), nn.Softplus(), nn.Linear(400, 100))
decoder = nn.Sequential(nn.Linear(50, 400), nn.Softplus(), nn.Linear(400, 784), nn.Sigmoid())


def model(x):
    pyro.module("decoder", decoder)
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(torch.zeros(len(x), 50), 1.0).to_event(1))
        pyro.sample("x", dist.Bernoulli(decoder(z), validate_args=False).to_event(1), obs=x)


def guide(x):
    pyro.module("encoder", encoder)
    with pyro.plate("data", len(x)):
        mean, scale = encoder(x).chunk(2, -1)
        pyro.sample("z", dist.Normal(mean, scale.exp()).to_event(1))


x = torch.rand(512, 784)
svi = SVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), loss=Trace_ELBO())
for _ in range(30):
    training.step(torch.tensor(svi.step(x)))
training.end([*encoder.parameters(), *decoder.parameters()])
