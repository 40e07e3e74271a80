"""Recompute modules that the program did not name, without hooks of their own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from .._core.hook_scope import Hook
from .._torch.dynamo import leave_untraced, untraced
from .._torch.modules import call_frame
from .region import Region, is_of_region

__all__ = ["FoundModules"]

_ending: set[FoundModules] = set()  # removed, but a forward of theirs may still run


class FoundModules:
    """Begin and end the forwards of modules that the program did not name.

    These modules get no hooks of their own: PyTorch runs a module with hooks differently (an encoder layer in
    evaluation), and pickles and scripts its hooks with it. Instead, two global module hooks check whether a
    module is one of these.

    Args:
        regions: the modules with their regions.
    """

    def __init__(self, regions: list[tuple[nn.Module, Region]]) -> None:
        self.regions = {id(module): (weakref.ref(module), region) for module, region in regions}
        """By the ``id`` of a module: the module and its region."""
        self._begins = register_module_forward_pre_hook(_FoundHook(self, FoundModules._begin))
        self._ends = register_module_forward_hook(
            _FoundHook(self, FoundModules._end), always_call=True
        )
        self._is_removed = False
        self._beginning: list[None] = []  # forwards that begin now, on any thread
        weakref.finalize(self, _remove_all, (self._begins, self._ends)).atexit = False

    def remove(self) -> None:
        """Begin no more forwards. Those that have begun still end."""
        self._is_removed = True
        self._begins.remove()
        _ending.add(self)
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        sessions = {region.session for _, region in self.regions.values()}
        scopes = [s for session in sessions for each in session.thread_states for s in each.scopes]
        is_idle = not any(is_of_region(each.hooks.pack_hook) for each in scopes)
        if is_idle and not self._beginning:
            self._ends.remove()
            _ending.discard(self)

    def region_of(self, module: nn.Module) -> Region | None:
        """The region of a module; ``None`` if it has none."""
        known = self.regions.get(id(module))
        return known[1] if known is not None and known[0]() is module else None

    def _begin(self, region: Region, module: nn.Module, args: Any) -> None:
        frame = call_frame()
        if frame is None:
            return
        # A new plan may remove this object before the forward has a scope.
        self._beginning.append(None)
        try:
            region.begin(frame, module, args, frame.f_locals.get("kwargs") or {})
        finally:
            self._beginning.pop()
            if self._is_removed:
                self._end_if_idle()

    def _end(self, region: Region, module: nn.Module, args: Any, output: Any) -> None:
        region.end(call_frame(), module, args, output)
        if self._is_removed:
            self._end_if_idle()


class _FoundHook(Hook):
    """One of the two global hooks. It does nothing once its stash is gone."""

    def __init__(self, found: FoundModules, act: Callable[..., None]) -> None:
        super().__init__(act)
        self._found = weakref.ref(found)

    @untraced
    def __call__(self, *given: Any) -> None:
        """See ``register_module_forward_hook``."""
        found = self._found()
        if found is not None and id(given[0]) in found.regions:
            region = found.region_of(given[0])
            if region is not None:
                self._act(found, region, *given)


def _remove_all(handles: Iterable[RemovableHandle]) -> None:
    for each in handles:
        each.remove()


leave_untraced(__name__)  # including what this module imports
