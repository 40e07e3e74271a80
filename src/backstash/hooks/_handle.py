"""The handle that every registration returns."""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import TypeVar

from .._text import clean, html_text
from ..errors import UsageError
from ._distributed import Reduction
from ._errors import HookWarning
from ._registration import HookRecord, Registration

__all__ = ["GradientHooks", "Handle"]


_SHOWN = 8
_H = TypeVar("_H", bound="Handle")


class Handle:
    """Hooks that stay registered until ``remove()`` is called or the ``with`` block ends.

    The call that returns the handle has registered all of its hooks; a call that raises has registered
    none. ``remove()`` removes these hooks and no others, and may be called again. Unless an exception is
    propagating, a :class:`HookWarning` names the hooks that never fired when they are removed.
    """

    __slots__ = ("_each", "_registration", "_removed")

    def __init__(self, registration: Registration, *, each: bool = True) -> None:
        self._registration = registration
        self._each = each
        self._removed = False

    @property
    def removed(self) -> bool:
        """Whether the hooks were removed."""
        return self._removed

    @property
    def never_fired(self) -> tuple[str, ...]:
        """The paths whose hooks have not fired yet."""
        records = self._registration.records
        return tuple(dict.fromkeys(r.path or "(model)" for r in records if not r.fired))

    def remove(self) -> None:
        """Remove the hooks; calling it again does nothing."""
        self._remove(None)

    def __enter__(self: _H) -> _H:
        if self._removed:
            owner = self._registration.owner
            raise UsageError(f"this {owner} handle was removed; call {owner}(...) again")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        return self._remove(error)

    def _remove(self, error: BaseException | None) -> bool:
        if self._removed:
            return False
        self._removed = True
        try:
            ended = self._finish(error)
        finally:
            self._registration.remove()
        silent = self._expected() if error is None or ended else []
        if silent:
            warnings.warn(self._complaint(silent), HookWarning, stacklevel=3)
        return ended

    def __repr__(self) -> str:
        state = "removed" if self._removed else f"{len(self._registration.records)} hooks"
        return f"<{self._registration.owner}: {state}>"

    def _repr_html_(self) -> str:
        return html_text(repr(self))

    def _finish(self, error: BaseException | None) -> bool:
        """Do what comes before the hooks are removed. Return whether to suppress ``error``, which is
        propagating."""
        return False

    def _expected(self) -> list[HookRecord]:
        # A forward need not call every module. With hooks on all modules (each=False) it is normal that some
        # never fire; only if none fired, something is wrong.
        silent = [record for record in self._registration.records if not record.fired]
        return silent if self._each or len(silent) == len(self._registration.records) else []

    def _complaint(self, silent: list[HookRecord]) -> str:
        names = list(dict.fromkeys(clean(f"{r.path or '(model)'} ({r.kind})") for r in silent))
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return (
            f"{self._registration.owner}: never fired: {', '.join(names[:_SHOWN])}{more}. Was the model "
            "called, and backward run, inside the with block? Modules inside a graph compiled before "
            "ignore hooks: call torch.compiler.reset() after registering"
        )


class GradientHooks(Handle):
    """The handle that ``clip_gradients`` and ``edit_gradients`` return."""

    __slots__ = ("note", "reduction")

    def __init__(self, registration: Registration, *, reduction: Reduction, note: str) -> None:
        super().__init__(registration)
        self.reduction = reduction
        """Whether a gradient is changed ``"before"`` or ``"after"`` it is averaged over the processes;
        ``"none"`` for one process, ``"unknown"`` if the model is not a DDP or FSDP module."""
        self.note = note
        """What the hooks do to each gradient, in words."""

    def __repr__(self) -> str:
        reduced = "" if self.reduction == "none" else f"; reduction: {self.reduction}"
        return f"<{self._registration.owner}: {self.note}{reduced}>"
