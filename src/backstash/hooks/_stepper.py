"""Steps parameters as their gradients become complete."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch

from ..errors import UsageError
from ._clock import BackwardClock
from ._registration import HookRecord, Make
from ._step_guards import refuse_scaler

__all__ = ["Stepper"]


class Stepper:
    """The optimizers, and the backwards since the caller last called ``step()``."""

    __slots__ = ("_allow", "_clock", "_marked", "_unchecked", "optimizers")

    def __init__(
        self, optimizers: Mapping[str, torch.optim.Optimizer], allow: Collection[str]
    ) -> None:
        self.optimizers = dict(optimizers)
        self._allow = frozenset(allow)
        self._unchecked = "scaler" not in self._allow
        self._clock = BackwardClock(on_begin=self._begin, on_end=lambda: None)
        self._marked: int | None = None

    def _begin(self) -> None:
        # Once more, at the first backward: training scripts often make their scaler last.
        if self._unchecked:
            refuse_scaler()
            self._unchecked = False
        if self._marked is not None and self._clock.backwards > self._marked:
            self._refuse_accumulation(self._clock.backwards - self._marked + 1)

    def _refuse_accumulation(self, backwards: int) -> None:
        if "accumulation" in self._allow:
            return
        raise UsageError(
            f"step_in_backward: {backwards} backwards for one step(); each backward steps at once, so this is "
            "no gradient accumulation but that many steps; use a larger batch with checkpointing, or pass "
            'allow=["accumulation"]'
        )

    def mark(self) -> None:
        """The caller's ``step()``: what backwards there were since the last one are counted."""
        done = self._clock.backwards - (self._marked or 0)
        if done > 1:
            self._marked = self._clock.backwards
            self._refuse_accumulation(done)
        self._marked = self._clock.backwards

    def hook(self, path: str) -> Make:
        """The hook that steps one parameter."""
        optimizer = self.optimizers[path]
        clock = self._clock

        def make(record: HookRecord) -> Callable[[torch.Tensor], None]:
            def hook(parameter: torch.Tensor) -> None:
                record.fired += 1
                if not clock.running:
                    clock.begin()
                optimizer.step()
                parameter.grad = None

            return hook

        return make
