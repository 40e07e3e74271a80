"""What a drawing is made of: plain facts, which hold no tensor and no node of the graph."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "SAVED_ABOVE",
    "DrawnEdge",
    "DrawnGraph",
    "DrawnGroup",
    "DrawnLeaf",
    "DrawnNode",
    "DrawnTensor",
    "Place",
]

SAVED_ABOVE = "saved above"
"""What a saved tensor is the same as, whose memory an earlier node saved already."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place, and how much of something is there."""

    where: str
    """``"in place"``, ``"keep"``, ``"host"``, ``"disk"``, ``"compressed"``, ``"recomputed"``, ``"freed"``,
    ``"hooks"`` for what only its hooks can read, or what whoever packed it calls it."""
    count: int
    """How many tensors."""
    nbytes: int
    """Bytes of their elements, where they are known."""


@dataclass(frozen=True, slots=True)
class DrawnTensor:
    """A saved tensor of a node; or several alike, where nodes were folded."""

    name: str
    """The operation's own name for it, ``"result"``; of several unlike ones, how many there are."""
    shape: tuple[str, ...] | None
    """Its sizes; ``None`` where it is not known, or not the same for all."""
    dtype: str
    """``"float32"``; ``""`` where it is not known."""
    count: int
    """How many saved tensors this stands for."""
    nbytes: int
    """Bytes of their elements, where they are known."""
    unknown: int
    """How many of them have bytes that are not known."""
    places: tuple[Place, ...]
    """Where they live now, most bytes first."""
    same_as: str
    """The leaf whose memory it is, or ``"saved above"`` where that memory was counted before; else ``""``."""


@dataclass(frozen=True, slots=True)
class DrawnLeaf:
    """A leaf inside the box of a module that is not opened; or several."""

    name: str
    """Its name from the module on, ``"weight"``; or how many there are."""
    shape: tuple[str, ...] | None
    """Its sizes; ``None`` where they are not the same for all."""
    dtype: str
    """Its element type."""
    count: int
    """How many leaves this stands for."""
    nbytes: int
    """Their bytes."""
    is_parameter: bool
    """Whether all are ``nn.Parameter``."""


@dataclass(frozen=True, slots=True)
class DrawnNode:
    """A box."""

    kind: str
    """``"operation"``, ``"parameter"``, ``"leaf"``, ``"output"``; ``"module"`` for a module that is drawn as
    one box, ``"folded"`` for nodes that were left out."""
    label: str
    """What is written large: the operation without ``Backward0``, a leaf's name, a module's path."""
    name: str
    """The node's own name, ``"MulBackward0"``; ``""`` where the box is not one operation."""
    module: str
    """The path of the module that made it, or ``""``."""
    shape: tuple[str, ...] | None
    """The sizes of the (first) tensor it made; ``None`` where that is not known or not the same for all."""
    dtype: str
    """The element type of that tensor, or ``""``."""
    detail: str
    """What else is written in the box: how many nodes, of which kinds."""
    nodes: int
    """How many nodes of the graph this box stands for, its leaves included."""
    leaves: tuple[DrawnLeaf, ...]
    """The leaves in it, which nothing else uses; none where it is one operation or a leaf itself."""
    repeats: int
    """How many times the same thing is there: 1, unless it was folded by itself."""
    tensors: tuple[DrawnTensor, ...]
    """What it saved."""
    nbytes: int
    """A leaf's bytes, or those of all the leaves in the box."""


@dataclass(frozen=True, slots=True)
class DrawnEdge:
    """What one box made and another used, in the direction of forward."""

    source: int
    """The place of a box in ``Drawing.nodes``."""
    target: int
    """The place of the box that used it."""
    output: int | None
    """Which output of ``source`` it is, where ``source`` has several that are used."""
    count: int
    """How many edges of the graph this one stands for."""
    label: str
    """What is written beside it, or ``""``."""


@dataclass(frozen=True, slots=True)
class DrawnGroup:
    """A frame around boxes, and around smaller frames."""

    title: str
    """The module's path and class, or how many times what is inside is repeated."""
    module: str
    """The path, of the first one where it is repeated; ``""`` without a module."""
    parent: int | None
    """The place of the frame around it in ``Drawing.groups``; it comes before this one."""
    nodes: tuple[int, ...]
    """The boxes that lie directly in it, by place in ``Drawing.nodes``."""
    repeats: int
    """How many times what is inside is there."""
    chained: bool
    """Whether each time uses what the one before made; else they stand side by side."""


@dataclass(frozen=True, slots=True)
class DrawnGraph:
    """A graph as it is drawn: what SVG and DOT are made from."""

    nodes: tuple[DrawnNode, ...]
    """The boxes: those of nodes in the order of forward, then leaves, then outputs."""
    edges: tuple[DrawnEdge, ...]
    """From what makes something to what uses it."""
    groups: tuple[DrawnGroup, ...]
    """The frames, outer ones first."""
    notes: tuple[str, ...]
    """What was folded, inferred, or cannot be known, in sentences."""
    color_by: str
    """What colours tell: ``"where"``, ``"module"``, ``"dtype"`` or ``"bytes"``."""
    graph_nodes: int
    """How many nodes the graph has, leaves included."""
    saved: int
    """How many tensors are saved in it."""
    saved_bytes: int
    """Bytes of their elements, as often as they are saved, where they are known."""
    unique_bytes: int
    """The same with shared memory counted once and leaves' memory left out."""
    leaf_bytes: int
    """Memory of leaves that is saved: it would be there without a graph too."""
    places: tuple[Place, ...]
    """Where the saved tensors live now, most bytes first."""
