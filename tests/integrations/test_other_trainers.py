"""The lines of docs/how-to/trainers.md for other libraries train to the same weights as without a stash."""

import importlib.util
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import backstash

ROOT = Path(__file__).resolve().parent.parent.parent
NEEDED = {
    "Accelerate": ("accelerate",),
    "skorch": ("skorch",),
    "MONAI": ("monai", "ignite"),
    "fastai": ("fastai",),
}

pytestmark = pytest.mark.filterwarnings("ignore")  # what the libraries say of each other


def lines_of(name):
    """The Python below the heading ``name`` of docs/how-to/trainers.md."""
    text = (ROOT / "docs/how-to/trainers.md").read_text(encoding="utf-8")
    found = re.search(rf"^### {name}\n.*?^```python\n(.*?)^```", text, re.M | re.S)
    assert found is not None, name
    return found[1]


class Nothing(nullcontext):
    """In place of a stash: the plain run."""

    def __init__(self, **_):
        super().__init__()

    def attach(self, module):
        return Nothing()

    def remove(self):
        pass


def make_model():
    torch.manual_seed(0)
    parts = [nn.Linear(64, 2048), nn.GELU(), nn.Dropout(0.1), nn.Linear(2048, 1)]
    return nn.Sequential(*parts)


def trained(lines):
    """Run ``lines``; the parameters of the model, and the stash."""
    made = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(512, 64, generator=made), torch.randn(512, 1, generator=made)
    model = make_model()
    names = {
        "make_model": make_model,
        "model": model,
        "inputs": inputs,
        "targets": targets,
        "loss_function": nn.functional.mse_loss,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "loader": torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(inputs, targets), batch_size=128
        ),
    }
    torch.manual_seed(2)
    exec(compile(lines, "docs/how-to/trainers.md", "exec"), names)
    return [each.detach().clone() for each in names["model"].parameters()], names["stash"]


@pytest.mark.parametrize("name", NEEDED)
def test_the_lines_in_the_page_train_to_the_same_weights(name, disk_dir, monkeypatch):
    missing = [each for each in NEEDED[name] if importlib.util.find_spec(each) is None]
    if missing:
        pytest.skip(f"needs pip install {' '.join(missing)}")
    lines = lines_of(name)
    assert '"/scratch"' in lines
    held, stash = trained(lines.replace('"/scratch"', repr(str(disk_dir))))
    stats = stash.stats()
    stash.close()
    assert stats.written_bytes > 0 and stats.read_bytes > 0 and stats.blocks == 0
    monkeypatch.setattr(backstash, "Stash", Nothing)
    plain, nothing = trained(lines)
    assert isinstance(nothing, Nothing)
    assert all(each.isfinite().all() for each in plain) and all(map(torch.equal, held, plain))
    start = list(make_model().parameters())
    assert not any(map(torch.equal, plain, start)), "it was trained"
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
