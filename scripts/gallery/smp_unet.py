"""segmentation_models_pytorch: Unet++ with a ResNet-18 encoder."""

import common
import segmentation_models_pytorch as smp
import torch

torch.manual_seed(0)
model = smp.UnetPlusPlus("resnet18", encoder_weights=None, classes=3).train()
x, y = torch.randn(4, 3, 128, 128), torch.randint(0, 3, (4, 128, 128))
common.train(model.parameters(), lambda: torch.nn.functional.cross_entropy(model(x), y), steps=10)
