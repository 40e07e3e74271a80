"""Whether one compiled graph saves most of a step: its backward asks for all of that at once.

``torch.compile`` makes one node of a graph, and a node unpacks everything it saved before it runs. So what a
model that was compiled whole saved comes back together, and the peak is what it was. Compiled block by block
there is a node for each block.
"""

from __future__ import annotations

from collections.abc import Callable

from .block import Block

__all__ = ["COMPILED_NODE", "WholeGraph"]

COMPILED_NODE = "CompiledFunctionBackward"
"""What AOTAutograd calls the node of a compiled graph, in torch 2.11 to 2.15; of others nothing is said."""


class WholeGraph:
    """Adds up what the compiled node that runs has asked for.

    It is not locked: two threads' backwards may mix, and then only a hint is missed, or given for both.

    Args:
        held: how many bytes of saved tensors there are at present, wherever they are.
        window_bytes: what may come back at once anyway.
    """

    __slots__ = ("_blocks", "_held", "_held_bytes", "_nbytes", "_node", "_window_bytes", "is_said")

    def __init__(self, held: Callable[[], int], window_bytes: int) -> None:
        self.is_said = False
        self._held, self._window_bytes = held, window_bytes
        self._node = self._held_bytes = self._nbytes = 0
        self._blocks: set[int] = set()

    def has_most(self, node: object, block: Block) -> bool:
        """Whether with ``block`` the node has asked for more than the window, and half of what was held when
        it began. True once."""
        if id(node) != self._node:
            self._node, self._nbytes, self._held_bytes = id(node), 0, self._held()
            self._blocks.clear()
        if id(block) not in self._blocks:  # which live as long as the node does
            self._blocks.add(id(block))
            self._nbytes += block.nbytes
        self.is_said = self._nbytes > max(self._window_bytes, self._held_bytes // 2)
        return self.is_said
