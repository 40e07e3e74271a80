"""Register hooks on the gradients of tensors, of modules' outputs and of modules' inputs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ._alias import InputUses, own_output
from ._paths import Site
from ._registration import HookRecord, Make, Registration
from ._tree import tensors_in

__all__ = ["on_inputs", "on_outputs", "on_tensor"]


def on_tensor(
    registration: Registration, name: str, tensor: torch.Tensor, make: Make, *, sharded: bool
) -> None:
    """Hook the gradient of a tensor, before it is accumulated; what the hook returns replaces it.

    The tensor hooks of a parameter that FSDP2 shards never fire: there (``sharded=True``) the hook gets
    ``.grad`` after the reduction and accumulation, and what it returns becomes ``.grad``.
    """
    if not sharded:
        registration.gradient(name, tensor, make)
        return

    def make_late(record: HookRecord) -> Callable[[torch.Tensor], None]:
        hook = make(record)

        def late(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                new = hook(parameter.grad)
                parameter.grad = parameter.grad if new is None else new

        return late

    registration.accumulated(name, tensor, make_late)


def on_outputs(registration: Registration, site: Site, make: Make) -> None:
    """Hook the gradients of the tensors that a module returns, from all of their uses."""

    def make_forward(record: HookRecord) -> Callable[..., Any]:
        gradient = make(record)

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            own = own_output(output, (args, kwargs))
            for tensor in tensors_in(own):
                if tensor.requires_grad:
                    registration.activation(tensor, gradient)
            return None if own is output else own

        return hook

    registration.forward(site, make_forward, counts="output gradient", with_kwargs=True)


def on_inputs(registration: Registration, site: Site, make: Make) -> None:
    """Hook the gradients of the tensors that a module takes, as they come through this module alone."""
    open_calls: dict[int, list[InputUses]] = {}
    registration.forward_pre(
        site, _begin_call(registration, make, open_calls), counts="input gradient"
    )
    registration.forward(site, _end_call(open_calls), always_call=True)


def _begin_call(
    registration: Registration, make: Make, open_calls: dict[int, list[InputUses]]
) -> Make:
    def make_pre(record: HookRecord) -> Callable[..., Any]:
        gradient = make(record)

        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            uses = InputUses(registration)
            open_calls.setdefault(threading.get_ident(), []).append(uses)
            return uses.begin((args, kwargs), lambda _: gradient)

        return hook

    return make_pre


def _end_call(open_calls: dict[int, list[InputUses]]) -> Make:
    def make_forward(record: HookRecord) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            record.fired += 1
            opened = open_calls.get(threading.get_ident())
            if opened:
                opened.pop().end()

        return hook

    return make_forward
