"""Find the modules that ``--recompute`` names, when the script's model first runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from .. import Stash
from ..errors import UsageError

__all__ = ["RecomputedModules", "matching", "recompute_of"]

_OFF = "off"
_WRAPPER = "module"  # DistributedDataParallel's prefix of a path


class RecomputedModules:
    """Pass the modules whose path matches to ``Stash.recompute``, before the first forward of their model.

    Paths start at the outermost running module. A global hook checks each forward until a model has such
    modules, and is then removed.

    Args:
        stash: of the run.
        patterns: shell patterns; ``*`` also matches dots. Without patterns, nothing is checked.
    """

    def __init__(self, stash: Stash, patterns: Sequence[str]) -> None:
        self._stash = stash
        self._patterns = tuple(each for each in patterns if each != _OFF)
        self.found: list[str] = []
        """The paths of the modules."""
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._handle: Any = None
        if self._patterns:
            self._handle = register_module_forward_pre_hook(self._look)

    def _look(self, module: nn.Module, _given: Any) -> None:
        if module in self._known:
            return
        self._known.update(module.modules())
        found = dict(matching(module, self._patterns))
        if found and not self.found:
            self.remove()
            self.found = [*found]
            self._stash.recompute(*found.values())

    def remove(self) -> None:
        """Stop looking. A second call does nothing."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    @property
    def note(self) -> str:
        """A note that nothing was found; or ``""``."""
        if self.found or not self._patterns:
            return ""
        named = ", ".join(map(repr, self._patterns))
        return (
            f"--recompute: no module that ran has a path that matches {named}, counted from the "
            "outermost module: `backstash profile` prints paths"
        )


def recompute_of(patterns: Sequence[str]) -> Literal["auto", False]:
    """Return the stash's argument ``recompute``."""
    if _OFF not in patterns:
        return "auto"
    if len(patterns) > 1:
        raise UsageError("--recompute off with --recompute PATTERN: allowed is one of them")
    return False


def matching(root: nn.Module, patterns: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of those inside ``root`` whose path matches, without modules inside another match
    and without containers, which no one calls."""
    inside = ""
    for path, module in root.named_modules():
        if inside and path.startswith(inside):
            continue
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue
        parts = path.split(".")
        while parts and parts[0] == _WRAPPER:
            del parts[0]
        if path and any(fnmatchcase(each, p) for each in (path, ".".join(parts)) for p in patterns):
            inside = f"{path}."
            yield path, module
