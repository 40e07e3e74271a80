"""Real clients: a model of each kind from transformers, built from a small configuration."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from backstash.hooks import (
    capture,
    clip_gradients,
    edit_gradients,
    find_nonfinite,
    hooks_on,
    step_in_backward,
    summary,
    trace,
    watch_gradients,
)

transformers = pytest.importorskip(
    "transformers",
    reason="real models come from transformers: pip install 'backstash[test-models]'",
)

Built = tuple[nn.Module, dict[str, Any]]
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
TOKENS = torch.arange(12).view(2, 6) % 7 + 1


def encoder() -> Built:
    config = transformers.BertConfig(vocab_size=30, max_position_embeddings=16, **SMALL)
    return transformers.BertForMaskedLM(config), {"input_ids": TOKENS, "labels": TOKENS}


def decoder() -> Built:
    config = transformers.LlamaConfig(vocab_size=30, num_key_value_heads=2, **SMALL)
    return transformers.LlamaForCausalLM(config), {"input_ids": TOKENS, "labels": TOKENS}


def encoder_decoder() -> Built:
    config = transformers.T5Config(
        vocab_size=30,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config), {"input_ids": TOKENS, "labels": TOKENS}


def vision() -> Built:
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=3, **SMALL)
    model = transformers.ViTForImageClassification(config)
    return model, {"pixel_values": torch.ones(2, 3, 8, 8), "labels": torch.tensor([0, 1])}


def convolutional() -> Built:
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=3
    )
    model = transformers.ResNetForImageClassification(config)
    return model, {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}


def mixture_of_experts() -> Built:
    config = transformers.MixtralConfig(
        vocab_size=30, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1, **SMALL
    )
    return transformers.MixtralForCausalLM(config), {"input_ids": TOKENS, "labels": TOKENS}


KINDS: dict[Callable[[], Built], list[str]] = {
    encoder: ["bert.encoder.layer.[01]"],
    decoder: ["model.layers.[01]"],
    encoder_decoder: ["encoder.block.[01]", "decoder.block.[01]"],
    vision: ["vit*layer*[01].attention"],
    convolutional: ["resnet.encoder.stages.[01]"],
    mixture_of_experts: ["model.layers.[01].mlp"],
}


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def client(request: pytest.FixtureRequest) -> tuple[nn.Module, dict[str, Any], list[str]]:
    torch.manual_seed(0)
    model, inputs = request.param()
    return model.train(), inputs, KINDS[request.param]


def test_captured_watched_edited_and_left_clean(client, state_of) -> None:
    model, inputs, blocks = client
    before, outside = state_of(model), hooks_on(model)
    with capture(model, blocks, inputs=True, grads=True, clone=True) as got:
        model(**inputs).loss.backward()
    assert len(got) >= 2
    for name, captured in got.items():
        out = captured.output
        first = out if isinstance(out, torch.Tensor) else out[0]
        gradient = captured.grad if isinstance(captured.grad, torch.Tensor) else captured.grad[0]
        assert first.shape == gradient.shape and gradient.isfinite().all(), name
        assert isinstance(captured.input, torch.Tensor)

    with watch_gradients(model, to=None) as watch:
        model.zero_grad()
        model(**inputs).loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert watch.last.total.norm == pytest.approx(norm.item(), rel=1e-5)

    with edit_gradients(dict.fromkeys(blocks, torch.zeros_like), model, at="outputs"):
        model.zero_grad()
        model(**inputs).loss.backward()
    inside = [p for n, p in model.named_parameters() if n.startswith(tuple(f"{k}." for k in got))]
    assert inside and all(p.grad is None or not p.grad.any() for p in inside)
    assert state_of(model) == before and hooks_on(model) == outside


def test_a_whole_output_is_captured_as_its_class(client) -> None:
    model, inputs, _ = client
    with capture(model, "", inputs=True) as got:
        out = model(**inputs)
    kept = got[""].output
    assert type(kept) is type(out) and kept.keys() == out.keys()
    assert torch.equal(kept.loss, out.loss) and not kept.loss.requires_grad
    assert torch.equal(kept["logits"], out.logits) and torch.equal(kept[0], out[0])
    assert set(got[""].kwargs) == set(inputs)


def test_ablation_changes_the_loss_and_stop_saves_the_rest(client, state_of) -> None:
    model, inputs, blocks = client
    model.eval()
    before = state_of(model)
    plain = model(**inputs).loss
    first = next(iter(capture_paths(model, blocks, inputs)))

    def ablate(out: Any) -> Any:
        if isinstance(out, torch.Tensor):
            return torch.zeros_like(out)
        return (torch.zeros_like(out[0]), *out[1:])

    with capture(model, [], edit={first: ablate}):
        assert not torch.equal(model(**inputs).loss, plain)
    with capture(model, first, stop=True) as got, trace(model, to=None) as calls:
        model(**inputs)
        pytest.fail("the forward ends")
    assert list(got) == [first] and calls.removed
    assert torch.equal(model(**inputs).loss, plain) and state_of(model) == before


def capture_paths(model: nn.Module, blocks: list[str], inputs: dict[str, Any]) -> list[str]:
    with capture(model, blocks) as got:
        model(**inputs)
    return list(got)


def test_the_other_tools(client, state_of) -> None:
    model, inputs, _ = client
    before = state_of(model)
    calls: list[Any] = []
    with trace(model, to=calls.append), find_nonfinite(model, inf=False):
        model(**inputs).loss.backward()
    assert calls[-1].path == "" and "logits" in calls[-1].output
    model.zero_grad()
    with clip_gradients(model, norm=1e-3):
        model(**inputs).loss.backward()
    assert all(p.grad.norm() <= 1.001e-3 for p in model.parameters() if p.grad is not None)
    model.zero_grad()
    table = summary(model, **inputs)
    assert table.saved_bytes > 0 and table.parameters == sum(p.numel() for p in model.parameters())
    held = [p.detach().clone() for p in model.parameters()]
    with step_in_backward(lambda p: torch.optim.SGD(p, lr=0.1), model):
        model(**inputs).loss.backward()
    assert any(not torch.equal(a, b) for a, b in zip(held, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters()) and state_of(model) == before
