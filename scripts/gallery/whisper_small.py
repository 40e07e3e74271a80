"""transformers: a small Whisper, an encoder of audio and a decoder of text."""

import common
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

torch.manual_seed(0)
config = WhisperConfig(
    vocab_size=2000, d_model=192, encoder_layers=4, decoder_layers=4, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=768, decoder_ffn_dim=768, max_source_positions=150,
    max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
)  # fmt: skip
model = WhisperForConditionalGeneration(config).train()
audio, labels = torch.randn(16, 80, 300), torch.randint(3, 2000, (16, 48))
common.train(model.parameters(), lambda: model(input_features=audio, labels=labels).loss)
