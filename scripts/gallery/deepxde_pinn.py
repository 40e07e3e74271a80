"""DeepXDE: a physics-informed network, with second derivatives by double backward."""

import os

os.environ["DDE_BACKEND"] = "pytorch"
import common
import deepxde as dde
import torch

training = common.Training()
dde.config.set_random_seed(0)


def pde(x, y):
    return dde.grad.hessian(y, x) + torch.pi**2 * torch.sin(torch.pi * x)


geometry = dde.geometry.Interval(-1, 1)
boundary = dde.icbc.DirichletBC(geometry, lambda x: 0, lambda _, on: on)
data = dde.data.PDE(geometry, pde, boundary, 20000, 2)
net = dde.nn.FNN([1] + [64] * 4 + [1], "tanh", "Glorot uniform")
model = dde.Model(data, net)


class Ends(dde.callbacks.Callback):
    def on_epoch_end(self):
        training.step(torch.tensor(0.0))


model.compile("adam", lr=1e-3, verbose=0)
model.train(iterations=30, verbose=0, callbacks=[Ends()])
training.end(net.parameters())
