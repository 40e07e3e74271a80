"""Ending a forward early."""

from __future__ import annotations

import threading
from collections.abc import Iterable

__all__ = ["StopForward", "Stopper"]


class StopForward(BaseException):
    """Leaves a forward after the last wanted module. Caught by the capture that raised it.

    Not an ``Exception``: models catch those.
    """

    def __init__(self, stopper: Stopper) -> None:
        super().__init__("capture(stop=True) ended this forward; it should have been caught")
        self.stopper = stopper


class Stopper:
    """Raises :class:`StopForward` when every wanted module was called, if someone will catch it."""

    __slots__ = ("_paths", "_pending", "_thread")

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = frozenset(paths)
        self._pending = set(self._paths)
        self._thread: int | None = None

    def arm(self) -> None:
        """From now on, this thread's forward ends when every module was called."""
        self._pending = set(self._paths)
        self._thread = threading.get_ident()

    def disarm(self) -> None:
        """From now on, no forward ends."""
        self._thread = None

    def called(self, path: str) -> None:
        """One of the modules was called."""
        # Another thread's exception would never reach the with block: replicas run to their end.
        if self._thread != threading.get_ident():
            return
        self._pending.discard(path)
        if not self._pending:
            raise StopForward(self)

    def raised(self, error: BaseException | None) -> bool:
        """Whether ``error`` is this one's own."""
        return isinstance(error, StopForward) and error.stopper is self
