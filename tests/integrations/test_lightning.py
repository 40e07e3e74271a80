"""Lightning's own Trainer under a stash: the same weights to the bit, and nothing left behind."""

import logging

import pytest
import torch
from torch import nn

from backstash import Stash
from backstash.integrations.lightning import StashCallback

try:
    import lightning.pytorch as pl
    from lightning.fabric import Fabric
except ImportError:
    pl = None

pytestmark = [
    pytest.mark.skipif(pl is None, reason="needs pip install 'backstash[lightning]'"),
    pytest.mark.filterwarnings("ignore"),  # what Lightning says of its own arguments
]


def hook_pair():
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )


def batches():
    made = torch.Generator().manual_seed(1)
    return torch.utils.data.DataLoader(torch.randn(32, 32, generator=made), batch_size=8)


if pl is not None:

    class Plain(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.network, self.held = network(), []

        def training_step(self, batch, index):
            self.held.append(hook_pair() is not None)
            loss = self.network(batch).square().mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, index):
            assert hook_pair() is None
            self.network(batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class ByHand(Plain):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, index):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, index))
            optimizer.step()

    class Stopped(Plain):
        error = ValueError

        def training_step(self, batch, index):
            if index == 2:
                raise self.error
            return super().training_step(batch, index)

    class Recorded(pl.loggers.logger.DummyLogger):
        def __init__(self):
            super().__init__()
            self.metrics = []

        def log_metrics(self, metrics, step=None):
            self.metrics.append(dict(metrics))


def fit(module, directory, callbacks=(), **options):
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    trainer = pl.Trainer(
        **{
            "max_epochs": 2,
            "accelerator": "cpu",
            "devices": 1,
            "callbacks": list(callbacks),
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": directory,
            "log_every_n_steps": 1,
            **options,
        }
    )
    trainer.fit(module, batches(), batches())
    return trainer


@pytest.mark.parametrize("kind", ["Plain", "ByHand"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_trainer_comes_to_the_same_weights(tmp_path, disk_dir, kind, precision):
    plain, held = globals()[kind](), globals()[kind]()
    fit(plain, tmp_path, precision=precision)
    stash, recorded = Stash(disk=disk_dir, min_bytes=512), Recorded()
    trainer = fit(held, tmp_path, [StashCallback(stash)], precision=precision, logger=recorded)
    for (name, one), two in zip(plain.named_parameters(), held.parameters(), strict=True):
        assert torch.equal(one, two), name
    assert plain.held == [False] * 8 and held.held == [True] * 8
    assert hook_pair() is None and "train_step_context" not in vars(trainer.precision_plugin)
    figures = [
        each["stash/written_bytes"] for each in recorded.metrics if "stash/written_bytes" in each
    ]
    assert len(figures) == 8 and figures[-1] > figures[0] > 0
    assert stash.stats().blocks == 0
    stash.close()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_puts_the_context_back(tmp_path, disk_dir, error):
    stash, module = Stash(disk=disk_dir, min_bytes=512), Stopped()
    module.error = error
    plugin = pl.plugins.MixedPrecision("bf16-mixed", "cpu")
    with pytest.raises((error, SystemExit)):
        fit(module, tmp_path, [StashCallback(stash)], plugins=[plugin])
    assert hook_pair() is None and "train_step_context" not in vars(plugin)
    stash.close()


def test_fabric_needs_no_more_than_the_context(disk_dir):
    found = []
    for stash in (None, Stash(disk=disk_dir, min_bytes=512)):
        fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
        model = network()
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in batches():
            optimizer.zero_grad()
            if stash is None:
                loss = model(batch).square().mean()
            else:
                with stash:
                    loss = model(batch).square().mean()
            fabric.backward(loss)
            optimizer.step()
        found.append([each.detach().clone() for each in model.parameters()])
    assert all(map(torch.equal, *found))
    assert stash.stats().written_bytes > 0
    stash.close()


def test_without_the_library_the_install_line_is_said(monkeypatch):
    from backstash.integrations import lightning as ours

    monkeypatch.setattr(ours, "Callback", object)
    with pytest.raises(ImportError, match=r"pip install 'backstash\[lightning\]'"):
        StashCallback(Stash())
