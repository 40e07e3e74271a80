"""PyTorch's time_sequence_prediction in small: LSTM cells unrolled over time, by L-BFGS."""

import common
import torch
from torch import nn

training = common.Training()
x = torch.sin(torch.arange(400.0)[None] / 20 + torch.rand(64, 1) * 10).double()


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.LSTMCell(1, 51), nn.LSTMCell(51, 51)
        self.out = nn.Linear(51, 1)

    def forward(self, x):
        h1, c1, h2, c2 = (torch.zeros(len(x), 51, dtype=torch.double) for _ in range(4))
        outputs = []
        for value in x.split(1, 1):
            h1, c1 = self.one(value, (h1, c1))
            h2, c2 = self.two(h1, (h2, c2))
            outputs.append(self.out(h2))
        return torch.cat(outputs, 1)


model = Sequence().double()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=4)


def closure():
    optimizer.zero_grad()
    loss = (model(x[:, :-1]) - x[:, 1:]).square().mean()
    loss.backward()
    return loss


for _ in range(4):
    training.step(optimizer.step(closure))
training.end(model.parameters())
