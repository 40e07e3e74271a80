"""open_clip: a small image and text model, with its contrastive loss."""

import common
import open_clip
import torch

torch.manual_seed(0)
model = open_clip.CLIP(
    embed_dim=256,
    vision_cfg=dict(image_size=112, layers=6, width=256, head_width=64, patch_size=14),
    text_cfg=dict(context_length=77, vocab_size=8000, width=256, heads=4, layers=4),
)
loss_of = open_clip.ClipLoss()
images, texts = torch.randn(16, 3, 112, 112), torch.randint(0, 8000, (16, 77))


def loss():
    image, text, scale = model(images, texts)[:3]
    return loss_of(image, text, scale)


common.train(model.parameters(), loss)
