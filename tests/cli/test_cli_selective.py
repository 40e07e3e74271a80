"""A script's selective checkpoints under ``backstash run``: answered for, where PyTorch asks."""

import functools
import warnings

import pytest
import torch
from torch.utils import checkpoint as stock
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from backstash.cli._selective import SelectiveCheckpoints

PRODUCTS = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
OWN = stock.checkpoint


@pytest.fixture
def later(monkeypatch):
    """A PyTorch that requires the option: what it receives, call by call."""
    received = []

    def checkpoint(
        function, *args, use_reentrant=None, respect_saved_tensors_hooks=None, **options
    ):
        received.append(respect_saved_tensors_hooks)
        if use_reentrant is not False and respect_saved_tensors_hooks is not None:
            raise ValueError("only with use_reentrant=False")
        if "context_fn" in options and respect_saved_tensors_hooks is None:
            raise RuntimeError("say whether what is kept is for the hooks")
        return OWN(function, *args, use_reentrant=use_reentrant, **options)

    monkeypatch.setattr(stock, "checkpoint", checkpoint)
    return received


def gradient(**options):
    x = torch.linspace(0, 1, 64).reshape(8, 8).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what this PyTorch says of reentrant ones
        stock.checkpoint(lambda x: (x @ x).exp().sum(), x, **options).backward()
    return x.grad


def test_what_a_later_pytorch_asks_is_answered_and_put_back(later):
    asking = stock.checkpoint
    with pytest.raises(RuntimeError, match="say whether"):
        gradient(use_reentrant=False, context_fn=PRODUCTS)
    later.clear()
    selective = SelectiveCheckpoints()
    assert selective.note == ""
    found = [
        gradient(use_reentrant=False, context_fn=PRODUCTS),
        gradient(use_reentrant=False, context_fn=PRODUCTS, respect_saved_tensors_hooks=True),
        gradient(use_reentrant=False),
        gradient(use_reentrant=True),
    ]
    assert later == [False, True, None, None], "only where the script said nothing, and is asked"
    assert selective.calls == 1 and "stayed in place" in selective.note
    assert all(torch.equal(each, found[0]) for each in found)
    selective.remove()
    selective.remove()
    assert stock.checkpoint is asking


def test_before_that_nothing_is_replaced():
    if "respect_saved_tensors_hooks" in OWN.__code__.co_varnames:
        pytest.skip("this PyTorch asks")
    selective = SelectiveCheckpoints()
    assert stock.checkpoint is OWN
    assert torch.equal(
        gradient(use_reentrant=False, context_fn=PRODUCTS), gradient(use_reentrant=False)
    )
    assert selective.note == ""
    selective.remove()
