"""opacus: gradients of each sample, clipped and with noise."""

import warnings

import common
import torch
from opacus import PrivacyEngine
from torch import nn

warnings.simplefilter("ignore")
training = common.Training()
model = nn.Sequential(
    nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
    nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1),
    nn.Flatten(), nn.Linear(32 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 10),
)  # fmt: skip
data = torch.utils.data.TensorDataset(torch.randn(512, 1, 28, 28), torch.randint(0, 10, (512,)))
loader = torch.utils.data.DataLoader(data, batch_size=64)
model, optimizer, loader = PrivacyEngine().make_private(
    module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader,
    noise_multiplier=1.0, max_grad_norm=1.0, noise_generator=torch.Generator().manual_seed(0),
)  # fmt: skip
torch.manual_seed(1)
for _ in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        training.step(loss)
training.end(model.parameters())
