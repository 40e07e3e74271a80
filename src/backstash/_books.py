"""The books: what is held and what has died, shared by the way down and the way up."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Any

from ._down import Down
from ._events import Tape
from ._order import Order
from ._up import Up

__all__ = ["Books"]


class Books:
    """The lock, the budgets and the queue of what died. Everything but ``is_forked`` wants the lock held."""

    def __init__(self, down: Down, up: Up, grave: deque[Any], lock: Any, tape: Tape) -> None:
        self.down = down
        self.up = up
        self.grave = grave
        self.lock = lock
        self.order = Order()
        self._tape = tape
        self.blocks_alive = 0
        self._pid = self._forked_pid = os.getpid()

    def is_forked(self) -> bool:
        """Whether this is a child process; there the threads are gone, and whoever held the lock."""
        pid = os.getpid()
        if pid != self._forked_pid:
            self._forked_pid = pid
            self.lock = threading.RLock()
            self.up.forked(self.lock)
        return pid != self._pid

    def drain(self) -> None:
        """Settle what died since the last call."""
        running = []
        while self.grave:
            item = self.grave.popleft()
            if type(item) is tuple:
                kept, held, *what = item
                self.blocks_alive -= 1
                self.down.keep_bytes -= kept
                if self._tape.on:
                    self._tape.tell("free", *what)
            else:
                store, slot, writing, held, flown = item
                if writing is not None and not (writing.done() or writing.cancel()):
                    running.append(item)  # its slot is written to until then
                    continue
                if slot is not None:
                    store.release(slot)
                self.down.inflight_bytes -= flown
            self.up.ahead_bytes -= held
        self.grave.extend(running)
