"""The words for bytes and places, the same in every form of a drawing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...units import format_bytes
from ._records import SAVED_ABOVE, DrawnTensor
from ._text import shortened

if TYPE_CHECKING:
    from ._drawing import Drawing

__all__ = ["bytes_of", "headline", "place_name", "places_of", "same_words"]

_NAMES = {"recomputed": "will be recomputed", "hooks": "known to hooks only"}


def place_name(where: str) -> str:
    """What a place is called."""
    return _NAMES.get(where, where)


def bytes_of(nbytes: int, unknown: int, count: int) -> str:
    """Bytes, or that some or all of them are not known.

    >>> bytes_of(2048, 0, 2), bytes_of(2048, 1, 2), bytes_of(0, 2, 2)
    ('2.00 KiB', '2.00 KiB + ?', '? B')
    """
    if unknown == count and count:
        return "? B"
    return format_bytes(nbytes) + (" + ?" if unknown else "")


def places_of(tensor: DrawnTensor) -> str:
    """Where a saved tensor is; of several, how many are where."""
    if len(tensor.places) == 1:
        return place_name(tensor.places[0].where)
    return ", ".join(f"{place.count:,} {place_name(place.where)}" for place in tensor.places)


def same_words(tensor: DrawnTensor) -> str:
    """Whose memory a saved tensor is, where it is not its own."""
    if tensor.same_as == SAVED_ABOVE:
        return "memory that is saved above too"
    if tensor.same_as == "leaves'":
        return "memory of leaves"
    return f"memory of {shortened(tensor.same_as, 60)}" if tensor.same_as else ""


def headline(drawing: Drawing) -> list[str]:
    """What the graph is, and what it holds, in a few lines."""
    nodes = f"{drawing.graph_nodes:,} node{'s' if drawing.graph_nodes != 1 else ''}"
    if not drawing.saved:
        return [f"Autograd graph: {nodes}, nothing saved"]
    tensors = f"{drawing.saved:,} saved tensor{'s' if drawing.saved != 1 else ''}"
    places = [
        f"{format_bytes(place.nbytes) if place.nbytes else f'{place.count:,}'} "
        f"{place_name(place.where)}"
        for place in drawing.places
    ]
    alone = (
        f"Held by the graph alone, shared memory counted once: {format_bytes(drawing.unique_bytes)}"
    )
    if drawing.leaf_bytes:
        alone += f" ({format_bytes(drawing.leaf_bytes)} more are leaves' own)"
    return [f"Autograd graph: {nodes}, {tensors}", f"Saved: {', '.join(places)}", alone]
