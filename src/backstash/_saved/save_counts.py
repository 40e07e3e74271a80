"""Predict how often one memory is saved in a step, so that its block is evicted after the last save.

The program holds a tensor until it saves it for the last time, so evicting its block sooner frees nothing. A
block that is still in place when its memory is saved again needs no comparison: it is the same memory, even if
something wrote to it without raising the version. So a block that is expected to be saved again stays in place
and counts toward no budget. A block is identified by its module and by its number among that module's blocks
in this pass. The prediction is the most saves that any pass has shown. If that is too many, the block is
evicted when the program frees the tensor.

A wrong prediction costs bytes that are moved a second time; results do not change.
"""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["BlockSaves", "SaveCounts"]

_MOST_BLOCKS = 1 << 20  # of one module in a pass; later blocks are not counted
_MOST_MODULES = 1 << 16  # of which the saves are remembered
_MOST_SAVES = 255  # of one block; more are counted as this many
_NO_HISTORY = bytearray()


class BlockSaves:
    """The saves of one block's memory: how many there were, and how many are expected."""

    __slots__ = ("done", "expected", "history", "number")

    def __init__(self) -> None:
        self.done = 1
        self.expected = 0  # 0: unknown
        self.number = 0  # among the blocks of its module in this pass
        self.history = _NO_HISTORY  # of its module

    @property
    def are_as_expected(self) -> bool:
        """Whether the memory was saved as often as expected, so that no other save will follow."""
        return self.done == self.expected


class _Counted(Protocol):
    """The attributes of a block that :class:`SaveCounts` uses."""

    saves: BlockSaves
    cleanup: Any


class SaveCounts:
    """Learn the most saves of each block. The caller holds the stash's lock.

    A block's ``saves.expected`` is the expected number of its saves. Where this class does not know it, it is
    0, or a number that the caller assumes.
    """

    def __init__(self) -> None:
        # By the outermost running module and the path of the innermost one in it: the saves of each block in
        # turn, and how many blocks this pass has had.
        self._histories: dict[tuple[int, str], bytearray] = {}
        self._begun: dict[tuple[int, str], int] = {}
        self._pass = 0

    def begin(self, block: _Counted, in_pass: int, root: int = 0) -> None:
        """Add a new block, which was saved once so far.

        Args:
            block: the block.
            in_pass: the number of its pass.
            root: identifies the outermost module that runs. A program may call many of one class, in which the
                paths are the same.
        """
        if in_pass != self._pass:
            self._pass = in_pass
            self._begun.clear()
            if len(self._histories) > _MOST_MODULES:
                self._histories.clear()
        module = root, block.cleanup.module
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
        """Record that the memory of ``block`` was saved once more."""
        saves = block.saves
        done = saves.done = saves.done + 1
        history, number = saves.history, saves.number
        if number < len(history) and history[number] < done <= _MOST_SAVES:
            history[number] = done

    def instead(self, block: _Counted, gone: _Counted) -> None:
        """Record a new block of the memory whose former block, ``gone``, has left memory."""
        saves, before = block.saves, gone.saves
        saves.done, saves.history, saves.number = before.done, before.history, before.number
        self.again(block)
        saves.expected = before.expected if before.expected >= saves.done else 0
