"""lightning: a small convolutional network under its Trainer."""

import logging
import warnings

import common
import lightning as L
import torch
from torch import nn

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
training = common.Training()


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Dropout(0.25), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5),
            nn.Linear(128, 10),
        )  # fmt: skip

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, outputs, *_):
        training.step(outputs["loss"])

    def configure_optimizers(self):
        return torch.optim.Adadelta(self.parameters())


data = torch.utils.data.TensorDataset(torch.randn(768, 1, 28, 28), torch.randint(0, 10, (768,)))
net = Net()
L.Trainer(
    max_epochs=1,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
).fit(net, torch.utils.data.DataLoader(data, batch_size=64))
training.end(net.parameters())
