"""Which stream each step of a program runs on, where it runs on an accelerator."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from backstash._saved.view import raw_alias


class Streams:
    """Three streams, by turns of a seed's choice. Each begins after what the one before was asked.

    So a program has no race of its own: its order is the order of its steps, and what a step uses is named to
    the allocator. Which of them its backward runs on autograd decides, as ever.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self._random = random.Random(seed)
        self._first = torch.accelerator.current_stream(device)
        self._all = [self._first, torch.Stream(device), torch.Stream(device)]
        self._now = self._first

    def step(self, *used: Tensor | None) -> None:
        """The next step begins, on this stream or another; ``used`` is what it may read."""
        if self._random.random() < 0.4:
            self._to(self._random.choice(self._all))
        for each in used:
            if each is not None:
                try:
                    raw_alias(each).record_stream(self._now)  # type: ignore[arg-type]
                except (RuntimeError, NotImplementedError):
                    pass  # no memory of its own

    def on_it(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """``function`` on this step's stream, for a thread that has its own."""
        stream = self._now

        def run() -> Any:
            torch.accelerator.set_stream(stream)
            return function()

        return run

    def end(self) -> None:
        """Back to the stream that was current before."""
        if self._now != self._first:
            self._to(self._first)

    def _to(self, stream: Any) -> None:
        stream.wait_stream(self._now)
        torch.accelerator.set_stream(stream)
        self._now = stream
