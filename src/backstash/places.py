"""The places of saved bytes: their keys, labels and colours, for all tables and pictures.

Events, JSON and style sheets use a place's key; people read its label. Curves and tables show the places in
this order, from the tensors' own memory down.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PLACES", "KnownPlace", "key_of", "label_of"]


@dataclass(frozen=True, slots=True)
class KnownPlace:
    """One place: where bytes are, or why they are not stored anywhere."""

    key: str
    """Its name in events, JSON and style sheets: ``"disk"``."""
    label: str
    """Its text for people: ``"on disk"``."""
    light: str
    """Its colour on a light page, as ``#rrggbb``."""
    dark: str
    """Its colour on a dark page."""
    is_below: bool = False
    """Whether the bytes there are not in the tensors' own memory."""
    alike: tuple[str, ...] = ()
    """Other values of ``where`` that have this colour; their label is the value itself."""


PLACES = {
    place.key: place
    for place in (
        KnownPlace("keep", "kept", "#3b6fb6", "#5b8fd6", alike=("in place",)),
        KnownPlace("inflight", "on the way down", "#e3a02e", "#d9a03f"),
        KnownPlace("ahead", "read back", "#3aa387", "#45ae92"),
        KnownPlace("host", "in host memory", "#8a63b3", "#a583cc", is_below=True),
        KnownPlace("disk", "on disk", "#8a94a3", "#6f7987", is_below=True),
        KnownPlace("packed", "packed", "#6f9f3c", "#8bb552", is_below=True, alike=("compressed",)),
        KnownPlace("recomputed", "to be recomputed", "#c76b98", "#d98bb0", is_below=True),
        KnownPlace("left", "left in place", "#d5d9df", "#3a424c"),
        KnownPlace("freed", "freed", "#ffffff", "#12161c", is_below=True),
        KnownPlace("hooks", "known to hooks only", "#39424f", "#dfe5ec"),
    )
}
"""All places by their keys."""


def label_of(where: str) -> str:
    """Return a place's label; an unknown place is its own label.

    >>> label_of("disk"), label_of("in place"), label_of("on a tape")
    ('on disk', 'in place', 'on a tape')
    """
    return PLACES[where].label if where in PLACES else where


def key_of(where: str) -> str:
    """Return the key of the known place that ``where`` names or mentions; ``"hooks"`` if there is none.

    >>> key_of("disk"), key_of("in place"), key_of("host, compressed"), key_of("on a tape")
    ('disk', 'keep', 'packed', 'hooks')
    """
    if where in PLACES:
        return where
    other = {name: place.key for place in PLACES.values() for name in place.alike}
    return next(
        (key for name, key in (other | {k: k for k in PLACES}).items() if name in where), "hooks"
    )
