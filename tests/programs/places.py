"""Where programs run: on the CPU, on an accelerator that is there, or on a simulated one."""

from __future__ import annotations

import random
from typing import Any

import torch

import simulated
from numbered import number_ahead

from .streams import Streams

Step = tuple[str, int, int]


class Place:
    """The CPU."""

    def of(self, steps: list[Step]) -> dict[str, Any]:
        """What a :class:`Run` of a program is made with."""
        return {}

    def races(self) -> list[str]:
        """What two streams read differently since the last call, in words."""
        return []


class Accelerator(Place):
    """The accelerator that is there, and three streams of it."""

    def __init__(self, device: torch.device | None = None) -> None:
        found = device or torch.accelerator.current_accelerator()
        assert found is not None, "there is no accelerator"
        self._device = torch.device(found.type, 0)
        self._runs = 0

    def of(self, steps: list[Step]) -> dict[str, Any]:
        """See :meth:`Place.of`. The same program has the same streams each time."""
        if self._runs % 100 == 0:
            number_ahead(self._device, 100_000)
        self._runs += 1
        seed = random.Random(str(steps)).getrandbits(32)
        return {"device": self._device, "streams": Streams(self._device, seed)}


class Simulated(Accelerator):
    """A simulated accelerator, which this process then has for good.

    Args:
        chance: how likely each look at the device lets a stream do its next work.
        seed: of the chance.
    """

    def __init__(self, chance: float, seed: int) -> None:
        super().__init__(simulated.register())
        self._chance, self._seed = chance, seed

    def of(self, steps: list[Step]) -> dict[str, Any]:
        """See :meth:`Place.of`."""
        simulated.begin(self._chance, self._seed)
        return super().of(steps)

    def races(self) -> list[str]:
        """See :meth:`Place.races`.

        A change in place while a copy down is under way tears the copy, which its version shows; the bytes
        of a copy that was used all the same would be detected by the code that reads them.
        """
        return [each for each in simulated.faults() if not each.startswith("a copy to the host on")]


CPU = Place()
