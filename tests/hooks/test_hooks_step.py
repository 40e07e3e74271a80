"""step_in_backward: the same result, gradients gone, and what it refuses."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from backstash.errors import UsageError
from backstash.hooks import HookWarning, step_in_backward


def adam(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def data(steps: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 4, generator=generator) for _ in range(steps)]


def copy_of(model: nn.Sequential) -> nn.Sequential:
    twin = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))
    twin.load_state_dict(model.state_dict())
    return twin


def test_the_same_parameters_as_stepping_after_backward(chain: nn.Sequential) -> None:
    twin = copy_of(chain)
    optimizer = adam(list(twin.parameters()))
    with step_in_backward(adam, chain) as opt:
        for x in data():
            chain(x).pow(2).sum().backward()
            assert all(p.grad is None for p in chain.parameters())
            opt.step()
            opt.zero_grad()
            twin(x).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(chain.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


def test_never_all_gradients_at_once() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(8)))
    most = 0

    def count(parameter: torch.Tensor) -> None:
        nonlocal most
        most = max(most, sum(p.grad is not None for p in model.parameters()))

    handles = [p.register_post_accumulate_grad_hook(count) for p in model.parameters()]
    with step_in_backward(adam, model):
        model(torch.ones(1, 4)).sum().backward()
    for handle in handles:
        handle.remove()
    assert most == 1


def test_state_and_groups(chain: nn.Sequential) -> None:
    twin = copy_of(chain)
    with step_in_backward(adam, chain) as opt, step_in_backward(adam, twin) as other:
        chain(data()[0]).sum().backward()
        twin(data()[0]).sum().backward()
        assert set(opt.optimizers) == {name for name, _ in chain.named_parameters()}
        other.load_state_dict(copy.deepcopy(opt.state_dict()))
        for group in opt.param_groups + other.param_groups:
            group["lr"] = 0.5
        chain(data()[1]).sum().backward()
        twin(data()[1]).sum().backward()
        with pytest.raises(UsageError, match=r"0\.bias"):
            opt.load_state_dict({"0.weight": {}})
    assert all(
        torch.equal(a, b) for a, b in zip(chain.parameters(), twin.parameters(), strict=True)
    )


def test_frozen_and_unselected_parameters_stay(chain: nn.Sequential) -> None:
    chain[0].weight.requires_grad_(False)
    before = chain[0].weight.clone()
    with step_in_backward(adam, chain, names="2.*") as opt:
        chain(data()[0]).sum().backward()
    assert torch.equal(chain[0].weight, before) and chain[0].bias.grad is not None
    assert list(opt.optimizers) == ["2.weight", "2.bias"]


def test_leftover_gradients_are_refused(chain: nn.Sequential, state_of) -> None:
    chain(data()[0]).sum().backward()
    before = state_of(chain)
    with pytest.raises(
        UsageError, match=r"parameters already have gradients \(0.weight.*zero_grad"
    ):
        step_in_backward(adam, chain)
    assert state_of(chain) == before
    with step_in_backward(adam, chain, allow=["accumulation"]):
        chain(data()[0]).sum().backward()


def test_two_backwards_for_a_step_are_refused(chain: nn.Sequential) -> None:
    with step_in_backward(adam, chain) as opt:
        chain(data()[0]).sum().backward()
        chain(data()[1]).sum().backward()
        with pytest.raises(UsageError, match=r"2 backwards for one step\(\)"):
            opt.step()
        chain(data()[0]).sum().backward()
        held = [p.detach().clone() for p in chain.parameters()]
        with pytest.raises(UsageError, match=r'2 backwards .*allow=\["accumulation"\]'):
            chain(data()[1]).sum().backward()
        assert all(torch.equal(a, b) for a, b in zip(held, chain.parameters(), strict=True))
    chain.zero_grad()
    with step_in_backward(adam, chain, allow=["accumulation"]) as opt:
        chain(data()[0]).sum().backward()
        chain(data()[1]).sum().backward()
        opt.step()


def test_global_clipping_is_refused(chain: nn.Sequential) -> None:
    imported = torch.nn.utils.clip_grad_norm_
    other = nn.Linear(2, 2)
    with step_in_backward(adam, chain):
        chain(data()[0]).sum().backward()
        with pytest.raises(UsageError, match=r"nothing to clip.*clip_gradients"):
            imported(chain.parameters(), 1.0)
        other(torch.ones(1, 2)).sum().backward()
        imported(other.parameters(), 0.1)
    assert torch.nn.utils.get_total_norm([p.grad for p in other.parameters()]) < 0.11
    imported(chain.parameters(), 1.0)
    chain.zero_grad()
    with step_in_backward(adam, chain, allow=["clipping"]):
        chain(data()[0]).sum().backward()
        assert imported(chain.parameters(), 1.0) == 0


def test_guards_may_end_in_any_order(chain: nn.Sequential, state_of) -> None:
    other = nn.Linear(4, 2)
    before = state_of(chain)
    first, second = step_in_backward(adam, chain), step_in_backward(adam, other)
    chain(data()[0]).sum().backward()
    other(data()[0]).sum().backward()
    first.remove()
    torch.nn.utils.clip_grad_norm_(chain.parameters(), 1.0)
    with pytest.raises(UsageError):
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    second.remove()
    assert state_of(chain) == before


def test_a_scaler_is_refused(chain: nn.Sequential, state_of) -> None:
    before = state_of(chain)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(UsageError, match=r'GradScaler is alive.*allow=\["scaler"\]'):
        step_in_backward(adam, chain)
    assert state_of(chain) == before
    with step_in_backward(adam, chain, allow=["scaler"]):
        chain(data()[0]).sum().backward()
    del scaler
    gc.collect()
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    with step_in_backward(adam, chain):
        chain(data()[0]).sum().backward()
        assert not disabled.is_enabled()


def test_a_scaler_that_is_made_later_is_refused_too(chain: nn.Sequential) -> None:
    with pytest.warns(HookWarning), step_in_backward(adam, chain):
        scaler = torch.amp.GradScaler("cpu")
        with pytest.raises(UsageError, match="GradScaler"):
            scaler.scale(chain(data()[0]).sum()).backward()
    chain.zero_grad()


def test_what_else_it_refuses(chain: nn.Sequential, state_of) -> None:
    before = state_of(chain)
    with pytest.raises(UsageError, match="'accumulation', 'clipping', 'scaler'"):
        step_in_backward(adam, chain, allow=["everything"])
    with pytest.raises(UsageError, match="is a list"):
        step_in_backward(adam, chain, allow="scaler")
    with pytest.raises(
        UsageError, match=r"returned a list; it must return a torch\.optim\.Optimizer"
    ):
        step_in_backward(lambda parameters: parameters, chain)
    assert state_of(chain) == before


def test_a_failed_backward_leaves_the_rest_unstepped(chain: nn.Sequential) -> None:
    first = chain[0].weight.detach().clone()
    last = chain[2].weight.detach().clone()
    with pytest.raises(ZeroDivisionError), step_in_backward(adam, chain):
        hidden = chain[1](chain[0](data()[0]))
        hidden.register_hook(lambda g: 1 / 0)
        chain[2](hidden).sum().backward()
    assert torch.equal(chain[0].weight, first) and not torch.equal(chain[2].weight, last)


def test_reentrant_checkpoints_are_one_backward() -> None:
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    x = torch.randn(2, 4, requires_grad=True)
    with step_in_backward(adam, net) as handle:
        for _ in range(2):
            h = x
            for each in net:
                h = checkpoint(each, h, use_reentrant=True)
            h.sum().backward()
            handle.step()


@pytest.mark.parametrize("allow", [[], ["accumulation"]])
def test_a_gradient_in_two_parts_is_refused(allow: list[str]) -> None:
    """Two reentrant checkpoints share a parameter, so each has a part of its gradient."""
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    with step_in_backward(adam, layer, allow=allow):
        h = checkpoint(layer, x, use_reentrant=True)
        loss = checkpoint(layer, h, use_reentrant=True).sum()
        if allow:
            loss.backward()
        else:
            with pytest.raises(UsageError, match="in two parts"):
                loss.backward()


def test_after_accumulation_was_refused_no_gradient_is_left() -> None:
    layer = nn.Linear(4, 1)
    with step_in_backward(lambda p: torch.optim.SGD(p, lr=0.1), layer) as handle:
        layer(torch.ones(1, 4)).backward()
        handle.step()
        layer(torch.ones(1, 4)).backward()
        with pytest.raises(UsageError, match="2 backwards"):
            layer(torch.ones(1, 4)).backward()
        assert [p.grad for p in layer.parameters()] == [None, None]


def test_an_optimizer_is_no_factory(chain: nn.Sequential) -> None:
    with pytest.raises(UsageError, match=r"step_in_backward\(AdamW, ...\): give what makes"):
        step_in_backward(adam([*chain.parameters()]), chain)
