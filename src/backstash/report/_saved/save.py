"""What is written down at a save, and what autograd holds meanwhile."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..._torch.engine import current_node
from ..._torch.node_saves import RECOMPUTED, look
from ..._torch.storages import storage_identity
from ..._torch.tensors import is_view, parts_of
from ..._torch.trees import tree_leaves

__all__ = ["ADDED", "OWNED", "Found", "Packed", "Save", "Stored", "identities", "pieces"]

ADDED = ("input", "activation")
"""The kinds of storage that a report counts: what is there for backward's sake, or is held by it."""
OWNED = ("parameter", "buffer")
"""The kinds that are there without backward too."""


class Stored:
    """One storage that saved tensors look into."""

    __slots__ = ("device", "dropper", "holder", "index", "kind", "nbytes", "saved_bytes", "stays")

    def __init__(self, index: int, nbytes: int, kind: str, device: torch.device) -> None:
        self.index = index  # in the order of first saves
        self.nbytes = nbytes
        self.kind = kind
        self.device = device
        self.saved_bytes = 0  # of all tensors saved that look into it
        self.stays = False  # a leaf that gets a gradient, or a view of one: no stash moves it
        self.holder: Save | None = None  # the first save that holds it
        self.dropper: Save | None = None  # the first that would compute it again


class Save:
    """One saved tensor. It holds no tensor; what autograd holds is known weakly."""

    __slots__ = (
        "boundary",
        "device",
        "dtype",
        "held",
        "is_view",
        "module",
        "name",
        "nbytes",
        "op",
        "shape",
        "stored",
        "waste",
        "where",
    )

    def __init__(self, tensor: Tensor, module: str, nbytes: int) -> None:
        self.module = module
        self.op = ""  # the node's name, once it is known
        self.name = ""  # the node's name for the tensor, likewise
        self.shape = None if tensor.is_nested else tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.is_view = is_view(tensor)
        self.nbytes = nbytes
        self.stored: tuple[Stored, ...] = ()
        self.where = "in place"
        self.boundary = (
            ""  # "checkpoint" or "reentrant checkpoint": saved to compute the rest again
        )
        self.waste: tuple[str, int] | None = (
            None  # what the values would allow, bytes it would take
        )
        self.held: weakref.ref[Packed] | None = None

    def looks_into(self, stored: tuple[Stored, ...]) -> None:
        """These are the storages that hold the elements."""
        self.stored = stored
        for each in stored:
            if not self.is_saved:
                each.dropper = each.dropper or self
            elif each.holder is None:
                each.holder = self

    @property
    def first(self) -> list[Stored]:
        """The storages that no save before held, or dropped."""
        if self.is_saved:
            return [each for each in self.stored if each.holder is self]
        return [each for each in self.stored if each.dropper is self]

    @property
    def kind(self) -> str:
        """``"parameter"``, ``"buffer"``, ``"input"``, ``"activation"``; ``"view"`` for an activation's storage
        that was saved before."""
        kind = self.stored[0].kind if self.stored else "activation"
        return "view" if kind == "activation" and self.stored and not self.first else kind

    @property
    def is_saved(self) -> bool:
        """Whether something is held for it: not so where it will be computed again."""
        return self.where != RECOMPUTED

    @property
    def unique_bytes(self) -> int:
        """Bytes that are held because of this save and of none before; parameters and buffers left out."""
        return sum(each.nbytes for each in self.first if each.kind in ADDED) if self.is_saved else 0

    @property
    def recomputed_bytes(self) -> int:
        """Bytes that were let go here and that no save holds; what forward did not make is not let go."""
        if self.is_saved:
            return 0
        gone = (each for each in self.first if each.kind == "activation" and each.holder is None)
        return sum(each.nbytes for each in gone)

    def update(self) -> None:
        """Where it is now; where it was, if backward has freed it."""
        packed = self.held() if self.held is not None else None
        if packed is not None and packed.storages:  # without any, no pair has it
            self.where = packed.where()


