"""What the forwards of a region share: what was compared, routes, and samples of discarded tensors."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._core.admission import Admission
from .._core.session import Session
from .._device.base import Device
from .._device.fingerprint import fingerprint
from .._plan.cuts import CallGraph
from .._saved.view import dense, extent_bytes, raw_alias
from .._tiers.device_tiers import DeviceTiers
from ..errors import InplaceError
from .route import Routes

__all__ = ["RegionState"]

_REFUSED = "not recomputed: "
_SAMPLED_BYTES, _SAMPLED_ON_DEVICE = 4 << 10, 1 << 20
_SAMPLED_CALLS = 4  # on an accelerator, one tensor of each this many forwards
_SMALL_CALLS = 3  # forwards with small saves only, after which a module is recorded more rarely
_RECORDED_EVERY = 32  # how rarely
_MOST_KINDS = 64
_seeds = itertools.count()


class RegionState:
    """What the forwards of a region share.

    Args:
        session: the stash's session.
        admission: the stash's admission.
        unpack: the stash's unpack hook.
        known: keys of the states that compared equal, in all regions of the stash.
        refused: keys of the states that did not, and why.
        verify: see :class:`~backstash.Stash`.
        is_found: whether the stash chose the module and the program did not name it. Its replays do not rely on
            tensors that plain PyTorch does not save.
    """

    def __init__(
        self,
        session: Session,
        admission: Admission,
        unpack: Callable[[Any], Tensor],
        known: set[int],
        refused: dict[int, str],
        *,
        verify: str,
        is_found: bool = False,
    ) -> None:
        self._verify, self.is_found = verify, is_found
        self.is_thorough = verify == "always"
        """Whether every replay is compared in all its bytes."""
        self.session = session
        self.admission = admission
        self.unpack = unpack
        self.known = known
        self.refused = refused
        self.graph: CallGraph | None = None
        """The operations of the replay that was compared last, where a step was measured."""
        self.routes = Routes()
        self.saves_are_small = True
        """Whether the last forward that was recorded saved only small tensors."""
        self._small_calls: dict[object, int] = {}
        self._samples = 0
        self._random = random.Random(next(_seeds))
        self.discards = 0
        """The number of tensors that the last forward discarded."""

    def is_at_rest(self, kind: object) -> bool:
        """Whether not to record a forward, because those before it of this kind saved only small tensors, which
        stay in place. Now and then one is recorded all the same."""
        calls = self._small_calls.get(kind, 0)
        if calls < _SMALL_CALLS:
            return False
        self._small_calls[kind] = calls + 1
        return (calls + 1 - _SMALL_CALLS) % _RECORDED_EVERY != 0

    def note_saves(self, kind: object, *, are_small: bool) -> None:
        """Record that a forward ended, and whether all that it saved was small."""
        self.saves_are_small = are_small
        if not are_small:
            self._small_calls.pop(kind, None)
        elif (calls := self._small_calls.get(kind, 0)) < _SMALL_CALLS:
            if len(self._small_calls) >= _MOST_KINDS:
                self._small_calls.clear()
            self._small_calls[kind] = calls + 1

    def count(self, reason: str, nbytes: int) -> None:
        """Count bytes that are not recomputed, with the reason."""
        with self.session.lock:
            self.admission.count_left(_REFUSED + reason, nbytes)

    def next_sampled(self) -> int:
        """Return which tensor of the next forward to compare on an accelerator; -1: none."""
        if self._verify == "first" or not self.discards:
            return -1
        return int(self._random.random() * self.discards * _SAMPLED_CALLS)

    def tiers_of(self, device: torch.device) -> DeviceTiers | None:
        """Return the tiers of an accelerator; ``None`` for the CPU, or if the stash does not manage it."""
        tiers = self.session.known_tiers.get(device)
        if tiers is None or isinstance(tiers, str) or tiers.device is None:
            return None
        return tiers

    def mark(self, tensor: Tensor, device: Device | None) -> tuple[int, Any] | None:
        """Return a mark of some bytes of a tensor on an accelerator, and which they are."""
        if device is None or device.is_capturing():
            return None
        self._samples += 1
        part = self._part(tensor, self._samples)
        mark = device.mark(part[0], device.stream(), *part[1:])
        return None if mark is None else (self._samples, mark)

    def _part(self, tensor: Tensor, number: int) -> tuple[torch.UntypedStorage, int, int]:
        low = int(tensor.storage_offset()) * tensor.element_size()
        if low % 4 or not tensor.is_contiguous():  # a mark begins at a multiple of 4
            tensor, low = dense(raw_alias(tensor)), 0
        storage, nbytes = tensor.untyped_storage(), tensor.nbytes
        if self.is_thorough:
            return storage, low, nbytes
        at = number % -(-nbytes // _SAMPLED_ON_DEVICE) * _SAMPLED_ON_DEVICE
        return storage, low + at, min(_SAMPLED_ON_DEVICE, nbytes - at)

    def compare(self, sampled: tuple[int, Any], value: Tensor, error: InplaceError) -> None:
        """Raise ``error`` if ``value`` differs from the tensor that was sampled; on an accelerator when the
        backward ends."""
        tiers = self.tiers_of(value.device)
        if tiers is None or tiers.device is None:
            if self.sample(value, sampled[0]) != sampled:
                raise error
            return
        check = tiers.device.compare(sampled[1], *self._part(value, sampled[0]))
        if check is None:
            raise torch.OutOfMemoryError("no memory to compare a recomputed tensor")
        tiers.packer.ask_at_the_end(error, check)

    def sample(self, tensor: Tensor, at: int = -1) -> tuple[int, object] | None:
        """Return a fingerprint of some bytes of a CPU tensor, and which they are. They change with each call
        unless ``at`` gives them; ``verify="always"`` covers all bytes."""
        if not tensor.is_cpu or self._verify == "first":
            return None
        if self._verify == "always":
            low, high = extent_bytes(tensor)
            if high - low == tensor.nbytes:
                return 0, fingerprint(tensor.untyped_storage(), low, tensor.nbytes)
            return 0, fingerprint(dense(raw_alias(tensor)).untyped_storage())
        if at < 0:
            self._samples += 1
            at = self._samples
        return at, fingerprint(tensor.untyped_storage(), *_window(tensor, at))


def _window(tensor: Tensor, number: int) -> tuple[int, int]:
    """Return some adjacent bytes of a tensor, as offset and size. Successive numbers pass through all of it."""
    itemsize = tensor.element_size()
    first, size = int(tensor.storage_offset()), 1
    runs: list[tuple[int, int]] = []
    if tensor.is_contiguous():
        size = tensor.numel()
    else:
        for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            if stride == size and not runs:
                size *= length
            elif stride and length > 1:
                runs.append((stride, length))
    most = _SAMPLED_BYTES // itemsize
    number, at = divmod(number, -(-size // most))
    for stride, length in runs:
        number, index = divmod(number, length)
        first += index * stride
    return (first + at * most) * itemsize, min(most, size - at * most) * itemsize
