"""transformers' own Trainer under a stash: the same weights to the bit, and nothing left behind."""

import logging
import socket
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from backstash import Stash
from backstash.errors import StashWarning, UsageError
from backstash.integrations.transformers import StashCallback, prepare_trainer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from long_tests import takes_long
from two_processes import run_two

transformers = pytest.importorskip(
    "transformers", reason="needs pip install 'backstash[transformers]'"
)
pytest.importorskip("accelerate", reason="needs pip install 'backstash[transformers]'")

pytestmark = pytest.mark.filterwarnings("ignore")  # what a trainer says of its own arguments


class Seen(transformers.TrainerCallback):
    """A reporter: what it received."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def model_of():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=32, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config)


def rows(count=12):
    made = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 64, (count, 16), generator=made)
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer_of(directory, *, callbacks=(), model=None, kind=None, extra=None, **options):
    logging.getLogger("transformers").setLevel(logging.ERROR)
    arguments = transformers.TrainingArguments(
        **{
            "output_dir": str(directory),
            "max_steps": 3,
            "per_device_train_batch_size": 2,
            "logging_steps": 1,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "seed": 3,
            "use_cpu": True,
            **options,
        }
    )
    trainer = (kind or transformers.Trainer)(
        model=model or model_of(),
        args=arguments,
        train_dataset=rows(),
        eval_dataset=rows(4),
        callbacks=list(callbacks),
        **(extra or {}),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def weights(trainer):
    return {name: each.clone() for name, each in trainer.model.state_dict().items()}


def hook_pair():
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert torch.equal(found[name], each), name


def scaled_loss(outputs, labels, num_items_in_batch=None):
    return nn.functional.cross_entropy(
        outputs.logits.flatten(0, 1).square(), labels.flatten(), reduction="mean"
    )


LONG = [takes_long]

CASES = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "checkpointing": {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False},
    },
    "reentrant checkpointing": {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": True},
    },
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "loss function": {"extra": {"compute_loss_func": scaled_loss}},
    "torch_compile": {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 2},
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=LONG * (case == "torch_compile")) for case in CASES]
)
def test_a_trainer_comes_to_the_same_weights(tmp_path, disk_dir, case):
    plain = trainer_of(tmp_path / "plain", **CASES[case])
    plain.train()

    seen, evaluated = Seen(), []
    trainer = trainer_of(tmp_path / "held", callbacks=[seen], **CASES[case])
    with_hooks = []
    own = trainer.compute_loss

    def compute_loss(*args, **kwargs):
        with_hooks.append((torch.is_grad_enabled(), hook_pair() is not None))
        return own(*args, **kwargs)

    trainer.compute_loss = compute_loss
    stash = Stash(disk=disk_dir, min_bytes=1024)
    assert prepare_trainer(trainer, stash) is trainer
    assert prepare_trainer(trainer, stash) is trainer  # a second time changes nothing
    trainer.train()

    assert_equal(weights(trainer), weights(plain))
    assert hook_pair() is None
    assert stash.stats().written_bytes > 10_000 and stash.stats().blocks == 0
    assert all(held == grad for grad, held in with_hooks), (
        "held where gradients are on, and only there"
    )
    assert (case == "evaluation") == any(not grad for grad, _ in with_hooks)
    logged = [logs for logs in seen.logs if "loss" in logs]
    assert logged[-1]["stash/written_bytes"] > logged[0]["stash/written_bytes"] > 0
    assert all("epoch" in logs for logs in logged)
    evaluated = [logs for logs in seen.logs if "eval_loss" in logs]
    assert len(evaluated) == (3 if case == "evaluation" else 0)
    stash.close()


@LONG[0]
def test_two_processes_come_to_the_same_weights():
    """With DDP. FSDP is not run here: accelerate has none without an accelerator."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    outputs = run_two(Path(__file__).with_name("trainer_worker.py"), port)
    assert all(output.endswith("equal\n") for output in outputs)


def test_a_loss_outside_forward_is_held(tmp_path, disk_dir):
    """What the trainer's label smoothing saves is none of the model's forward."""
    stash = Stash(disk=disk_dir, min_bytes=0)
    trainer = prepare_trainer(trainer_of(tmp_path, label_smoothing_factor=0.1, max_steps=1), stash)
    with stash.record() as recording:
        trainer.train()
    outside = [event for event in recording.events if event.kind == "save" and not event.module]
    assert outside
    stash.close()


def test_what_evaluate_returns_has_no_figures_of_the_stash(tmp_path):
    stash = Stash()
    metrics = prepare_trainer(trainer_of(tmp_path), stash).evaluate()
    assert "eval_loss" in metrics and not [name for name in metrics if name.startswith("stash/")]
    stash.close()


def test_training_goes_on_from_a_checkpoint(tmp_path, disk_dir):
    plain = trainer_of(tmp_path / "plain", max_steps=4)
    plain.train()
    stash = Stash(disk=disk_dir, min_bytes=1024)
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    first = prepare_trainer(trainer_of(tmp_path / "held", **saving), stash)
    first.train()
    assert_equal(weights(first), weights(plain))
    second = prepare_trainer(trainer_of(tmp_path / "held", **saving), stash)
    second.train(resume_from_checkpoint=str(tmp_path / "held" / "checkpoint-2"))
    assert_equal(weights(second), weights(plain))
    stash.close()


