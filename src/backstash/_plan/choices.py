"""Under a plan: which class a saved tensor is of, and what is done with it.

A class is the module that ran, by its path with ``*`` for numbers, the operation that made the tensor, which
save of that module it is, and how many bytes it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..units import format_bytes
from .regions import name_of
from .table import REGION

__all__ = ["Choices", "ClassOf"]

_ORDINALS = 64  # saves of one module that are told apart


class ClassOf:
    """Names the class of each block of a step."""

    def __init__(self) -> None:
        self._ordinals: Counter[tuple[str, str]] = Counter()
        self._names: dict[tuple[str, str], str] = {}

    def begin_step(self) -> None:
        """Nothing was saved in this step yet."""
        self._ordinals.clear()

    def begin_again(self, paths: Iterable[str]) -> None:
        """What is at these paths runs once more in this step: its saves are numbered from here on."""
        begins = tuple(f"{path}." for path in paths)
        for where in [each for each in self._ordinals if f"{each[0]}.".startswith(begins)]:
            del self._ordinals[where]

    def next(self, module: str, operation: str, nbytes: int) -> str:
        """Of the next block that this module saves, made by this operation."""
        where = module, operation
        name = self._names.get(where)
        if name is None:
            name = self._names[where] = f"{name_of(module)} {operation}".lstrip()
        ordinal = self._ordinals[where]
        self._ordinals[where] = min(ordinal + 1, _ORDINALS)
        return f"{name} #{ordinal} {format_bytes(nbytes)}"


class Choices:
    """What a plan does with the blocks of each class, in the order in which they are saved.

    Args:
        classes: name, and runs of choices with how many blocks each is for. Those of a class that are let go by
            regions are not chosen for.
    """

    def __init__(self, classes: Iterable[tuple[str, Iterable[tuple[str, int]]]]) -> None:
        # By the class, and by its name without the size: what is done with each block, and how many of them
        # this step had so far.
        self._of: dict[str, list[str]] = {}
        self._partly: set[str] = set()  # those of which regions that are recomputed let go
        self.recompute = False
        """Whether any block is recomputed by itself."""
        for name, runs in classes:
            anyhow = self._of.setdefault(_without_size(name), [])
            these = self._of[name] = []
            for choice, count in runs:
                self.recompute = self.recompute or choice == "recompute"
                if choice == REGION:
                    self._partly.update((name, _without_size(name)))
                else:
                    these += [choice] * count
                    anyhow += [choice] * count
        self._met: Counter[str] = Counter()
        self.matched = 0
        """Blocks of classes that the plan knows, of their size, so far."""

    def begin_step(self) -> None:
        """Nothing was saved in this step yet."""
        self._met.clear()

    def next(self, name: str, *, of_any_size: bool = False) -> str | None:
        """For the next block of a class; ``"region"``: a region was to let go of it, and does not; ``None``:
        the plan does not know the class.

        ``of_any_size``: then take what is done with a block that differs in nothing but its size, as those of a
        mixture of experts do at each step: with its place among those of that class.
        """
        anyhow = _without_size(name)
        counted = self._met[anyhow]
        self._met[anyhow] = counted + 1
        at = self._met[name]
        self._met[name] = at + 1
        choices = self._of.get(name)
        if choices is not None:
            self.matched += 1
        elif of_any_size:
            name, at = anyhow, counted
            choices = self._of.get(name)
        if choices is None:
            return None
        if at < len(choices):
            return choices[at]
        return REGION if name in self._partly else choices[0]


def _without_size(name: str) -> str:
    """The name of a class without its last two words, the number and the unit."""
    return name.rsplit(" ", 2)[0]
