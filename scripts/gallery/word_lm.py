"""PyTorch's word_language_model: an LSTM with truncated backpropagation through time."""

import common
import torch
from torch import nn

training = common.Training()


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.drop = nn.Embedding(5000, 200), nn.Dropout(0.2)
        self.lstm, self.out = nn.LSTM(200, 200, 2, dropout=0.2), nn.Linear(200, 5000)

    def forward(self, ids, state):
        hidden, state = self.lstm(self.drop(self.embed(ids)), state)
        return self.out(self.drop(hidden)), state


model, state, ids = Words(), None, torch.randint(0, 5000, (401, 20))
for at in range(0, 400, 35):
    here, then = ids[at : at + 35][: len(ids) - at - 1], ids[at + 1 : at + 36]
    state = None if state is None else tuple(each.detach() for each in state)
    model.zero_grad()
    logits, state = model(here, state)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), then.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(each.grad, alpha=-1.0)
    training.step(loss)
training.end(model.parameters())
