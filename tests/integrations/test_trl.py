"""Supervised fine-tuning by TRL of a LoRA of PEFT's, on a small random model: the same weights to the bit."""

import logging

import pytest
import torch

from backstash import Stash
from backstash.integrations.transformers import prepare_trainer

trl = pytest.importorskip("trl", reason="needs pip install 'backstash[test-trainers]'")
peft = pytest.importorskip("peft", reason="needs pip install 'backstash[test-trainers]'")
datasets = pytest.importorskip("datasets", reason="needs pip install 'backstash[test-trainers]'")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # what trainers say of their own arguments


def tokenizer(directory):
    """One of words, made here: nothing is downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *"abcdefgh"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def trained(directory, stash, lora):
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=16,
        max_position_embeddings=64,
    )
    trainer = trl.SFTTrainer(
        model=transformers.LlamaForCausalLM(config),
        args=trl.SFTConfig(
            output_dir=str(directory),
            max_steps=2,
            per_device_train_batch_size=2,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=datasets.Dataset.from_dict({"text": ["a b c d e f g h " * 4] * 8}),
        processing_class=tokenizer(directory),
        peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if lora else None,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    if stash is not None:
        prepare_trainer(trainer, stash)
    trainer.train()
    return trainer


@pytest.mark.parametrize("lora", [False, True])
def test_fine_tuning_comes_to_the_same_weights(tmp_path, disk_dir, lora):
    plain = trained(tmp_path / "plain", None, lora).model.state_dict()
    stash = Stash(disk=disk_dir, min_bytes=512)
    trainer = trained(tmp_path / "held", stash, lora)
    for name, each in trainer.model.state_dict().items():
        assert torch.equal(each, plain[name]), name
    assert stash.stats().written_bytes > 10_000 and stash.stats().blocks == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert any("stash/written_bytes" in logs for logs in trainer.state.log_history)
    stash.close()
