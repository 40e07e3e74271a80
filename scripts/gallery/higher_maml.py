"""higher: MAML, which differentiates through the steps of an inner optimizer."""

import common
import higher
import torch
from torch import nn

torch.manual_seed(0)


def block(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs, track_running_stats=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


model = nn.Sequential(
    block(1, 64), block(64, 64), block(64, 64), nn.Flatten(), nn.Linear(64 * 9, 5)
)
inner = torch.optim.SGD(model.parameters(), lr=0.1)
tasks = [(torch.randn(25, 1, 28, 28), torch.randint(0, 5, (25,))) for _ in range(4)]


def loss():
    total = torch.zeros(())
    for x, y in tasks:
        with higher.innerloop_ctx(model, inner, copy_initial_weights=False) as (fast, optimizer):
            for _ in range(3):
                optimizer.step(nn.functional.cross_entropy(fast(x), y))
            total = total + nn.functional.cross_entropy(fast(x), y)
    return total


common.train(model.parameters(), loss, steps=8)
