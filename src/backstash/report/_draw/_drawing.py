"""``draw``, and the :class:`Drawing` that it returns."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..._text import show_text
from ..._torch.graph_walk import Outputs
from ...errors import UsageError
from ._assemble import assemble
from ._dot import to_dot
from ._drafts import draft
from ._facts import Params, read
from ._outline import to_text
from ._records import DrawnGraph
from ._repeats import find_repeats
from ._svg import to_page, to_svg
from ._tensors import memory_of, notes_on, places_of
from ._tree import choose, grow, inferred_paths

__all__ = ["Drawing", "draw"]

_COLORS = ("where", "module", "dtype", "bytes")


def draw(
    outputs: Outputs,
    params: Params | None = None,
    *,
    show_saved: bool = True,
    depth: int | None = None,
    collapse_repeated: bool = True,
    color_by: Literal["where", "module", "dtype", "bytes"] = "where",
) -> Drawing:
    """Draw the autograd graph that backward from ``outputs`` would run, with the tensors saved in it.

    Boxes are operations, from top to bottom in the order of forward. Leaves are blue (parameters) or violet
    (others), outputs green, and saved tensors orange, each with its shape, its bytes and the place where it
    is stored. ``draw`` unpacks nothing and calls no hook: a tensor on disk is drawn from its description. If
    forward ran under ``backstash.graph.label_modules(model)``, a frame around operations shows the module
    that ran them. Without labels, modules are inferred from the names in ``params``, and ``notes`` says so.

    The graph is read in linear time and without recursion, so it may have any size. It is then folded until
    a person can read it. Modules are opened as deep as there is space, and blocks that repeat are drawn once.
    The middle of a stretch that is still too long becomes one box ("… 99,990 nodes …"). ``notes`` says what
    was folded.

    Args:
        outputs: where backward would start: a tensor, a node (``grad_fn``), a ``GradientEdge``, or several of
            them.
        params: names for leaves: a module (for the names of its parameters and the classes of its modules), a
            dict of name to tensor, or (name, tensor) pairs as ``named_parameters()`` gives them.
        show_saved: draw the saved tensors. Default ``True``.
        depth: how many names of a module's path to open. With 2, ``blocks.0`` is one box; with 0, the whole
            graph is. A drawing has at most about 240 boxes. Default ``None``: as deep as about 60 boxes allow.
        collapse_repeated: draw runs of operations that do the same to the same shapes once, as "12 x Block".
            Default ``True``.
        color_by: what the colours of saved tensors show: ``"where"`` each is stored (default), its
            ``"dtype"``, or its ``"bytes"`` as shades. ``"module"`` colours the boxes by module instead.

    Returns:
        A frozen :class:`Drawing`, with ``to_svg()``, ``to_dot()``, ``to_html()`` and ``save(path)``. A
        notebook shows it as a picture.

    Raises:
        UsageError: ``outputs`` or ``params`` is of another type, ``depth`` is negative or no int, or
            ``color_by`` is unknown.

    >>> import torch
    >>> a, b = (torch.ones(5, requires_grad=True) for _ in range(2))
    >>> drawing = draw(a * b, {"a": a, "b": b})
    >>> [(node.kind, node.label) for node in drawing.nodes]
    [('operation', 'Mul'), ('leaf', 'a'), ('leaf', 'b'), ('output', 'output')]
    >>> [(saved.name, saved.shape, saved.nbytes, saved.same_as) for saved in drawing.nodes[0].tensors]
    [('other', ('5',), 20, 'b'), ('self', ('5',), 20, 'a')]
    """
    if color_by not in _COLORS:
        allowed = ", ".join(f'"{each}"' for each in _COLORS)
        raise UsageError(f"color_by={color_by!r}: allowed are {allowed}")
    if depth is not None and (type(depth) is not int or depth < 0):
        raise UsageError(f"depth={depth!r}: allowed is an int from 0 on, or None")
    facts = read(outputs, params)
    paths = [op.path for op in facts.ops]
    inferred = False
    if not facts.labelled:
        paths = inferred_paths(facts)
        inferred = any(paths)
    root = grow(paths)
    if collapse_repeated:
        find_repeats(root, facts)
    choice = choose(root, facts, depth)
    drafts = draft(choice.root, facts.classes)
    nodes, edges, groups = assemble(
        facts, drafts, show_saved=show_saved, by_dtype=color_by == "dtype"
    )
    unique_bytes, leaf_bytes = memory_of(facts)
    held = list(facts.held())
    return Drawing(
        nodes=tuple(nodes),
        edges=tuple(edges),
        groups=tuple(groups),
        notes=notes_on(facts, choice, inferred=inferred),
        color_by=color_by,
        graph_nodes=len(facts.ops) + len(facts.leaves),
        saved=len(held),
        saved_bytes=sum(each.nbytes or 0 for each in held),
        unique_bytes=unique_bytes,
        leaf_bytes=leaf_bytes,
        places=places_of(held),
    )


@dataclass(frozen=True, slots=True, repr=False)
class Drawing(DrawnGraph):
    """An autograd graph as boxes, edges and frames, which can be written as text, DOT, SVG or HTML.

    It holds no tensor and no node, so it keeps no memory of the graph alive. SVG and HTML need Graphviz's
    command ``dot``. A notebook shows the picture, or the text where there is no ``dot``.
    """

    def to_text(self) -> str:
        """Return the drawing as text: a line for each frame, box and saved tensor. ``print`` shows it."""
        return to_text(self)

    def to_dot(self) -> str:
        """Return the drawing in the DOT language; ``dot -Tpdf`` renders it."""
        return to_dot(self)

    def to_svg(self) -> str:
        """Return the drawing as SVG text, without external fonts, style sheets or addresses.

        Raises:
            UsageError: Graphviz's command ``dot`` is not installed, or it failed.
        """
        return to_svg(self)

    def to_html(self) -> str:
        """Return the drawing as the text of one HTML page, without scripts and without requests.

        Raises:
            UsageError: Graphviz's command ``dot`` is not installed, or it failed.
        """
        return to_page(self)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the drawing to ``path`` in the format of its suffix: ``.txt``, ``.dot``, ``.svg`` or ``.html``.

        An existing file is replaced. ``.gv`` and ``.htm`` mean DOT and HTML too.

        Returns:
            The path.

        Raises:
            UsageError: the suffix is another one, or the format needs Graphviz, which is not installed.
                Nothing was written.
        """
        file = Path(path)
        make = {".svg": self.to_svg, ".html": self.to_html, ".htm": self.to_html}
        make |= {".txt": self.to_text, ".dot": self.to_dot, ".gv": self.to_dot}
        if file.suffix.lower() not in make:
            raise UsageError(
                f"save({os.fspath(path)!r}): allowed are names that end in .svg, .html, .dot or .txt; other "
                "formats come from the .dot by Graphviz"
            )
        file.write_text(make[file.suffix.lower()](), encoding="utf-8")
        return file

    _repr_pretty_ = show_text

    def _repr_html_(self) -> str | None:
        try:
            return f'<div style="overflow:auto;max-height:80vh">{self.to_svg()}</div>'
        except UsageError:
            return None  # the notebook shows the text

    def __repr__(self) -> str:
        return f"<Drawing of {self.graph_nodes:,} nodes as {len(self.nodes):,} boxes; print() shows it>"

    def __str__(self) -> str:
        return to_text(self)
