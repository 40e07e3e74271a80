"""Where programs run: on the CPU, or on a simulated accelerator."""

from __future__ import annotations

import random
from typing import Any

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


class Simulated(Place):
    """A simulated accelerator, which this process then has for good, and three streams of it.

    Args:
        chance: how likely each look at the device lets a stream do its next work.
        seed: of the chance.
    """

    def __init__(self, chance: float, seed: int) -> None:
        self._device = simulated.register()
        self._chance, self._seed = chance, seed
        self._runs = 0

    def of(self, steps: list[Step]) -> dict[str, Any]:
        """See :meth:`Place.of`. The same program has the same streams each time."""
        simulated.begin(self._chance, self._seed)
        if self._runs % 100 == 0:
            number_ahead(self._device, 100_000)
        self._runs += 1
        seed = random.Random(str(steps)).getrandbits(32)
        return {"device": self._device, "streams": Streams(self._device, seed)}

    def races(self) -> list[str]:
        """See :meth:`Place.races`.

        A change in place while a copy down is under way tears the copy, which its version tells; the bytes
        of a copy that was used all the same would be told of by whoever reads them.
        """
        return [each for each in simulated.faults() if not each.startswith("a copy to the host on")]


CPU = Place()
