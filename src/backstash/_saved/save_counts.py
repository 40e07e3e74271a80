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

__all__ = ["BlockSaves", "SaveCounts"]

_MOST_BLOCKS = 1 << 20  # of one module in a pass: of more nothing is learned
_MOST_SAVES = 255  # and more count as so many
_NO_HISTORY = bytearray()


class BlockSaves:
    """How often one block's memory was saved, and how often it will be."""

    __slots__ = ("done", "expected", "history", "number")

    def __init__(self) -> None:
        self.done = 1
        self.expected = 0  # 0: it is not known
        self.number = 0  # among the blocks of its module in this pass
        self.history = _NO_HISTORY  # of its module

    @property
    def are_as_expected(self) -> bool:
        """Whether it was saved as often as was expected: no other save of it will come."""
        return self.done == self.expected


class _Counted(Protocol):
    """A block, as far as its saves go."""

    saves: BlockSaves
    cleanup: Any


class SaveCounts:
    """Learns the most saves of each block. The caller holds the stash's lock.

    A block's ``saves.expected`` is how many saves of it there will be; where that is not known it is 0, or what
    the caller assumes.
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
        number = block.saves.number = self._begun.get(module, 0)
        self._begun[module] = number + 1
        history = self._histories.get(module)
        if history is None:
            history = self._histories[module] = bytearray()
        block.saves.history = history
        if number < len(history):
            block.saves.expected = history[number]
        elif number < _MOST_BLOCKS:
            history.extend(b"\x01" * (number + 1 - len(history)))

    def again(self, block: _Counted) -> None:
        """It was saved once more."""
        saves = block.saves
        done = saves.done = saves.done + 1
        history, number = saves.history, saves.number
        if number < len(history) and history[number] < done <= _MOST_SAVES:
            history[number] = done

    def instead(self, block: _Counted, gone: _Counted) -> None:
        """A new block of the memory that ``gone`` was of, which has left."""
        saves, before = block.saves, gone.saves
        saves.done, saves.history, saves.number = before.done, before.history, before.number
        self.again(block)
        saves.expected = before.expected if before.expected >= saves.done else 0