def test_a_batch_that_is_too_large_is_halved(tmp_path, disk_dir):
    """The out-of-memory error passes as it is, and the retry finds the stash empty."""
    stash = Stash(disk=disk_dir, min_bytes=1024)
    batches, alive = [], []

    class Small(transformers.Trainer):
        def compute_loss(self, model, inputs, **kwargs):
            batches.append(len(inputs["input_ids"]))
            alive.append(stash.stats().blocks)
            loss = super().compute_loss(model, inputs, **kwargs)
            if batches[-1] > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
            return loss

    options = {"per_device_train_batch_size": 4, "auto_find_batch_size": True}
    trainer = prepare_trainer(trainer_of(tmp_path, kind=Small, **options), stash)
    trainer.train()
    assert batches[0] == 4 and batches[-1] <= 2
    assert alive == [0] * len(alive)
    assert hook_pair() is None
    stash.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("where", ["loss", "backward"])
def test_an_error_leaves_no_hooks(tmp_path, disk_dir, error, where):
    stash = Stash(disk=disk_dir, min_bytes=1024)

    class Stopped(transformers.Trainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            if where == "loss":
                raise error
            loss.register_hook(self.stop)
            return loss

        def stop(self, gradient):
            raise error

    trainer = prepare_trainer(trainer_of(tmp_path, kind=Stopped), stash)
    with pytest.raises(error):
        trainer.train()
    assert hook_pair() is None
    stash.close()


def test_replicas_of_data_parallel_are_held(tmp_path, disk_dir):
    """``nn.DataParallel`` runs its replicas in threads; here the model itself runs in two."""
    stash = Stash(disk=disk_dir, min_bytes=1024)
    trainer = trainer_of(tmp_path)
    vars(trainer.args)["_n_gpu"] = 2
    prepare_trainer(trainer, stash)
    tokens = torch.ones(2, 16, dtype=torch.long)
    losses = []
    with trainer.compute_loss_context_manager():
        for _ in range(2):
            run = threading.Thread(
                target=lambda: losses.append(trainer.model(tokens, labels=tokens).loss)
            )
            run.start()
            run.join()
    assert len(losses) == 2 and stash.stats().blocks > 10
    sum(losses).backward()
    assert not trainer.model._forward_pre_hooks and not trainer.model._forward_hooks
    stash.close()


def test_offloading_by_checkpointing_is_refused(tmp_path):
    stash = Stash()
    options = {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False, "offload": True},
    }
    with pytest.raises(UsageError, match=r"with offload=True .* leave offload out"):
        prepare_trainer(trainer_of(tmp_path, **options), stash)
    with pytest.raises(UsageError, match="leave offload out"):
        trainer_of(tmp_path, callbacks=[StashCallback(stash)], **options).train()
    # Or the model was configured so itself.
    model = model_of()
    model.activation_checkpointing_enable(offload=True)
    trainer = prepare_trainer(trainer_of(tmp_path, model=model), stash)
    with pytest.raises(UsageError, match="leave offload out"):
        trainer.train()
    assert hook_pair() is None
    stash.close()


def test_another_stash_is_refused(tmp_path):
    first, second = Stash(), Stash()
    trainer = prepare_trainer(trainer_of(tmp_path), first)
    with pytest.raises(UsageError, match="another stash"):
        prepare_trainer(trainer, second)


def test_activation_offloading_of_trl_is_said_to_do_nothing(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.args.activation_offloading = True
    with pytest.warns(StashWarning, match="activation_offloading=True has no effect"):
        prepare_trainer(trainer, Stash())


def test_a_trainer_that_never_asks_for_the_context_is_reported(tmp_path):
    class Own(transformers.Trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            loss = model(**inputs).loss
            loss.backward()
            return loss.detach()

    trainer = prepare_trainer(trainer_of(tmp_path, kind=Own, max_steps=2), Stash())
    with pytest.warns(StashWarning, match="never called compute_loss_context_manager") as said:
        trainer.train()
    assert len([each for each in said if each.category is StashWarning]) == 1


def test_a_callback_comes_to_the_same_weights(tmp_path, disk_dir):
    plain = trainer_of(tmp_path / "plain")
    plain.train()
    stash, seen = Stash(disk=disk_dir, min_bytes=1024), Seen()
    trainer = trainer_of(tmp_path / "held", callbacks=[StashCallback(stash), seen])
    trainer.train()
    assert_equal(weights(trainer), weights(plain))
    assert seen.logs[-1]["stash/written_bytes"] > 10_000
    assert not trainer.model._forward_pre_hooks and not trainer.model._forward_hooks
    stash.close()


def test_a_callback_takes_the_stash_off_on_errors(tmp_path, disk_dir):
    stash = Stash(disk=disk_dir, min_bytes=1024)

    class Stopped(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            assert kwargs["model"]._forward_pre_hooks
            raise KeyboardInterrupt

    trainer = trainer_of(tmp_path, callbacks=[StashCallback(stash), Stopped()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not trainer.model._forward_pre_hooks and not trainer.model._forward_hooks
    stash.close()


def test_without_the_library_the_install_line_is_said(monkeypatch):
    from backstash.integrations import transformers as ours

    monkeypatch.setattr(ours, "TrainerCallback", object)
    with pytest.raises(ImportError, match=r"pip install 'backstash\[transformers\]'"):
        StashCallback(Stash())
