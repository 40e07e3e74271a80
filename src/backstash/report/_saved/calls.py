"""Which module call is running, from the call stack, and how many there were.

A call is recognised by its frame. The frame is not kept (that would keep the tensors in its local variables):
it is marked, by the one attribute of a frame that can be set, ``f_trace``, and the mark goes with the frame. A
debugger uses that attribute for itself; where it is taken, paths are still found and calls are not counted.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch.utils.checkpoint
from torch import nn
from torch.utils._pytree import tree_leaves

from ..._modules import module_path
from .save import Found

__all__ = ["Calls", "is_recomputing"]

_CALL_CODE = nn.Module._call_impl.__code__
_CHECKPOINT = torch.utils.checkpoint.__name__
_AGAIN = ("backward", "unpack_hook")  # of the reentrant kind, and of the other
_BETWEEN = ("backstash.", "torch.autograd.function")
_serials = itertools.count()


class _Mark:
    """One running call, on its frame. Also a trace function that does nothing, should tracing begin."""

    __slots__ = ("prefixes",)

    def __init__(self) -> None:
        self.prefixes: dict[int, tuple[str, nn.Module]] = {}  # by the serial of a Calls

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        return None


class Calls:
    """The module calls that saved something, for one report.

    Args:
        model: its modules are called what ``named_modules()`` calls them; others by the module that runs them.
        met: called with each module that is not the model's, when it is first met running.
        given: called with the tensors that an outermost call was given.
        found: where calls are counted.
    """

    def __init__(
        self,
        model: nn.Module | None,
        met: Callable[[nn.Module], None],
        given: Callable[[list[Any]], None],
        found: Found,
    ) -> None:
        self._serial = next(_serials)
        self._names: dict[int, str] = {}
        if model is not None:
            for path, module in model.named_modules():
                self._names.setdefault(id(module), path)
        self._model = model
        self._roots: dict[int, str] = {}
        self._kinds = Counter([type(model).__name__] if model is not None else ())
        self._below: dict[tuple[int, int], str] = {}
        self._modules: dict[int, nn.Module] = {}  # held, so that their ids are not given out again
        self._met, self._given = met, given
        self.found = found

    def running(self, frame: FrameType | None) -> tuple[str, str]:
        """(the path of the innermost module that runs; the kind of checkpoint that itself saves, or "")."""
        new: list[FrameType] = []
        found: tuple[str, nn.Module] | None = None
        boundary = _checkpoint_that_saves(frame)
        while frame is not None:
            if frame.f_code is _CALL_CODE:
                mark: Any = frame.f_trace
                if type(mark) is _Mark and self._serial in mark.prefixes:
                    found = mark.prefixes[self._serial]
                    break
                new.append(frame)
            frame = frame.f_back
        for each in reversed(new):
            found = self._begin(each, found)
        return (self._shown(*found) if found is not None else "", boundary)

    def _begin(
        self, frame: FrameType, above: tuple[str, nn.Module] | None
    ) -> tuple[str, nn.Module]:
        local = frame.f_locals
        module = local["self"]
        if id(module) not in self._names and id(module) not in self._modules:
            self._modules[id(module)] = module
            self._met(module)
        if above is None:
            self._given(tree_leaves((local.get("args"), local.get("kwargs"))))
        found = self._prefix(module, above), module
        mark: Any = frame.f_trace
        if mark is None:
            frame.f_trace = mark = _Mark()
        if type(mark) is _Mark:
            mark.prefixes[self._serial] = found
            self.found.calls[self._shown(*found)] += 1
        else:
            self.found.has_calls = False
        return found

    def _prefix(self, module: nn.Module, above: tuple[str, nn.Module] | None) -> str:
        name = self._names.get(id(module))
        if name is not None:
            return name
        if above is None:
            return self._root(module)
        key = id(above[1]), id(module)
        name = self._below.get(key)
        if name is None:
            name = self._below[key] = module_path([above[1], module])
        return f"{above[0]}.{name}" if above[0] else name

    def _root(self, module: nn.Module) -> str:
        """What paths below an outermost module begin with: nothing for the first, or its class."""
        known = self._roots.get(id(module))
        if known is None:
            kind = type(module).__name__
            self._kinds[kind] += 1
            first = not self._roots and self._model is None
            number = f" {self._kinds[kind]}" if self._kinds[kind] > 1 else ""
            known = self._roots[id(module)] = "" if first else f"({kind}{number})"
        return known

    @staticmethod
    def _shown(prefix: str, module: nn.Module) -> str:
        return prefix or f"({type(module).__name__})"

    def end(self) -> None:
        """Let the modules go."""
        self._modules.clear()
        self._names.clear()
        self._below.clear()
        self._model = None


def _checkpoint_that_saves(frame: FrameType | None) -> str:
    """Which kind of checkpoint calls, with nothing but us and ``Function.apply`` in between; or ``""``."""
    kind = ""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == _CHECKPOINT:
            if frame.f_code.co_name == "_checkpoint_without_reentrant_generator":
                return "checkpoint"
            kind = "reentrant checkpoint"
        elif kind or not name.startswith(_BETWEEN):
            break
        frame = frame.f_back
    return kind


def is_recomputing(frame: FrameType | None) -> bool:
    """Whether a checkpoint runs its function again, within backward, in a frame above ``frame``."""
    while frame is not None:
        again = frame.f_code.co_name in _AGAIN
        if again and frame.f_globals.get("__name__") == _CHECKPOINT:
            return True
        frame = frame.f_back
    return False
