"""MONAI: a 3-D U-Net with the Dice loss."""

import common
import torch
from monai.losses import DiceLoss
from monai.networks.nets import UNet

torch.manual_seed(0)
model = UNet(3, 1, 2, channels=(16, 32, 64), strides=(2, 2), num_res_units=2)
loss_of = DiceLoss(to_onehot_y=True, softmax=True)
x, y = torch.randn(2, 1, 48, 48, 48), torch.randint(0, 2, (2, 1, 48, 48, 48)).float()
common.train(model.parameters(), lambda: loss_of(model(x), y), steps=10)
