"""The record of a save, and the object that autograd holds in place of the tensor."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..._torch.engine import current_node
from ..._torch.node_saves import look
from ..._torch.storages import storage_identity
from ..._torch.tensors import parts_of
from ..._torch.trees import tree_leaves

__all__ = [
    "ADDED",
    "OWNED",
    "Found",
    "RecordedPack",
    "Save",
    "SavedStorage",
    "identities",
    "pieces",
]

ADDED = ("input", "activation")
"""The kinds of storage that a report counts as held for backward."""
OWNED = ("parameter", "buffer")
"""The kinds of storage that the model holds even without backward."""


class SavedStorage:
    """One storage that has elements of saved tensors."""

    __slots__ = ("device", "dropper", "holder", "index", "kind", "nbytes", "saved_bytes", "stays")

    def __init__(self, index: int, nbytes: int, kind: str, device: torch.device) -> None:
        self.index = index  # in the order of first saves
        self.nbytes = nbytes
        self.kind = kind
        self.device = device
        self.saved_bytes = 0  # of the elements of all tensors saved in it
        self.stays = (
            False  # a leaf that gets a gradient, or a view of one: a stash does not move it
        )
        self.holder: Save | None = None  # the first save that holds it
        self.dropper: Save | None = None  # the first save that would recompute it


class Save:
    """The record of one saved tensor. It holds no tensor, and refers only weakly to what autograd holds."""

    __slots__ = (
        "boundary",
        "device",
        "dtype",
        "held",
        "is_saved",
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
        self.op = ""  # the node's name, once known
        self.name = ""  # the node's name for the tensor, once known
        self.shape = None if tensor.is_nested else tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.nbytes = nbytes
        self.stored: tuple[SavedStorage, ...] = ()
        self.where = "in place"
        self.is_saved = True  # False if a checkpoint discarded it and will recompute it
        # "checkpoint" or "reentrant checkpoint" for a tensor that one saved as the start of a recomputation.
        self.boundary = ""
        # A description of the values, and the bytes that would hold them.
        self.waste: tuple[str, int] | None = None
        self.held: weakref.ref[RecordedPack] | None = None

    def looks_into(self, stored: tuple[SavedStorage, ...]) -> None:
        """Set the storages that contain the elements."""
        self.stored = stored
        for each in stored:
            if not self.is_saved:
                each.dropper = each.dropper or self
            elif each.holder is None:
                each.holder = self

    @property
    def first(self) -> list[SavedStorage]:
        """The storages that this save is the first to hold, or to discard."""
        if self.is_saved:
            return [each for each in self.stored if each.holder is self]
        return [each for each in self.stored if each.dropper is self]

    @property
    def kind(self) -> str:
        """The kind of its storage; ``"view"`` for an activation's storage that was saved before."""
        kind = self.stored[0].kind if self.stored else "activation"
        return "view" if kind == "activation" and self.stored and not self.first else kind

    @property
    def unique_bytes(self) -> int:
        """Bytes held because of this save and of no earlier one, without parameters and buffers."""
        return sum(each.nbytes for each in self.first if each.kind in ADDED) if self.is_saved else 0

    @property
    def recomputed_bytes(self) -> int:
        """Bytes of activations that a checkpoint discarded here and that no other save holds."""
        if self.is_saved:
            return 0
        gone = (each for each in self.first if each.kind == "activation" and each.holder is None)
        return sum(each.nbytes for each in gone)

    def update(self) -> None:
        """Set ``where`` to the current place; after backward has freed the tensor, leave it."""
        packed = self.held() if self.held is not None else None
        if packed is not None and packed.storages:  # without storages, no hook pair holds it
            self.where = packed.where()


class Found:
    """Everything that a report has recorded."""

    __slots__ = (
        "calls",
        "foreign",
        "has_calls",
        "is_selective",
        "lives",
        "not_looked",
        "saves",
        "transforms",
    )

    def __init__(self) -> None:
        self.saves: list[Save] = []
        # Each save that holds something, with True when it begins and False when it ends, in order.
        self.lives: list[tuple[Save, bool]] = []
        self.calls: Counter[str] = (
            Counter()
        )  # by module, counting calls during which something was saved
        self.has_calls = True  # False if calls could not be distinguished
        self.foreign: dict[str, int] = {}  # bytes that went to foreign pack hooks, by name
        self.is_selective = False  # a checkpoint keeps outputs that no hook sees
        self.transforms = 0  # of torch.func, inside which no hook is allowed
        self.not_looked = 0  # large tensors whose values could not be read


class RecordedPack:
    """What autograd holds in place of a tensor during a report: the object that the surrounding hook pair
    packed."""

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
        self.storages: frozenset[int] = frozenset()  # the saved tensor's, to recognize them
        if save is not None:
            save.held = weakref.ref(self)
            if lives is not None:
                lives.append((save, True))

    def __del__(self) -> None:
        # May run on any thread at any point, so it only appends.
        if self.save is not None and self.lives is not None:
            self.lives.append((self.save, False))

    @property
    def packed_inside(self) -> Any:
        """The object that the pair packed, for readers that do not unpack."""
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
        """Unpack the tensor. The running node is the one that unpacks, so record its name."""
        save = self.save
        if save is not None and not save.op:
            node = current_node()
            save.op = node.name() if node is not None else ""
        return self.unpack(self.value)

    def where(self) -> str:
        """Return the place of the bytes, as far as the packed object describes it."""
        described, where = look(self.value)
        save = self.save
        if save is None or not self.storages or where not in ("in place", "hooks"):
            return where
        tensors = [described] if isinstance(described, Tensor) else _tensors_in(self.value)
        if not tensors:
            return where
        return _place_of(tensors, self.storages, save)


def _tensors_in(packed: Any) -> list[Tensor]:
    """Return the tensors inside a packed object."""
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
    """Yield the storages that a tensor consists of, each with the bytes of the tensor's elements in it.

    There are several for sparse tensors and for subclasses that wrap other tensors; none if the storage cannot
    be seen.
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
    """Return the identities of a tensor's storages, which are unique while the storages are alive."""
    return frozenset(storage_identity(storage) for storage, _ in pieces(tensor))
