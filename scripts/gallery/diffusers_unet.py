"""diffusers: the noise that a 2-D U-Net predicts."""

import common
import torch
from diffusers import DDPMScheduler, UNet2DModel

torch.manual_seed(0)
model = UNet2DModel(
    sample_size=32, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 64),
    down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)  # fmt: skip
scheduler, images = DDPMScheduler(), torch.randn(8, 3, 32, 32)


def loss():
    noise, times = torch.randn_like(images), torch.randint(0, 1000, (8,))
    predicted = model(scheduler.add_noise(images, noise, times), times).sample
    return torch.nn.functional.mse_loss(predicted, noise)


common.train(model.parameters(), loss)
