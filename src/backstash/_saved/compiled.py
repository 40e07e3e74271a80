"""Detect that one compiled graph saves most of a step, so that its backward loads all of it at once.

``torch.compile`` turns its region into one autograd node, and a node unpacks everything it saved before it
runs. If the whole model is compiled as one region, all of its saved tensors are loaded together, and the peak
is as high as without a stash. A model that is compiled block by block has one node for each block.
"""

from __future__ import annotations

from collections.abc import Callable

from .block import Block

__all__ = ["COMPILED_NODE", "WholeGraph"]

COMPILED_NODE = "CompiledFunctionBackward"
"""The name of a compiled graph's node in AOTAutograd (torch 2.11 to 2.15); others are not detected."""


class WholeGraph:
    """Add up the bytes that the running compiled node has unpacked.

    This class takes no lock: the backwards of two threads may mix, and then a hint is missed or given to both.

    Args:
        held: returns the bytes of all saved tensors at present, in any tier.
        window_bytes: how many bytes may be loaded at once in any case.
    """

    __slots__ = ("_blocks", "_held", "_held_bytes", "_nbytes", "_node", "_window_bytes", "is_said")

    def __init__(self, held: Callable[[], int], window_bytes: int) -> None:
        self.is_said = False
        self._held, self._window_bytes = held, window_bytes
        self._node = self._held_bytes = self._nbytes = 0
        self._blocks: set[int] = set()

    def has_most(self, node: object, block: Block) -> bool:
        """Record that ``node`` unpacks ``block``. Return whether the node has now unpacked more than the
        window and more than half of the bytes that were held when it began."""
        if id(node) != self._node:
            self._node, self._nbytes, self._held_bytes = id(node), 0, self._held()
            self._blocks.clear()
        if id(block) not in self._blocks:  # ids stay unique: the node keeps its blocks alive
            self._blocks.add(id(block))
            self._nbytes += block.nbytes
        self.is_said = self._nbytes > max(self._window_bytes, self._held_bytes // 2)
        return self.is_said
