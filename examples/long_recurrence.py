"""Train a recurrent network through a very long sequence, all of it, within a few megabytes.

The network is shown one number at the start of a sequence of noise and has to name it at the end, so that
truncated backpropagation cannot learn it.

    python examples/long_recurrence.py [--tiny] [--length N] [--steps N]
"""

import argparse
import time

import torch
from torch import Tensor, nn

from backstash.graph import checkpoint_loop

BATCH, WIDTH = 16, 32


class Cell(nn.Module):
    """A gated cell that begins by keeping nearly all of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.new = nn.Linear(WIDTH + 1, WIDTH), nn.Linear(WIDTH + 1, WIDTH)
        nn.init.constant_(self.gate.bias, -6.0)

    def forward(self, state: Tensor, x: Tensor) -> Tensor:
        both = torch.cat([state, x[:, None]], 1)
        gate = torch.sigmoid(self.gate(both) + 9 * x.abs()[:, None].gt(2))
        return state + gate * (torch.tanh(self.new(both)) - state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a short sequence, few steps")
    parser.add_argument("--length", type=int, default=None)
    parser.add_argument("--steps", type=int, default=None)
    given = parser.parse_args()
    length = given.length or (100 if given.tiny else 5_000)
    torch.manual_seed(0)
    cell, head = Cell(), nn.Linear(WIDTH, 1)
    optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()], lr=0.01)
    for number in range(given.steps or (4 if given.tiny else 20)):
        begun = time.perf_counter()
        xs = torch.randn(length, BATCH) * 0.1
        wanted = torch.randint(0, 2, (BATCH,)).float()
        xs[0] = wanted * 6 - 3
        state = checkpoint_loop(cell, torch.zeros(BATCH, WIDTH), None, xs=xs, memory="1MiB")
        found = head(state)[:, 0]
        loss = nn.functional.binary_cross_entropy_with_logits(found, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {number} loss {loss.item()} {time.perf_counter() - begun:.2f} s")


if __name__ == "__main__":
    main()
