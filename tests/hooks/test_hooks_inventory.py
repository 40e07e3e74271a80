"""hooks_on: whose, where, since when, fired or not."""

import time

import pytest
import torch
import torch.nn.modules.module as torch_module
from torch import nn

from backstash.hooks import HookWarning, capture, clip_gradients, hooks_on, watch_gradients


def foreign(*args: object) -> None:
    """Another's hook."""


class Callable_:
    def __call__(self, *args: object) -> None: ...


def test_ours(chain: nn.Sequential) -> None:
    began = time.time()
    with capture(chain, ["0", "2"], inputs=True), clip_gradients(chain, value=1.0, names="0.bias"):
        chain[0](torch.ones(1, 4)).sum().backward()
        found = hooks_on(chain)
        assert [(h.path, h.kind, h.fired) for h in found] == [
            ("0", "forward pre", 1),
            ("0", "forward", 1),
            ("0.bias", "gradient", 1),
            ("2", "forward pre", 0),
            ("2", "forward", 0),
        ]
        chain[2](torch.ones(1, 8))
    assert all(h.ours and h.owner.startswith("backstash.hooks.") for h in found)
    assert all(h.where.startswith(__file__ + ":") for h in found)
    assert all(began <= h.since <= time.time() for h in found)
    assert found[2].owner == "backstash.hooks.clip_gradients"
    assert hooks_on(chain) == () and str(hooks_on(chain)) == "no hooks"


def test_every_kind_of_others(chain: nn.Sequential) -> None:
    weight = chain[0].weight
    handles = [
        chain[0].register_forward_hook(foreign),
        chain[0].register_forward_pre_hook(foreign, with_kwargs=True),
        chain[0].register_full_backward_hook(foreign),
        chain[0].register_full_backward_pre_hook(Callable_()),
        chain[0].register_state_dict_pre_hook(foreign),
        chain[0]._register_load_state_dict_pre_hook(foreign, with_module=True),
        chain[0].register_load_state_dict_post_hook(foreign),
        weight.register_hook(foreign),
        weight.register_post_accumulate_grad_hook(foreign),
        torch_module.register_module_forward_hook(foreign),
        torch_module.register_module_forward_pre_hook(foreign),
        torch_module.register_module_full_backward_hook(foreign),
    ]
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            found = hooks_on(chain)
    finally:
        for handle in handles:
            handle.remove()
    kinds = {(h.path, h.kind) for h in found}
    assert kinds == {
        ("0", "forward"),
        ("0", "forward pre"),
        ("0", "backward"),
        ("0", "backward pre"),
        ("0", "state_dict pre"),
        ("0", "load_state_dict pre"),
        ("0", "load_state_dict post"),
        ("0.weight", "gradient"),
        ("0.weight", "accumulated gradient"),
        ("*", "global forward"),
        ("*", "global forward pre"),
        ("*", "global backward"),
        ("*", "saved tensor pack"),
        ("*", "saved tensor unpack"),
    }
    assert not any(h.ours for h in found)
    assert all(h.since is None and h.fired is None for h in found)
    assert all(h.where.startswith(__file__ + ":") for h in found)
    assert {h.function for h in found if h.path == "0"} == {"foreign", "Callable_"}
    assert all(h.owner == __name__ for h in found)
    assert "since ?, fired: unknown" in str(found)
    assert hooks_on(chain) == ()


def test_hooks_on_a_wrapper_and_in_addition_to_others(chain: nn.Sequential) -> None:
    wrapped = nn.DataParallel(chain)
    handle = wrapped.register_forward_hook(foreign)
    with pytest.warns(HookWarning), watch_gradients(wrapped, names="2.bias", to=None):
        found = hooks_on(wrapped)
    assert [(h.path, h.ours) for h in found] == [("", False), ("2.bias", True)]
    assert [h.ours for h in hooks_on(wrapped)] == [False]
    handle.remove()
