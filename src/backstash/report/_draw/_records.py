"""The records that a drawing consists of; they hold no tensor and no node of the graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = [
    "SAVED_ABOVE",
    "DrawnEdge",
    "DrawnGraph",
    "DrawnGroup",
    "DrawnLeaf",
    "DrawnNode",
    "DrawnTensor",
    "Place",
    "agreed",
    "frames_around",
    "path_around",
]

_T = TypeVar("_T")

SAVED_ABOVE = "saved above"
"""``DrawnTensor.same_as`` where an earlier operation saved the same memory."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place where saved tensors are stored, how many are there, and how many bytes."""

    where: str
    """``"in place"``, ``"keep"``, ``"host"``, ``"disk"``, ``"packed"``, ``"compressed"``, ``"recomputed"``,
    ``"freed"``, or ``"hooks"`` if only the hooks that packed the tensor can read it. A packed object may name
    another place in its attribute ``where``."""
    count: int
    """Number of tensors."""
    nbytes: int
    """Bytes of their elements, as far as known."""


@dataclass(frozen=True, slots=True)
class DrawnTensor:
    """A saved tensor of an operation, or several in one row because operations were folded."""

    name: str
    """The operation's own name for it, such as ``"result"``; for several different tensors, their number."""
    shape: tuple[str, ...] | None
    """Its sizes; ``None`` if unknown, or not the same for all."""
    dtype: str
    """Its element type, such as ``"float32"``; ``""`` if unknown, or not the same for all."""
    count: int
    """Number of saved tensors in this row."""
    nbytes: int
    """Bytes of their elements, as far as known."""
    unknown: int
    """Number of tensors whose bytes are unknown."""
    places: tuple[Place, ...]
    """Where they are stored now, most bytes first."""
    same_as: str
    """The leaf whose memory it is; ``"saved above"`` if an earlier operation saved that memory; else ``""``."""


@dataclass(frozen=True, slots=True)
class DrawnLeaf:
    """A leaf inside the box of a module that is not opened, or several in one row."""

    name: str
    """Its name within the module, such as ``"weight"``; or how many leaves there are."""
    shape: tuple[str, ...] | None
    """Its sizes; ``None`` if unknown, or not the same for all."""
    dtype: str
    """Its element type; ``""`` if it is not the same for all."""
    count: int
    """Number of leaves in this row."""
    nbytes: int
    """Bytes of their elements."""
    is_parameter: bool
    """Whether all of them are ``nn.Parameter``."""


@dataclass(frozen=True, slots=True)
class DrawnNode:
    """A box of the drawing."""

    kind: str
    """``"operation"``, ``"parameter"``, ``"leaf"`` or ``"output"``; ``"module"`` for a module that is drawn as
    one box; ``"folded"`` for nodes that were left out."""
    label: str
    """The heading: an operation's name without ``Backward0``, a leaf's name, or a module's path."""
    name: str = ""
    """The node's own name, such as ``"MulBackward0"``, or the leaf's; ``""`` if the box is of several."""
    module: str = ""
    """The path of the module that ran the operation, or ``""``."""
    shape: tuple[str, ...] | None = None
    """The sizes of its first output; ``None`` if unknown, or not the same for all."""
    dtype: str = ""
    """The element type of that output, or ``""``."""
    detail: str = ""
    """The line below the heading: the caller's name for the result, or the number of nodes by kind."""
    nodes: int = 0
    """Number of nodes of the graph that this box stands for, leaves included."""
    leaves: tuple[DrawnLeaf, ...] = ()
    """The leaves in the box, which are not used outside it; empty for one operation and for a leaf itself."""
    repeats: int = 1
    """Number of copies that the box stands for; 1 unless the box itself was folded."""
    tensors: tuple[DrawnTensor, ...] = ()
    """The tensors that it saved."""
    nbytes: int = 0
    """Bytes of the leaf, or of all leaves in the box."""


@dataclass(frozen=True, slots=True)
class DrawnEdge:
    """An edge from the box that made a tensor to a box that used it, in the direction of forward."""

    source: int
    """The index in ``Drawing.nodes`` of the box that made the tensor."""
    target: int
    """The index of the box that used it."""
    output: int | None
    """Which output of ``source`` it is, if several of its outputs are used; else ``None``."""
    count: int
    """Number of edges of the graph that this one stands for."""
    label: str
    """The text next to the edge, or ``""``."""


@dataclass(frozen=True, slots=True)
class DrawnGroup:
    """A frame around boxes and inner frames."""

    title: str
    """The module's path and class, or the number of repetitions of the content."""
    module: str
    """The module's path (for a repeated module, the first copy's); ``""`` without a module."""
    parent: int | None
    """The index in ``Drawing.groups`` of the frame around this one, which comes first; ``None``: no frame."""
    nodes: tuple[int, ...]
    """The indices in ``Drawing.nodes`` of the boxes directly inside."""
    repeats: int
    """How many copies of the content this frame stands for."""
    chained: bool
    """Whether each copy uses what the copy before made; if not, the copies are independent."""


@dataclass(frozen=True, slots=True)
class DrawnGraph:
    """A drawing without its formats: the record that is rendered as SVG, HTML and DOT."""

    nodes: tuple[DrawnNode, ...]
    """The boxes: operations in the order of forward, then leaves, then outputs."""
    edges: tuple[DrawnEdge, ...]
    """The edges, each from the box that made a tensor to a box that used it."""
    groups: tuple[DrawnGroup, ...]
    """The frames, outer ones first."""
    notes: tuple[str, ...]
    """Sentences on what was folded, what was inferred, and what is not known."""
    color_by: str
    """What the colours show: ``"where"``, ``"module"``, ``"dtype"`` or ``"bytes"``."""
    graph_nodes: int
    """How many nodes the graph has, leaves included."""
    saved: int
    """How many tensors are saved in the graph."""
    saved_bytes: int
    """Bytes of their elements, each counted as often as it is saved, as far as they are known."""
    unique_bytes: int
    """Bytes of the memory of saved tensors: shared memory counted once, memory of leaves not at all."""
    leaf_bytes: int
    """Bytes of leaves' memory that are saved; the leaves hold them without a graph too."""
    places: tuple[Place, ...]
    """Where the saved tensors are stored now, the place with the most bytes first."""


def agreed(values: Iterable[_T], otherwise: _T) -> _T:
    """Return the value of a field that all have; if they differ, or there are none, ``otherwise``."""
    found = set(values)
    return found.pop() if len(found) == 1 else otherwise


def frames_around(group: int | None, groups: Sequence[DrawnGroup]) -> tuple[int, ...]:
    """Return a frame and those around it, outermost first."""
    found: list[int] = []
    while group is not None:
        found.append(group)
        group = groups[group].parent
    return tuple(reversed(found))


def path_around(group: int | None, groups: Sequence[DrawnGroup]) -> str:
    """Return the module path of the innermost frame that has one; ``""`` if there is none."""
    paths = (groups[each].module for each in reversed(frames_around(group, groups)))
    return next(filter(None, paths), "")
