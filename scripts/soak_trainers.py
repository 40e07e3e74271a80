#!/usr/bin/env python
"""Training loops that no one here wrote: a script of each, plainly and under backstash, to the same weights.

    scripts/soak_trainers.py                       # every script below, in every way
    scripts/soak_trainers.py --only 'sft|trainer'  # those whose name matches

The ways: ``backstash run``; ``stash.attach(model)`` in the script; and in two processes of ``torchrun``,
plainly and with ``backstash run`` in each. Weights after a few steps of a small model must agree to the bit,
and something must have moved. Needs ``pip install 'backstash[soak]'``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

# Before each script. The import of backstash is for the plain runs: PyTorch's own first calls on the CPU
# differ at times (_first_calls.py).
BEGIN = """
import hashlib, os, sys, warnings
import torch, backstash
warnings.simplefilter("ignore")

def attach(model):
    if "attach" in sys.argv:
        stash = backstash.Stash(disk=".", min_bytes="4KiB")
        stash.attach(model)
        return stash

def report(model, stash=None):
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().float().numpy().tobytes())
    moved = stash.stats().written_bytes if stash is not None else 0
    # In one piece, and on a line of its own: two processes write here.
    os.write(1, f"\\nweights {digest.hexdigest()[:16]} {moved}\\n".encode())
"""
LLAMA = """
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
set_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
    num_attention_heads=8, num_key_value_heads=4, attention_dropout=0.1,
))

class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        ids = torch.randint(0, 512, (128,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}
"""
TRAINER = (
    LLAMA
    + """
from transformers import Trainer, TrainingArguments
arguments = TrainingArguments(
    "out", max_steps=3, per_device_train_batch_size=4, report_to=[], use_cpu=True, save_strategy="no",
    disable_tqdm=True, logging_strategy="no", OPTIONS,
)
stash = attach(model)
Trainer(model, arguments, train_dataset=Texts()).train()
report(model, stash)
"""
)
SCRIPTS = {
    "trainer": TRAINER.replace("OPTIONS", "gradient_accumulation_steps=2"),
    "trainer, checkpointing, bf16, two loaders": TRAINER.replace(
        "OPTIONS", "gradient_checkpointing=True, bf16=True, dataloader_num_workers=2"
    ),
    "accelerate": LLAMA
    + """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
stash = attach(model)
trained, optimizer, loader = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters(), 1e-3), torch.utils.data.DataLoader(Texts(), 4)
)
for batch, _ in zip(loader, range(4)):
    with accelerator.accumulate(trained):
        accelerator.backward(trained(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
report(model, stash)
""",
    "sft": LLAMA
    + """
import random
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer
words = {f"w{index}": index for index in range(500)} | {"<pad>": 500, "<eos>": 501, "<unk>": 502}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
draw = random.Random(0)
texts = [" ".join(f"w{draw.randrange(500)}" for _ in range(100)) for _ in range(32)]
arguments = SFTConfig(
    "out", max_steps=3, per_device_train_batch_size=4, report_to=[], use_cpu=True, save_strategy="no",
    bf16=False, max_length=128, disable_tqdm=True, logging_strategy="no",
)
stash = attach(model)
SFTTrainer(
    model, args=arguments, train_dataset=Dataset.from_dict({"text": texts}),
    processing_class=PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ),
).train()
report(model, stash)
""",
    "lightning": """
import os
import lightning
from torch import nn

class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 10))
    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)

lightning.seed_everything(0, verbose=False)
data = torch.utils.data.TensorDataset(torch.randn(1024, 256), torch.randint(0, 10, (1024,)))
module = Classifier()
stash = attach(module.net)
lightning.Trainer(
    max_epochs=1, accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", 1)), logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
).fit(module, torch.utils.data.DataLoader(data, 128))
report(module, stash)
""",
}
RUN = ["-m", "backstash", "run", "--keep", "0", "--disk", ".", "--min-bytes", "4KiB", "--quiet"]
TWO = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]


def weights(directory: Path, *arguments: str) -> list[tuple[str, int]]:
    """What each process of the command reports: its weights, and the bytes that a stash of the script moved.

    Raises ``RuntimeError`` with its last words where it fails.
    """
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=directory, env=environ, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1:])
    found = re.findall(r"^weights (\w+) (\d+)$", done.stdout, re.MULTILINE)
    return [(digest, int(moved)) for digest, moved in found]


def difference(source: str, directory: Path) -> str:
    """What backstash changes of a script: ``""`` for nothing, else in words."""
    (directory / "train.py").write_text(BEGIN + source)
    plain = weights(directory, "train.py")
    if not plain or weights(directory, "train.py") != plain:
        return "plain does not repeat"
    if weights(directory, *RUN, "--json", "run.json", "train.py") != plain:
        return "run: differs"
    if not json.loads((directory / "run.json").read_text())["stats"]["written_bytes"]:
        return "run: nothing moved"
    ((attached, moved),) = weights(directory, "train.py", "attach")
    if attached != plain[0][0]:
        return "attach: differs"
    if not moved:
        return "attach: nothing moved"
    both = weights(directory, *TWO, "train.py")
    if len({digest for digest, _ in both}) != 1 or both[0] == plain[0]:
        return f"two processes: plain gives {both}"
    if weights(directory, *TWO, *RUN, "train.py") != both:
        return "two processes: differs"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="REGEX", help="scripts that match")
    options = parser.parse_args()
    failed = 0
    for name in (name for name in SCRIPTS if re.search(options.only, name)):
        with tempfile.TemporaryDirectory() as directory:
            try:
                found = difference(SCRIPTS[name], Path(directory))
            except RuntimeError as error:
                found = f"failed: {error}"
        failed += bool(found)
        print(f"{name:44} {found or 'equal'}", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
