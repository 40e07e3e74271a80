"""The life of each block in a recording: which module saved it, and where its bytes were until it was freed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ._levels import Level, levels_of

__all__ = ["RECOMPUTED", "UNKNOWN", "Lives", "ModuleUse", "Move", "lives_of"]

UNKNOWN = "(no module known)"
RECOMPUTED = "(in backward) "


@dataclass(frozen=True, slots=True)
class ModuleUse:
    """What one module's own operations saved, in the whole recording."""

    path: str
    """The module's path, or ``"(no module known)"``. If tensors were saved while backward ran, for example by a
    recomputation, ``"(in backward) "`` precedes the path, which begins at the recomputed part, not at the
    model."""
    blocks: int
    """Number of saved blocks."""
    saved_bytes: int
    """Bytes of the blocks."""
    down_bytes: int
    """Bytes of the blocks whose memory was freed after they were written to a lower tier."""
    uses: int
    """Number of times that backward used one of the blocks."""
    stall_seconds: float
    """Seconds that backward waited for the blocks. Forward waits for free space, and its waits belong to no
    module."""
    packed_bytes: int = 0
    """Bytes of the packed blocks, before packing."""
    payload_bytes: int = 0
    """Bytes of these blocks after packing."""
    recomputed_bytes: int = 0
    """Bytes of the blocks that were discarded, to be recomputed."""
    made_again_seconds: float = 0.0
    """Seconds of unpacking and recomputing the blocks, without reads and waits."""


@dataclass(frozen=True, slots=True)
class Move:
    """A change of where the bytes of one block are."""

    seconds: float
    """The time of the change, by ``time.perf_counter()``."""
    path: str
    """The path of the module that saved the block."""
    memory_bytes: int
    """Change of the bytes in the memory of the tensors' own device."""
    down_bytes: int
    """Change of the bytes that are only in a lower tier."""
    packed_bytes: int = 0
    """Change of the bytes freed by packing."""
    recomputed_bytes: int = 0
    """Change of the bytes discarded, to be recomputed."""


@dataclass(frozen=True, slots=True)
class Lives:
    """Where the blocks of a recording were, and sums over them."""

    modules: tuple[ModuleUse, ...]
    """Sums by module, most saved bytes first."""
    moves: tuple[Move, ...]
    """All changes, in order of time."""
    paths: dict[int, str]
    """The path of the module that saved each block, by the block's number."""
    peak_bytes: int
    """Most bytes that were saved and not yet freed at the same time, on any tier: without a stash, all of them
    would have been in memory. Copies that were read back do not count again."""
    recomputed_bytes: int
    """Bytes saved while backward ran."""
    levels: tuple[Level, ...]
    """The bytes in each tier after every change."""


class _Block:
    __slots__ = ("down", "dropped", "lost", "nbytes", "path", "saved_bytes")

    def __init__(self, path: str, nbytes: int) -> None:
        self.path, self.nbytes = path, nbytes  # nbytes shrinks when it is packed
        self.saved_bytes = nbytes
        self.down = self.dropped = self.lost = False


def lives_of(events: Sequence[Any]) -> Lives:
    """Follow each block that was saved during the recording; ignore blocks saved before."""
    alive: dict[int, _Block] = {}
    paths: dict[int, str] = {}
    uses: dict[str, list[Any]] = {}
    moves: list[Move | None] = []  # one for each event
    held = peak = recomputed = 0
    for event in events:
        if event.kind == "save":
            path = paths[event.block] = _path_of(event)
            alive[event.block] = _Block(path, event.nbytes)
            use = uses.setdefault(path, [0, 0, 0, 0, 0.0, 0, 0, 0, 0.0])
            use[0] += 1
            use[1] += event.nbytes
            held += event.nbytes
            peak = max(peak, held)
            recomputed += event.nbytes if event.cause == "backward" else 0
            moves.append(Move(event.seconds, path, event.nbytes, 0))
        elif event.block in alive:
            block = alive[event.block]
            _count(event, block, uses[block.path])
            moves.append(_move(event, block))
            if event.kind == "free":
                held -= alive.pop(event.block).saved_bytes
        else:
            moves.append(None)
    modules = [ModuleUse(path, *counts) for path, counts in uses.items()]
    modules.sort(key=lambda each: (-each.saved_bytes, each.path))
    return Lives(
        modules=tuple(modules),
        moves=tuple(filter(None, moves)),
        paths=paths,
        peak_bytes=peak,
        recomputed_bytes=recomputed,
        levels=levels_of(events, moves),
    )


def _count(event: Any, block: _Block, use: list[Any]) -> None:
    if event.kind == "use":
        use[3] += 1
    elif event.kind == "stall":
        use[4] += event.duration_seconds
    elif event.kind == "land":
        use[2] += 0 if block.down else block.nbytes
    elif event.kind == "pack":
        use[5] += block.nbytes
        use[6] += event.nbytes
    elif event.kind == "drop":
        use[7] += block.nbytes
    elif event.kind == "decode":
        use[8] += event.duration_seconds


def _path_of(event: Any) -> str:
    return (RECOMPUTED if event.cause == "backward" else "") + (event.module or UNKNOWN)


def _move(event: Any, block: _Block) -> Move | None:
    """Return how ``event`` changes where the bytes of ``block`` are; ``None`` if it does not."""
    nbytes, path, at = block.nbytes, block.path, event.seconds
    if event.kind == "land" and not block.down:
        block.down = True
        return Move(at, path, -nbytes, nbytes)
    if event.kind == "return" and block.down:
        block.down = False
        return Move(at, path, nbytes, -nbytes)
    if event.kind == "pack":
        block.nbytes = event.nbytes
        return Move(at, path, event.nbytes - nbytes, 0, nbytes - event.nbytes)
    if event.kind == "drop" and not (block.down or block.lost):
        block.dropped = True
        return Move(at, path, -nbytes, 0, 0, nbytes)
    if event.kind == "lose" and not (block.down or block.lost):
        block.lost = True
        return Move(at, path, -nbytes, 0)
    if event.kind == "free" and not (block.lost and nbytes == block.saved_bytes):
        freed = block.saved_bytes - nbytes  # by packing
        held = 0 if block.lost else nbytes
        if block.dropped:
            return Move(at, path, 0, 0, -freed, -held)
        return Move(at, path, 0, -held, -freed) if block.down else Move(at, path, -held, 0, -freed)
    return None
