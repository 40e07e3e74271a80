#!/usr/bin/env python
"""Models that no one here wrote, from ``transformers``, at tiny sizes: a step with and without a stash.

    scripts/soak_models.py                       # every architecture below, in every mix of tiers
    scripts/soak_models.py --only 'bert|llama'   # those whose name matches
    scripts/soak_models.py --mixes disk          # one mix

Weights and inputs are random with a fixed seed and dropout stays on. The loss and every parameter's gradient
must agree to the bit. A model whose plain run does not repeat says nothing and is counted as such. Needs
``pip install 'backstash[test-models]'``.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backstash import Action, Stash
from backstash.testing import TwinDevice, stash_on

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from oracle import same_bits
from packers import ANYTHING

TEXT = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**TEXT, "intermediate_size": 64, "max_position_embeddings": 64}
GQA = {**WIDE, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MOE = {**GQA, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
IMAGE = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2}
PICTURE = {**IMAGE, "num_attention_heads": 4, "intermediate_size": 64, "num_labels": 5}
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
SEQ2SEQ = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}

# Class names as transformers has them: "<name>Config" and what is trained, with the configuration.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertConfig", "BertForMaskedLM", WIDE),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", WIDE),
    "electra": ("ElectraConfig", "ElectraForMaskedLM", {**WIDE, "embedding_size": 32}),
    "albert": ("AlbertConfig", "AlbertForMaskedLM", {**WIDE, "embedding_size": 16}),
    "mpnet": ("MPNetConfig", "MPNetForMaskedLM", WIDE),
    "deberta-v2": ("DebertaV2Config", "DebertaV2ForMaskedLM", WIDE),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    ),
    "modernbert": ("ModernBertConfig", "ModernBertForMaskedLM", {**WIDE, "pad_token_id": 0}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", {**GPT, "rotary_dim": 4}),
    "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", WIDE),
    "opt": ("OPTConfig", "OPTForCausalLM", {**WIDE, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "bloom": (
        "BloomConfig",
        "BloomForCausalLM",
        {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", GQA),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**GQA, "sliding_window": 8}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", MOE),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", GQA),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**GQA, "head_dim": 8}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**GQA, "head_dim": 8}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**GQA, "head_dim": 8}),
    "phi": ("PhiConfig", "PhiForCausalLM", GQA),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", GQA),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", GQA),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", GQA),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", GQA),
    "cohere": ("CohereConfig", "CohereForCausalLM", GQA),
    "mamba": ("MambaConfig", "MambaForCausalLM", {**TEXT, "state_size": 4, "conv_kernel": 4}),
    "rwkv": ("RwkvConfig", "RwkvForCausalLM", {**TEXT, "attention_hidden_size": 32}),
    "t5": ("T5Config", "T5ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}),
    "bart": ("BartConfig", "BartForConditionalGeneration", SEQ2SEQ),
    "marian": ("MarianConfig", "MarianMTModel", {**SEQ2SEQ, "decoder_vocab_size": 64}),
    "pegasus": ("PegasusConfig", "PegasusForConditionalGeneration", SEQ2SEQ),
    "vit": ("ViTConfig", "ViTForImageClassification", PICTURE),
    "deit": ("DeiTConfig", "DeiTForImageClassification", PICTURE),
    "beit": ("BeitConfig", "BeitForImageClassification", PICTURE),
    "dinov2": ("Dinov2Config", "Dinov2ForImageClassification", PICTURE),
    "convnext": (
        "ConvNextConfig",
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 5},
    ),
    "resnet": (
        "ResNetConfig",
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": 5},
    ),
    "swin": (
        "SwinConfig",
        "SwinForImageClassification",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [2, 4],
            "window_size": 4,
            "num_labels": 5,
        },
    ),
}

Mix = Callable[[str], AbstractContextManager[Any]]
MIXES: dict[str, Mix] = {
    "disk": lambda where: Stash(disk=where, min_bytes=0, inflight=0),
    "keep and disk": lambda where: Stash(keep="64KiB", disk=where, min_bytes=64, inflight="32KiB"),
    "packed": lambda where: Stash(
        policy=lambda saved: Action("pack", ANYTHING), keep="16KiB", disk=where, min_bytes=0
    ),
    "recomputed": lambda where: Stash(
        policy=lambda saved: Action("recompute"), keep="16KiB", disk=where, min_bytes=0
    ),
    "accelerator": lambda where: stash_on(
        TwinDevice(chance=0.3), host="1MiB", disk=where, min_bytes=0, inflight="64KiB"
    ),
}


def build(name: str) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """A model in training and one batch for it; always the same."""
    import transformers

    config_name, model_name, options = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**options)
    model: torch.nn.Module = getattr(transformers, model_name)(config).train()
    if "Image" in model_name:
        return model, {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([1, 3])}
    tokens = torch.randint(3, 60, (2, 16))
    return model, {"input_ids": tokens, "labels": tokens.clone()}


def step(
    model: torch.nn.Module, batch: dict[str, Tensor], hold: AbstractContextManager[Any]
) -> list[Tensor]:
    """The loss and the gradients of one step, the same random numbers each time."""
    torch.manual_seed(1)
    model.zero_grad()
    with hold:
        loss = model(**batch).loss
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [loss.detach(), *(grad.clone() for grad in grads)]


def difference(name: str, mixes: list[str], directory: str) -> str:
    """What a stash changes in a model's step: ``""`` for nothing, else in words."""
    model, batch = build(name)
    true, again = (step(model, batch, nullcontext()) for _ in range(2))
    if not all(map(same_bits, true, again)):
        return "plain does not repeat"
    for mix in mixes:
        stash: Any = MIXES[mix](directory)
        try:
            mine = step(model, batch, stash)
            if stash.stats().written_bytes == 0:
                return f"{mix}: nothing moved"
        finally:
            stash.close()
        if len(mine) != len(true) or not all(map(same_bits, mine, true)):
            return f"{mix}: differs"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="REGEX", help="architectures that match")
    parser.add_argument("--mixes", default=",".join(MIXES), help="comma-separated; default all")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        for name in (name for name in MODELS if re.search(options.only, name)):
            try:
                found = difference(name, options.mixes.split(","), directory)
            except Exception as error:
                found = (
                    f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                )
            counts["equal" if not found else "different"] += 1
            print(f"{name:14} {found or 'equal'}", flush=True)
    print(f"{dict(counts)} in {time.perf_counter() - started:.0f} s")
    return int(bool(counts["different"]))


if __name__ == "__main__":
    sys.exit(main())
