"""The life of each block in a recording: who saved it, when its memory was let go, and when it ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["RECOMPUTED", "UNKNOWN", "Lives", "ModuleUse", "Move", "lives_of"]

UNKNOWN = "(no module known)"
RECOMPUTED = "(in backward) "


@dataclass(frozen=True, slots=True)
class ModuleUse:
    """What one module's own operations saved, over all of a recording."""

    path: str
    """The module's path; ``"(no module known)"`` where nothing said. ``"(in backward) "`` stands before what a
    recomputation saved: there the path begins at the recomputed part and not at the model."""
    blocks: int
    """Blocks saved."""
    saved_bytes: int
    """Their bytes."""
    down_bytes: int
    """Of these, the bytes whose memory was let go because they had gone down."""
    uses: int
    """How often backward was given a view of them."""
    stall_seconds: float
    """How long backward waited for them. Waits of forward belong to no module: it waits for room."""


@dataclass(frozen=True, slots=True)
class Move:
    """A block's bytes begin or cease to be somewhere."""

    seconds: float
    """When."""
    path: str
    """The module that saved it."""
    memory_bytes: int
    """Bytes more, or fewer, in the tensors' own memory."""
    down_bytes: int
    """Bytes more, or fewer, that are below only."""


@dataclass(frozen=True, slots=True)
class Lives:
    """All blocks of a recording, added up."""

    modules: tuple[ModuleUse, ...]
    """The module that saved most is first."""
    moves: tuple[Move, ...]
    """In the order of time."""
    paths: dict[int, str]
    """The path of each block, by its number."""
    peak_bytes: int
    """The most that was saved and still needed at once, wherever it was: without a stash, all of it would have
    been in memory. Copies that were read back are not counted again."""
    recomputed_bytes: int
    """Bytes saved while backward ran."""


class _Block:
    __slots__ = ("down", "lost", "nbytes", "path")

    def __init__(self, path: str, nbytes: int) -> None:
        self.path, self.nbytes = path, nbytes
        self.down = self.lost = False


def lives_of(events: Iterable[Any]) -> Lives:
    """Follow each block that was saved while ``events`` were recorded. Blocks from before are not known."""
    alive: dict[int, _Block] = {}
    paths: dict[int, str] = {}
    uses: dict[str, list[Any]] = {}
    moves: list[Move] = []
    held = peak = recomputed = 0
    for event in events:
        if event.kind == "save":
            path = paths[event.block] = _path_of(event)
            alive[event.block] = _Block(path, event.nbytes)
            use = uses.setdefault(path, [0, 0, 0, 0, 0.0])
            use[0] += 1
            use[1] += event.nbytes
            held += event.nbytes
            peak = max(peak, held)
            recomputed += event.nbytes if event.cause == "backward" else 0
            moves.append(Move(event.seconds, path, event.nbytes, 0))
            continue
        block = alive.get(event.block)
        if block is None:
            continue
        if event.kind == "use":
            uses[block.path][3] += 1
        elif event.kind == "stall":
            uses[block.path][4] += event.duration_seconds
        elif event.kind == "land":
            uses[block.path][2] += 0 if block.down else block.nbytes
        move = _move(event, block)
        if move is not None:
            moves.append(move)
        if event.kind == "free":
            held -= alive.pop(event.block).nbytes
    modules = [ModuleUse(path, *counts) for path, counts in uses.items()]
    modules.sort(key=lambda each: (-each.saved_bytes, each.path))
    return Lives(tuple(modules), tuple(moves), paths, peak, recomputed)


def _path_of(event: Any) -> str:
    return (RECOMPUTED if event.cause == "backward" else "") + (event.module or UNKNOWN)


def _move(event: Any, block: _Block) -> Move | None:
    """What ``event`` means for where the bytes of ``block`` are."""
    nbytes, path, at = block.nbytes, block.path, event.seconds
    if event.kind == "land" and not block.down:
        block.down = True
        return Move(at, path, -nbytes, nbytes)
    if event.kind == "return" and block.down:
        block.down = False
        return Move(at, path, nbytes, -nbytes)
    if event.kind == "lose" and not (block.down or block.lost):
        block.lost = True
        return Move(at, path, -nbytes, 0)
    if event.kind == "free" and not block.lost:
        return Move(at, path, 0, -nbytes) if block.down else Move(at, path, -nbytes, 0)
    return None
