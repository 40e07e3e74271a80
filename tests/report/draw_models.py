"""Models and graphs that are drawn in tests."""

import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["HOSTILE", "Gpt", "chain", "random_graph"]

HOSTILE = '"]; evil [label="x"\\N\\n&beta;<script>alert(1)</script>\n\u202e\x00{|}%s\ud800--><b>'


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Gpt(nn.Module):
    """Residual blocks between a table and a head that share their weight."""

    def __init__(self, blocks: int = 6, width: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(10, width)
        self.place = nn.Parameter(torch.zeros(4, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.table.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.table(text) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self) -> Tensor:
        """On a text that is always the same."""
        text = torch.arange(8).view(2, 4)
        return F.cross_entropy(self(text).flatten(0, 1), text.flatten())


def chain(nodes: int, *, alike: bool = False) -> Tensor:
    """A graph of as many nodes in a row; two kinds of them without a pattern, unless ``alike``."""
    chance = random.Random(5)
    y = torch.ones(2, requires_grad=True)
    for _ in range(nodes):
        y = y + 1 if alike or chance.random() < 0.5 else y.exp()
    return y


def random_graph(seed: int, nodes: int = 60) -> list[Tensor]:
    """Outputs of a graph of operations with one to three inputs, and with several outputs."""
    chance = random.Random(seed)
    made = [torch.ones(4, requires_grad=True) for _ in range(3)]
    for _ in range(nodes):
        # Mostly what was made last, so that the graph is deep.
        a, b, c = (made[-1 - min(int(chance.expovariate(0.3)), len(made) - 1)] for _ in range(3))
        kind = chance.randrange(6)
        if kind == 0:
            made.append(a.sin())
        elif kind == 1:
            made.append(a * b)
        elif kind == 2:
            made.append(torch.addcmul(a, b, c))
        elif kind == 3:
            made += [half.repeat(2) for half in a.chunk(2)]
        elif kind == 4:
            made.append(torch.stack([a, b, a]).sum(0))
        else:
            made.append(a + 1)
    return [made[-1], made[len(made) // 2]]
