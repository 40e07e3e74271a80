"""The handle of hooks that change gradients."""

from __future__ import annotations

from ._distributed import Reduction
from ._handle import Handle
from ._registration import Registration

__all__ = ["GradientHooks"]


class GradientHooks(Handle):
    """What ``clip_gradients`` and ``edit_gradients`` return."""

    __slots__ = ("note", "reduction")

    def __init__(self, registration: Registration, *, reduction: Reduction, note: str) -> None:
        super().__init__(registration)
        self.reduction = reduction
        """Whether the gradients are changed ``"before"`` or ``"after"`` the processes' are averaged;
        ``"none"`` for one process, ``"unknown"`` if the model is not the DDP or FSDP module."""
        self.note = note
        """What is done, in words."""

    def __repr__(self) -> str:
        reduced = "" if self.reduction == "none" else f"; reduction: {self.reduction}"
        return f"<{self._registration.owner}: {self.note}{reduced}>"

    def _finish(self, error: BaseException | None) -> bool:
        return False
