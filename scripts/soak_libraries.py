#!/usr/bin/env python
"""Programs that are not stacks of layers, by libraries that no one here wrote, with and without a stash.

    scripts/soak_libraries.py                # all of them; one whose library is missing says so
    scripts/soak_libraries.py --only gan

The loss and every gradient must agree to the bit. Needs
``pip install torchdiffeq gpytorch torch_geometric peft transformers``.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from soak_models import MIXES, build, same_bits

Program = tuple[list[Tensor], Callable[[], Tensor]]
"""What gradients are for, and what gives the loss."""


class Field(nn.Module):
    """The right side of an ordinary differential equation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y)


def odeint() -> Program:
    """torchdiffeq, differentiated through its solver and by the adjoint."""
    import torchdiffeq

    field, start, times = Field(), torch.randn(50, 4), torch.linspace(0, 1, 5)

    def loss() -> Tensor:
        through = torchdiffeq.odeint(field, start, times)
        adjoint = torchdiffeq.odeint_adjoint(field, start, times, method="rk4")
        return through.square().sum() + adjoint.square().sum()

    return list(field.parameters()), loss


def gaussian_process() -> Program:
    """gpytorch: an exact marginal likelihood, with its own autograd Functions."""
    import gpytorch

    x = torch.linspace(0, 1, 60)
    y = torch.sin(6 * x)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()

    class Model(gpytorch.models.ExactGP):
        def __init__(self) -> None:
            super().__init__(x, y, likelihood)
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    model = Model().train()
    likelihood.train()
    marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    return list(model.parameters()), lambda: -marginal(model(x), y)


def graph_network() -> Program:
    """torch_geometric: three kinds of convolution on a random graph."""
    from torch_geometric.nn import GATConv, GCNConv, SAGEConv

    x, edges = torch.randn(100, 16), torch.randint(0, 100, (2, 600))
    layers = nn.ModuleList([GCNConv(16, 32), GATConv(32, 16, heads=2), SAGEConv(32, 8)])

    def loss() -> Tensor:
        h = x
        for layer in layers:
            h = layer(h, edges).relu()
        return h.square().mean()

    return list(layers.parameters()), loss


def gan() -> Program:
    """A critic with a gradient penalty: double backward."""
    critic = nn.Sequential(nn.Linear(20, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    x = torch.randn(64, 20, requires_grad=True)

    def loss() -> Tensor:
        score = critic(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()

    return list(critic.parameters()), loss


def forces() -> Program:
    """Forces from energies, fitted to targets: double backward through distances."""
    net = nn.Sequential(nn.Linear(1, 32), nn.SiLU(), nn.Linear(32, 1))
    positions, target = torch.randn(20, 3, requires_grad=True), torch.randn(20, 3)
    one, other = torch.triu_indices(20, 20, 1)

    def loss() -> Tensor:
        distances = (positions[one] - positions[other]).norm(dim=1, keepdim=True)
        energy = net(distances).sum()
        (slope,) = torch.autograd.grad(energy, positions, create_graph=True)
        return (-slope - target).square().mean() + energy.square()

    return list(net.parameters()), loss


def lora() -> Program:
    """peft: low-rank adapters on a small Llama, dropout on."""
    from peft import LoraConfig, get_peft_model

    model, batch = build("llama")
    config = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    adapted = get_peft_model(model, config).train()
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    return trained, lambda: adapted(**batch).loss


def lstm() -> Program:
    """A recurrent network with dropout between its layers."""
    net, x = nn.LSTM(16, 32, 2, dropout=0.2, batch_first=True), torch.randn(8, 20, 16)
    return list(net.parameters()), lambda: net(x)[0].square().mean()


PROGRAMS: dict[str, Callable[[], Program]] = {
    made.__name__: made
    for made in (odeint, gaussian_process, graph_network, gan, forces, lora, lstm)
}


def gradients(
    make: Callable[[], Program], hold: AbstractContextManager[Any]
) -> list[Tensor | None]:
    """The loss and the gradients, the same random numbers each time."""
    torch.manual_seed(0)
    tensors, loss_of = make()
    torch.manual_seed(1)
    with hold:
        loss = loss_of()
    return [loss.detach(), *torch.autograd.grad(loss, tensors, allow_unused=True)]


def difference(name: str, directory: str) -> str:
    """What a stash changes: ``""`` for nothing, else in words."""
    make = PROGRAMS[name]
    true, again = gradients(make, nullcontext()), gradients(make, nullcontext())
    if not all(map(same_bits, true, again)):
        return "plain does not repeat"
    for mix, made in MIXES.items():
        stash: Any = made(directory)
        try:
            if not all(map(same_bits, gradients(make, stash), true)):
                return f"{mix}: differs"
            if mix == "disk" and stash.stats().written_bytes == 0:
                return f"{mix}: nothing moved"
        finally:
            stash.close()
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="REGEX", help="programs that match")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    failed = 0
    with tempfile.TemporaryDirectory() as directory:
        for name in (name for name in PROGRAMS if re.search(options.only, name)):
            try:
                found = difference(name, directory)
            except ImportError as error:
                found = f"skipped: {error}"
            failed += bool(found) and not found.startswith("skipped")
            print(f"{name:18} {found or 'equal'}", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
