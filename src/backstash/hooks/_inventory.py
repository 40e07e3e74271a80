"""Every hook that is on a model: whose, where, since when, fired or not."""

from __future__ import annotations

from torch import nn

from ._hook_info import HookInfo, Inventory
from ._hook_places import places

__all__ = ["hooks_on"]


def hooks_on(model: nn.Module) -> Inventory:
    """Lists the hooks on a model: ours and others', on modules and parameters, and the global ones.

    Found are: forward, forward pre-, backward, backward pre- and state-dict hooks of modules; tensor and
    post-accumulate hooks of parameters; the hooks for all modules; the pair of saved-tensor hooks that is
    active on this thread. Not found are hooks that C++ code put on autograd nodes (DDP's reducer), and hooks
    on activations, which live in the graph.

    When a hook of ours was registered, where, and how often it fired is known. Of another's, torch keeps no
    record: ``since`` and ``fired`` are ``None``, and ``where`` is where its function was defined.

    Args:
        model: the model; hooks on wrappers (DDP, compiled) are listed with the wrapped path.

    Returns:
        An :class:`Inventory`, a tuple of :class:`HookInfo`; ``print`` it for a table. Empty if there is none.

    >>> import torch
    >>> from backstash.hooks import capture, hooks_on
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    >>> with capture(model, "0"):
    ...     _ = model(torch.ones(1, 2))
    ...     [(hook.owner, hook.path, hook.kind, hook.fired) for hook in hooks_on(model)]
    [('backstash.hooks.capture', '0', 'forward', 1)]
    >>> hooks_on(model)
    ()
    """
    return Inventory(HookInfo.of(kind, path, function) for kind, path, function in places(model))
