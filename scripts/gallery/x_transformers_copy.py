"""x-transformers: an encoder and a decoder that learn to copy."""

import common
import torch
from x_transformers import XTransformer

torch.manual_seed(0)
model = XTransformer(
    dim=256, enc_num_tokens=258, enc_depth=3, enc_heads=8, enc_max_seq_len=64,
    dec_num_tokens=258, dec_depth=3, dec_heads=8, dec_max_seq_len=130, tie_token_emb=True,
)  # fmt: skip
source = torch.randint(2, 258, (16, 64))
target = torch.cat([torch.ones(16, 1, dtype=torch.long), source, source], 1)
mask = torch.ones(16, 64, dtype=torch.bool)
common.train(model.parameters(), lambda: model(source, target, mask=mask), steps=8)
