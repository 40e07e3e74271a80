"""What a step depends on, in addition to its arguments: random numbers, autocast, kernel settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._recompute import settings

__all__ = ["RandomState", "Surroundings"]


@dataclass(frozen=True, slots=True)
class RandomState:
    """The states of torch's random number generators, for the CPU and for some devices."""

    cpu: Tensor
    """The state of the CPU's generator."""
    devices: tuple[tuple[torch.device, Tensor], ...]
    """The states of the devices' generators."""

    def restore(self) -> None:
        """Restore these states."""
        torch.set_rng_state(self.cpu)
        for device, state in self.devices:
            torch.get_device_module(device).set_rng_state(state, device)


class Surroundings:
    """The present autocast state and settings, and the devices whose random numbers count."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._devices = list(
            dict.fromkeys(
                each.device for each in tensors if each.device.type not in ("cpu", "meta")
            )
        )
        self._settings = settings.now(on_accelerator=bool(self._devices))
        kinds = ["cpu", *dict.fromkeys(device.type for device in self._devices)]
        self._cache = torch.is_autocast_cache_enabled()
        self._autocast: list[dict[str, Any]] = [
            {
                "device_type": kind,
                "dtype": torch.get_autocast_dtype(kind),
                "enabled": torch.is_autocast_enabled(kind),
            }
            for kind in kinds
            if torch.amp.autocast_mode.is_autocast_available(kind)
        ]

    def random_state(self) -> RandomState:
        """Return the present states of the random number generators."""
        return RandomState(
            torch.get_rng_state(),
            tuple(
                (each, torch.get_device_module(each).get_rng_state(each)) for each in self._devices
            ),
        )

    @property
    def casts_are_cached(self) -> bool:
        """Whether autocast caches one cast of a weight for all its uses."""
        return self._cache and any(each["enabled"] for each in self._autocast)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """A context with gradients enabled and with the recorded autocast state, without its cache."""
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for each in self._autocast:
                if each["enabled"] or torch.is_autocast_enabled(each["device_type"]):
                    stack.enter_context(torch.autocast(**each, cache_enabled=False))
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Like :meth:`entered`, also with the recorded settings. Restores the random numbers at the end."""
        before = self.random_state()
        try:
            with settings.put(self._settings), self.entered():
                yield
        finally:
            before.restore()
