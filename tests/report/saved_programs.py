"""Programs whose saves are known in two ways: by the report, and by the plain graph that they leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from backstash import Stash, graph
from backstash.report import SavedReport, saved_report


class Net(nn.Module):
    """Convolutions, norms, pooling, dropout, a layer called twice, slices, an expanded and a casted tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.pool = nn.MaxPool2d(2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3))
        self.shared = nn.Linear(64, 64)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("scale", torch.rand(64))

    def forward(self, x: Tensor) -> Tensor:
        """``x``: batch x 3 x 16 x 16."""
        x = self.pool(self.stem(x)).flatten(2)
        for block in self.blocks:
            x = x + block(x)
        a, b = (self.shared(self.shared(x)) * self.scale).chunk(2, -1)
        x = self.dropout((a * b.sigmoid()).float())
        return x.softmax(-1) * x.exp().expand_as(x)


def program() -> tuple[Net, Callable[[], Tensor]]:
    """A model, and a forward of it that gives the same each time."""
    torch.manual_seed(0)
    model, x, y = Net(), torch.randn(4, 3, 16, 16), torch.randint(32, (4, 8))

    def forward() -> Tensor:
        torch.manual_seed(1)
        return nn.functional.cross_entropy(model(x).transpose(1, 2), y)

    return model, forward


def saved_plainly(outputs: Any, owned: nn.Module | None = None) -> tuple[int, int, int]:
    """Of a graph without hooks: bytes saved; of their storages, each once, not ``owned``'s; how many saves."""
    own = set()
    if owned is not None:
        tensors = [*owned.parameters(), *owned.buffers()]
        own = {tensor.untyped_storage()._cdata for tensor in tensors}
    total, count, storages = 0, 0, {}
    for node in graph.iter_graph(outputs):
        for tensor in _saved_tensors(node):
            total, count = total + tensor.nbytes, count + 1
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                storages[storage._cdata] = storage
    return total, sum(each.nbytes() for each in storages.values()), count


def _saved_tensors(node: Any) -> Iterator[Tensor]:
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            raw = getattr(node, name)
            for each in raw if isinstance(raw, (tuple, list)) else (raw,):
                if each.data is not None:
                    yield each.data


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    """Backward's, taken off the model."""
    loss.backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def _clone() -> AbstractContextManager[Any]:
    return saved_tensors_hooks(lambda t: t.clone(), lambda t: t)


def _numpy() -> AbstractContextManager[Any]:
    return saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy)


@contextmanager
def _composed() -> Iterator[None]:
    with graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        with graph.saved_tensors_hooks(lambda t: [t.clone()], lambda t: t[0], compose=True):
            yield


@contextmanager
def _disk(directory: Path) -> Iterator[Stash]:
    stash = Stash(disk=directory, min_bytes=0)
    with stash:
        yield stash
    stash.stats()


def pairs(directory: Path) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """Hook pairs of all makes, by name."""
    return {
        "none": nullcontext,
        "disk": lambda: _disk(directory),
        "keep": lambda: Stash(),
        "save_on_cpu": save_on_cpu,
        "our save_on_cpu": graph.save_on_cpu,
        "clone": _clone,
        "numpy": _numpy,
        "composed": _composed,
        "only": lambda: graph.only(lambda t: t.numel() > 100),
        "skip": graph.skip,
        "mutation": graph.allow_mutation_on_saved_tensors,
        "report": saved_report,
    }


PAIRS = list(pairs(Path()))


def figures(saved: SavedReport) -> list[tuple[str, int | None, int, int, int]]:
    """What must not depend on the pair."""
    rows = sorted(saved.rows, key=lambda row: row.module)
    return [(r.module, r.calls, r.saves, r.saved_bytes, r.unique_bytes) for r in rows]
