"""Register hooks on the gradients of tensors, of modules' outputs and of modules' inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ._alias import GradHook, InputUses, own_output
from ._calls import OpenCalls
from ._paths import Site
from ._registration import Registration
from ._tree import tensors_in

__all__ = ["on_inputs", "on_outputs", "on_tensor"]


def on_tensor(
    registration: Registration, name: str, tensor: torch.Tensor, hook: GradHook, *, sharded: bool
) -> None:
    """Hook the gradient of a tensor, before it is accumulated; what the hook returns replaces it.

    The tensor hooks of a parameter that FSDP2 shards never fire: there (``sharded=True``) the hook gets
    ``.grad`` after the reduction and accumulation, and what it returns becomes ``.grad``.
    """
    if not sharded:
        registration.gradient(name, tensor, hook)
        return

    def late(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            new = hook(parameter.grad)
            parameter.grad = parameter.grad if new is None else new

    registration.accumulated(name, tensor, late)


def on_outputs(registration: Registration, site: Site, hook: GradHook) -> None:
    """Hook the gradients of the tensors that a module returns, from all of their uses."""
    gradient = registration.counted("output gradient", site.path, hook)

    def end(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        own = own_output(output, (args, kwargs))
        for tensor in tensors_in(own):
            if tensor.requires_grad:
                registration.activation(tensor, gradient)
        return None if own is output else own

    registration.forward(site, end)


def on_inputs(registration: Registration, site: Site, hook: GradHook) -> None:
    """Hook the gradients of the tensors that a module takes, as they come through this module alone."""
    gradient = registration.counted("input gradient", site.path, hook)
    calls = OpenCalls[InputUses]()

    def begin(module: nn.Module, args: Any, kwargs: Any) -> Any:
        uses = InputUses(registration)
        calls.begin(uses)
        return uses.begin((args, kwargs), lambda _: gradient)

    def end(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        uses, _ = calls.end()
        if uses is not None:
            uses.end()

    registration.forward_pre(site, begin)
    registration.forward(site, end, always_call=True)
