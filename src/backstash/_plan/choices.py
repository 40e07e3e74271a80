"""Look up a saved tensor's class, and what the plan does with it.

A class consists of the running module's path, with ``*`` for numbers, the operation that made the tensor, the
ordinal of the save in that module, and its size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

from ..units import format_bytes
from .regions import LEFT, name_of
from .table import REGION

__all__ = ["Choices", "ClassOf"]

_ORDINALS = 64  # later saves of one module share the last ordinal
_MOST_NAMES = 1 << 14


class ClassOf:
    """Names the class of each block of a step."""

    def __init__(self) -> None:
        self._ordinals: Counter[tuple[int, str, str]] = Counter()

    def begin_step(self) -> None:
        """Begin a step, in which nothing was saved yet."""
        self._ordinals.clear()

    def begin_again(self, paths: Iterable[str]) -> None:
        """Restart the numbering of saves below these paths: the modules there run again in this step."""
        begins = tuple([f"{path}." for path in paths])
        for where in [each for each in self._ordinals if f"{each[1]}.".startswith(begins)]:
            del self._ordinals[where]

    def next(self, module: str, operation: str, nbytes: int, root: int = 0) -> str:
        """Return the class of the next block that this module saves and this operation made.

        ``root`` identifies the module that the program called: one that calls its blocks itself has many, whose
        submodules have the same paths, and the saves of each are numbered from 0.
        """
        where = root, module, operation
        ordinal = self._ordinals.get(where, 0)
        if ordinal < _ORDINALS:
            self._ordinals[where] = ordinal + 1
        return _class_name(module, operation, ordinal, nbytes)


class Choices:
    """The plan's choice for each block of each class, in the order of their saves.

    Args:
        classes: name, and runs of a choice with the number of blocks it is for. The classes include blocks that
            recomputed regions discard, and those of calls that nothing manages.
    """

    def __init__(self, classes: Iterable[tuple[str, Iterable[tuple[str, int]]]]) -> None:
        # The choice for each block, by class and also by the class's name without the size.
        self._of: dict[str, list[str]] = {}
        self._partly: set[str] = set()  # classes with blocks that regions discard
        self.recompute = False
        """Whether any single block is recomputed."""
        for name, runs in classes:
            anyhow = self._of.setdefault(_without_size(name), [])
            these = self._of[name] = []
            for choice, count in runs:
                self.recompute = self.recompute or choice == "recompute"
                if choice == REGION:
                    self._partly.update((name, _without_size(name)))
                elif choice != LEFT:
                    these += [choice] * count
                    anyhow += [choice] * count
        self._alike: dict[str, list[str]] = {}  # by operation and size
        for name in self._of:
            self._alike.setdefault(_without_module(name)[1], []).append(name)
        self._encountered: Counter[str] = Counter()
        self.matched = 0
        """Number of blocks so far whose class, with its size, the plan knows."""

    def begin_step(self) -> None:
        """Begin a step, in which nothing was saved yet."""
        self._encountered.clear()

    def next(self, name: str, *, of_any_size: bool = False) -> str | None:
        """Return the choice for the next block of a class.

        ``"region"``: a region was to discard the block and did not. ``None``: the plan does not know the class.

        Args:
            name: the class.
            of_any_size: if the class is unknown, use the choice for the block at the same position in the class
                that differs only in size. A mixture of experts saves blocks of other sizes in each step.
        """
        anyhow = _without_size(name)
        encountered = self._encountered
        counted, at = encountered.get(anyhow, 0), encountered.get(name, 0)
        encountered[anyhow], encountered[name] = counted + 1, at + 1
        choices = self._of.get(name)
        if choices is None and (other := self._of_another_module(name)) is not None:
            name, at = other, self._encountered[other]
            self._encountered[other] = at + 1
            choices = self._of[other]
        if choices is not None:
            self.matched += 1
        elif of_any_size:
            name, at = anyhow, counted
            choices = self._of.get(name)
        if choices is None:
            return None
        if at < len(choices):
            return choices[at]
        return REGION if name in self._partly else choices[0] if choices else "keep"

    def _of_another_module(self, name: str) -> str | None:
        """Return a known class of the same operation and size, of a module around this one's or inside it.

        The input of a call belongs to the module that is called if the call may be recomputed, and otherwise to
        the submodule that saves it first. Only then are the saves of a second call numbered from 0, too.
        """
        path, rest = _without_module(name)
        # A plan of which the program has no class at all is another program's.
        found = None
        for other in self._alike.get(rest, ()) if self.matched else ():
            around = _without_module(other)[0]
            if self._encountered[other] < len(self._of[other]) and _are_nested(path, around):
                if around == path:
                    return other
                found = found or other
        return found


# What is known of a class's name: the same few thousand are looked up in each step.


@lru_cache(_MOST_NAMES)
def _class_name(module: str, operation: str, ordinal: int, nbytes: int) -> str:
    name = f"{name_of(module)} {operation}".lstrip()
    return f"{name} #{ordinal} {format_bytes(nbytes)}"


@lru_cache(_MOST_NAMES)
def _are_nested(one: str, other: str) -> bool:
    """Whether one of two modules is the other, or inside it; the outermost one has the name of its class."""
    if one.startswith("(") or other.startswith("("):
        return True
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


@lru_cache(_MOST_NAMES)
def _without_module(name: str) -> tuple[str, str]:
    """Return the module's path, and the class's name without it and without the ordinal."""
    words = name.split(" ")
    at = next((at for at, word in enumerate(words) if word.startswith("#")), len(words))
    path = words[0] if at > 1 else ""
    return path, " ".join([*words[bool(path) : at], *words[at + 1 :]])


@lru_cache(_MOST_NAMES)
def _without_size(name: str) -> str:
    """Return the class's name without its last two words, the number and the unit."""
    return name.rsplit(" ", 2)[0]
