"""gpytorch: an exact Gaussian process of 1,000 points."""

import common
import gpytorch
import torch

torch.manual_seed(0)
x = torch.rand(1000, 4)
y = (6 * x).sin().sum(1)
likelihood = gpytorch.likelihoods.GaussianLikelihood()


class Model(gpytorch.models.ExactGP):
    def __init__(self):
        super().__init__(x, y, likelihood)
        self.mean = gpytorch.means.ConstantMean()
        self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(ard_num_dims=4))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


model = Model().train()
marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood.train(), model)
common.train(model.parameters(), lambda: -marginal(model(x), y), steps=15)
