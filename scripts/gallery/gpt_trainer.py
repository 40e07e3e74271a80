"""transformers: a small GPT-2, trained by its Trainer with an evaluation between epochs."""

import tempfile

import common
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

training = common.Training()
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=2000, n_positions=128, n_embd=192, n_layer=4, n_head=4)
)
texts = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 2000, (64, 128))]


class Ends(TrainerCallback):
    def on_step_end(self, *_, **__):
        training.step(torch.tensor(0.0))


with tempfile.TemporaryDirectory() as directory:
    arguments = TrainingArguments(
        directory, per_device_train_batch_size=8, num_train_epochs=2, eval_strategy="epoch",
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, seed=0, logging_steps=1000,
    )  # fmt: skip
    Trainer(
        model, arguments, train_dataset=texts, eval_dataset=texts[:16], callbacks=[Ends()]
    ).train()
training.end(model.parameters())
