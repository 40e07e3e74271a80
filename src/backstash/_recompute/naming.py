"""Choose which modules a budget may recompute where the program names none.

The first step counts the bytes that each module saves. If not everything fits, the stash treats the largest
modules that save at most an eighth of the step as if they had been given to :meth:`~backstash.Stash.recompute`.
In backward, one call's saved tensors then exist at a time, in addition to what the stash holds for the other
calls.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from .._core.hook_scope import Removable
from .._torch.module_parts import has_forward
from .._torch.modules import compiled_around, is_compiled

__all__ = ["Naming", "largest_modules"]

_PART = 8  # one call saves at most 1/8 of the step's bytes
_MOST_PART = 2  # or 1/2, if its submodules save little of that
_MANY_OPERATIONS = nn.RNNBase, nn.RNNCellBase
"""Layers without submodules that save more than their input."""
_COVERED = 0.75  # the submodules replace a module if they save at least this share of its bytes


class Naming:
    """Choose and attach the modules that one stash recomputes without being asked to.

    Args:
        attach: start recording the forwards of the given modules; removing the returned handle stops it.
    """

    def __init__(self, attach: Callable[[Sequence[nn.Module]], Removable | None]) -> None:
        self._attach = attach
        self._roots: dict[int, tuple[weakref.ref[nn.Module], Counter[str]]] = {}
        self._modules: list[weakref.ref[nn.Module]] | None = None
        self._handle: Removable | None = None

    def saw(self, modules: Sequence[nn.Module], path: str, nbytes: int) -> None:
        """Count a block that was saved in the first step.

        Args:
            modules: the running modules, outermost first.
            path: path of the innermost module within the outermost.
            nbytes: size of the block.
        """
        if modules:
            root = modules[0]
            self._roots.setdefault(id(root), (weakref.ref(root), Counter()))[1][path] += nbytes

    def begin(self) -> None:
        """Attach to the chosen modules, choosing them at the first call. Called when not everything fits."""
        if self._modules is None:
            total = sum(sum(saved.values()) for _, saved in self._roots.values())
            roots = [(root(), saved) for root, saved in self._roots.values()]
            self._modules = [
                weakref.ref(module)
                for root, saved in roots
                if root is not None and not (is_compiled(root) or compiled_around(root))
                for module in largest_modules(root, saved, total)
            ]
            self._roots.clear()
        if self._handle is None:
            alive = [module for each in self._modules if (module := each()) is not None]
            self._handle = self._attach(alive) if alive else None

    def end(self) -> None:
        """Remove the hooks: no module is recomputed."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()


def largest_modules(root: nn.Module, saved: Mapping[str, int], total: int) -> list[nn.Module]:
    """Return the largest modules, ``root`` included, that save at most an eighth of ``total`` each.

    The root of a step may be one of many: a program may call its blocks itself. A module that saves up to half
    is returned, too, if its own forward, and not its submodules, saves much of it.

    Args:
        root: the outermost module.
        saved: bytes by the path of the innermost module that saved them.
        total: bytes that the step saves.
    """
    within: Counter[str] = Counter()
    for path, nbytes in saved.items():
        names = path.split(".") if path else []
        for end in range(len(names) + 1):
            within[".".join(names[:end])] += nbytes
    return _pick(root, "", within, total)[0]


def _pick(
    module: nn.Module, path: str, within: Mapping[str, int], total: int
) -> tuple[list[nn.Module], int]:
    nbytes = within.get(path, 0)
    children = [*module.named_children()]
    is_one = isinstance(module, _MANY_OPERATIONS) or (bool(children) and has_forward(module))
    if not nbytes:
        return [], 0
    if is_one and nbytes * _PART <= total:
        return [module], nbytes
    found: list[nn.Module] = []
    covered = 0
    for name, child in children:
        inner, inner_bytes = _pick(child, f"{path}.{name}" if path else name, within, total)
        found += inner
        covered += inner_bytes
    if is_one and covered < _COVERED * nbytes and nbytes * _MOST_PART <= total:
        return [module], nbytes
    return found, covered
