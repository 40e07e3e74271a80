"""How often one memory is saved in a step: learned, so that a block leaves after its last save, not before.

What is to be saved again is held by the program until then, so moving it sooner frees nothing; and what has
not left when it is saved again is the same memory, whatever was written to it unseen: nothing has to be
compared. So a block that is expected again waits in place, outside the budgets, as the program's own. It is
known by its module and how many of that module's blocks came before it in this pass; the most saves that any
pass has shown are expected. Where that was too many, the block goes when the program lets go of the tensor.

A wrong guess costs bytes that are moved a second time, and nothing else.
"""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["SaveCounts"]

_MOST_BLOCKS = 1 << 20  # of one module in a pass: of more nothing is learned
_MOST_SAVES = 255  # and more count as so many


class _Counted(Protocol):
    """A block, as far as its saves go."""

    saves: int
    expected: int
    history: bytearray
    number_in_module: int
    cleanup: Any


class SaveCounts:
    """Learns the most saves of each block. The caller holds the stash's lock.

    A block's ``expected`` is how many saves of it there will be; where that is not known it is 0, or what the
    caller assumes.
    """

    def __init__(self) -> None:
        self._histories: dict[str, bytearray] = {}  # by module: the saves of each block in turn
        self._begun: dict[str, int] = {}  # by module: how many blocks this pass has had
        self._pass = 0

    def begin(self, block: _Counted, in_pass: int) -> None:
        """A new block, saved once so far. ``in_pass``: the number of the pass that it belongs to."""
        if in_pass != self._pass:
            self._pass = in_pass
            self._begun.clear()
        module = block.cleanup.module
        number = block.number_in_module = self._begun.get(module, 0)
        self._begun[module] = number + 1
        history = self._histories.get(module)
        if history is None:
            history = self._histories[module] = bytearray()
        block.history = history
        if number < len(history):
            block.expected = history[number]
        elif number < _MOST_BLOCKS:
            history.extend(b"\x01" * (number + 1 - len(history)))

    def again(self, block: _Counted) -> None:
        """It was saved once more."""
        saves = block.saves = block.saves + 1
        history, number = block.history, block.number_in_module
        if number < len(history) and history[number] < saves <= _MOST_SAVES:
            history[number] = saves

    def instead(self, block: _Counted, gone: _Counted) -> None:
        """A new block of the memory that ``gone`` was of, which has left."""
        block.saves = gone.saves
        block.history, block.number_in_module = gone.history, gone.number_in_module
        self.again(block)
        block.expected = gone.expected if gone.expected >= block.saves else 0