class Found:
    """What was written down, to be read."""

    __slots__ = ("calls", "foreign", "has_calls", "is_selective", "lives", "not_looked", "saves")

    def __init__(self) -> None:
        self.saves: list[Save] = []
        self.lives: list[tuple[Save, bool]] = []  # of each save that holds something: begins, ends
        self.calls: Counter[str] = Counter()  # by module, those in which something was saved
        self.has_calls = True  # False where calls could not be told apart
        self.foreign: dict[str, int] = {}  # bytes that pairs of others took, by the pair's name
        self.is_selective = False  # a checkpoint keeps outputs that no hook sees
        self.not_looked = 0  # tensors whose values could not be looked at


class Packed:
    """What autograd holds in place of a tensor while a report is made: what the pair around it packed."""

    __slots__ = ("__weakref__", "lives", "save", "storages", "unpack", "value")

    def __init__(
        self,
        value: Any,
        unpack: Callable[[Any], Tensor],
        save: Save | None = None,
        lives: list[tuple[Save, bool]] | None = None,
    ) -> None:
        self.value = value
        self.unpack = unpack
        self.save = save
        self.lives = lives
        self.storages: frozenset[int] = frozenset()  # the saved tensor's own, to be found again
        if save is not None:
            save.held = weakref.ref(self)
            if lives is not None:
                lives.append((save, True))

    def __del__(self) -> None:
        # May run on any thread in the middle of anything: it only appends.
        if self.save is not None and self.lives is not None:
            self.lives.append((self.save, False))

    @property
    def packed_inside(self) -> Any:
        """What the pair packed, for whoever looks without unpacking."""
        return self.value

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The saved tensor's sizes."""
        return self.save.shape if self.save is not None else None

    @property
    def dtype(self) -> torch.dtype | None:
        """The saved tensor's element type."""
        return self.save.dtype if self.save is not None else None

    @property
    def device(self) -> torch.device | None:
        """The saved tensor's device."""
        return self.save.device if self.save is not None else None

    def get(self) -> Tensor:
        """The tensor; its operation is known now, since it runs."""
        save = self.save
        if save is not None and not save.op:
            node = current_node()
            save.op = node.name() if node is not None else ""
        return self.unpack(self.value)

    def where(self) -> str:
        """Where the bytes are, as far as what the pair packed tells."""
        described, where = look(self.value)
        save = self.save
        if save is None or not self.storages or where not in ("in place", "hooks"):
            return where
        tensors = [described] if isinstance(described, Tensor) else tensors_in(self.value)
        if not tensors:
            return where
        return _place_of(tensors, self.storages, save)


def tensors_in(packed: Any) -> list[Tensor]:
    """The tensors that are seen in what a pair packed."""
    while hasattr(packed, "packed_inside"):
        packed = packed.packed_inside
    return [leaf for leaf in tree_leaves(packed) if isinstance(leaf, Tensor)]


def _place_of(tensors: list[Tensor], storages: frozenset[int], save: Save) -> str:
    if any(storages & identities(each) for each in tensors):
        return "in place"
    if save.device.type != "cpu" and all(each.device.type == "cpu" for each in tensors):
        return "host"
    held = sum(nbytes for each in tensors for _, nbytes in pieces(each))
    return "compressed" if held < save.nbytes else "copied"


def pieces(tensor: Tensor) -> Iterator[tuple[torch.UntypedStorage, int]]:
    """The storages that a tensor is made of, each with the bytes of the elements in it.

    Several for sparse tensors and for subclasses that are made of others; none for what has no storage that
    can be seen.
    """
    try:
        inner = parts_of(tensor)
        if inner is None:
            storage = tensor.untyped_storage()
            nbytes = (
                storage.nbytes() if tensor.is_nested else tensor.numel() * tensor.element_size()
            )
            yield storage, nbytes
            return
    except (NotImplementedError, RuntimeError):
        return
    for each in inner:
        yield from pieces(each)


def identities(tensor: Tensor) -> frozenset[int]:
    """What tells a tensor's storages from all others that are alive."""
    return frozenset(storage_identity(storage) for storage, _ in pieces(tensor))
