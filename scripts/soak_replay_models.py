#!/usr/bin/env python
"""Train models of other libraries, small and with default settings, plainly and with their blocks recomputed.

    scripts/soak_replay_models.py          # eleven models, three steps each; a minute
    scripts/soak_replay_models.py gpt2 t5

Losses, gradients, buffers and random numbers have to be equal to the bit. Of the bytes that the blocks save,
each storage once and parameters not, it prints the part that is freed, and the same with what packing the
random numbers saves. The exit status is 1 if anything differs. Needs ``pip install '.[gallery]'``.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from backstash import Stash

os.environ["HF_HUB_OFFLINE"] = "1"
# PyPI's torchvision is built for CUDA. With a torch for the CPU its import misses these two operators.
_operators = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _operators.define(f"{_name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")

import transformers as hf  # noqa: E402  after its operators

STEPS = 3
WORDS = {"vocab_size": 500}
LAYERS = {**WORDS, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
Made = tuple[nn.Module, list[nn.Module], Any, Callable[[nn.Module, Any], Tensor]]


def words(rows: int = 2, columns: int = 128) -> Tensor:
    return torch.randint(0, 500, (rows, columns))


def language(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=x, labels=x).loss
    return loss


def gpt2() -> Made:
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**WORDS, n_embd=128, n_layer=4, n_head=4))
    return model, [*model.transformer.h], words(), language


def llama() -> Made:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**LAYERS, num_hidden_layers=4))
    return model, [*model.model.layers], words(), language


def qwen3() -> Made:
    config = hf.Qwen3Config(**LAYERS, num_hidden_layers=4, num_key_value_heads=2, head_dim=32)
    model = hf.Qwen3ForCausalLM(config)
    return model, [*model.model.layers], words(), language


def mixtral() -> Made:
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True}
    model = hf.MixtralForCausalLM(hf.MixtralConfig(**LAYERS, num_hidden_layers=3, **experts))
    return model, [*model.model.layers], words(), language


def bert() -> Made:
    model = hf.BertForMaskedLM(hf.BertConfig(**LAYERS, num_hidden_layers=4))
    return model, [*model.bert.encoder.layer], words(), language


def vit() -> Made:
    sizes = {
        each: LAYERS[each] for each in ("hidden_size", "intermediate_size", "num_attention_heads")
    }
    config = hf.ViTConfig(**sizes, num_hidden_layers=4, image_size=64, patch_size=8)
    model = hf.ViTForImageClassification(config)
    blocks = model.vit.encoder.layer if hasattr(model.vit, "encoder") else model.vit.layers
    labels = torch.zeros(4, dtype=torch.long)
    return (
        model,
        [*blocks],
        torch.randn(4, 3, 64, 64),
        lambda m, x: m(pixel_values=x, labels=labels).loss,
    )


def t5() -> Made:
    sizes = {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 3, "num_heads": 4}
    model = hf.T5ForConditionalGeneration(hf.T5Config(**WORDS, **sizes, decoder_start_token_id=0))
    return model, [*model.encoder.block, *model.decoder.block], words(), language


def whisper() -> Made:
    each = {"layers": 2, "attention_heads": 4, "ffn_dim": 256}
    sizes = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in each.items()}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    more = {"d_model": 128, "num_mel_bins": 16, "max_source_positions": 64}
    config = hf.WhisperConfig(**WORDS, **sizes, **tokens, **more, begin_suppress_tokens=None)
    model = hf.WhisperForConditionalGeneration(config)
    given = torch.randn(2, 16, 128), words(2, 32)
    blocks = [*model.model.encoder.layers, *model.model.decoder.layers]
    return model, blocks, given, lambda m, x: m(input_features=x[0], labels=x[1]).loss


def unet() -> Made:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    blocks = [*model.down_blocks, model.mid_block, *model.up_blocks]
    times = torch.tensor([3, 7])
    return model, blocks, torch.randn(2, 3, 32, 32), lambda m, x: m(x, times).sample.square().mean()


def resnet50() -> Made:
    from torchvision.models import resnet50 as made

    model = made(num_classes=10)
    stages = (model.layer1, model.layer2, model.layer3, model.layer4)
    blocks = [block for stage in stages for block in stage]
    return model, blocks, torch.randn(2, 3, 64, 64), lambda m, x: m(x).square().mean()


class Unrolled(nn.Module):
    """An LSTM cell, called for each step of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        state, found = None, []
        for each in x:
            state = self.cell(each, state)
            found.append(state[0])
        return torch.stack(found)


def lstm() -> Made:
    model = nn.Sequential(Unrolled(), Unrolled())
    return model, [*model], torch.randn(30, 32, 128), lambda m, x: m(x).square().mean()


MODELS = (gpt2, llama, qwen3, mixtral, bert, vit, t5, whisper, unet, resnet50, lstm)


def train(make: Callable[[], Made], stash: Stash | None) -> tuple[list[Tensor], int]:
    """All that a run leaves; and of a plain one, the bytes that its blocks save in a step."""
    torch.manual_seed(0)
    model, blocks, x, loss_of = make()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    found: list[Tensor] = []
    seen: dict[int, torch.UntypedStorage] = {}
    depth = [0]

    def pack(tensor: Tensor) -> Tensor:
        base = tensor if tensor._base is None else tensor._base
        if depth[0] and not isinstance(base, nn.Parameter):
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage  # held, so that no other has its address
        return tensor.detach()

    if stash is not None:
        stash.recompute(*blocks)
    else:
        for block in blocks:
            block.register_forward_pre_hook(lambda *_: depth.__setitem__(0, depth[0] + 1))
            block.register_forward_hook(lambda *_: depth.__setitem__(0, depth[0] - 1))
    for step in range(STEPS):
        torch.manual_seed(step)
        seen.clear()
        if stash is not None:
            loss = loss_of(model, x)
        else:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = loss_of(model, x)
        loss.backward()
        found += [loss.detach(), torch.rand(2), *(each.clone() for each in model.buffers())]
        found += [each.grad.clone() for each in model.parameters() if each.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found, sum(each.nbytes() for each in seen.values())


def main() -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    wrong = False
    print("model        equal  MiB saved  let go  with packed random numbers")
    for make in MODELS:
        if sys.argv[1:] and make.__name__ not in sys.argv[1:]:
            continue
        want, saved = train(make, None)
        stash = Stash()
        found, _ = train(make, stash)
        is_equal = len(found) == len(want) and all(map(torch.equal, found, want))
        wrong = wrong or not is_equal
        stats = stash.stats()
        gone = stats.recomputed_bytes / STEPS
        packed = (stats.packed_bytes - stats.payload_bytes) / STEPS
        shares = f"{min(1, gone / saved):6.0%}  {min(1, (gone + packed) / saved):6.0%}"
        print(
            f"{make.__name__:12} {'yes' if is_equal else 'NO':>5}  {saved / 2**20:9.1f}  {shares}"
        )
    return wrong


if __name__ == "__main__":
    sys.exit(main())
