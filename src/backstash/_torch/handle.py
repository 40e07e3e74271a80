"""The handle that a hook registration returns."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeVar

from torch.utils.hooks import RemovableHandle

from .._text import html_text

__all__ = ["Handle"]

_H = TypeVar("_H", bound="Handle")


class Handle(RemovableHandle):
    """A handle for several hooks. ``remove()`` may be called twice; the end of the context calls it, too."""

    def __init__(self, handles: Sequence[RemovableHandle] = ()) -> None:
        self.handles = list(handles)

    def remove(self) -> None:
        """Remove these hooks, and no others."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def __enter__(self: _H) -> _H:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self.handles)} hooks>"

    def _repr_html_(self) -> str:
        return html_text(repr(self))

    def __reduce__(self) -> Any:
        raise TypeError(
            "a handle of hooks cannot be pickled: hooks do not go with a tensor or model"
        )
