"""What a module and its parts hold in their attributes, noted before a second run of its forward and put back.

Attributes, what is in the containers that they hold, and the bytes of buffers are put back after every second
run. What lies deeper (the items of a list in a list, the attributes of an object, the bytes of a tensor that is
no buffer) is noted only where a caller wants to know whether a run changes it.

All names are public but ``torch.autograd._unsafe_preserve_version_counter``, in torch 2.11 to 2.15; where
that one is missing, a buffer that a second run changes has a higher version afterwards, and a graph that had
saved it says so in backward.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .hook_dicts import dicts_on
from .lookup import optional
from .versions import version_of

__all__ = ["Changes", "is_used_up", "unchanged"]

_preserve_versions: Any = optional("torch.autograd._unsafe_preserve_version_counter", None)

_CONTAINERS = (dict, list, set, deque, bytearray)
_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    type,
)
_NOT_LOOKED_INTO = sys.stdlib_module_names | {"torch", "backstash"}
_MOST_OBJECTS = 10_000
_MOST_NESTED = (
    2  # objects of the program's own: beyond these, a trainer's say, other threads may be at work
)
_MOST_COPIED_BYTES = 64 * 2**20


class Changes:
    """What runs have changed that is not put back after every one of them."""

    def __init__(self) -> None:
        self.text = ""
        """The path of the first that was found, ``Block.totals`` say; empty: none was."""

    def found(self, path: str) -> None:
        """``path`` was changed."""
        self.text = self.text or path


@contextmanager
def unchanged(module: nn.Module, *, deep: bool) -> Iterator[Changes]:
    """What runs inside leaves ``module`` and its parts as they were.

    Args:
        module: whose attributes are looked at.
        deep: look at and put back also what lies deeper, in the first 10,000 objects, of which two of the
            program's own may lie in each other; then tell of it. A parameter, and tensors beyond 64 MiB of
            them, are told of and not put back.

    Yields:
        What was changed that is not put back by a call without ``deep``; complete at the end.
    """
    changes = Changes()
    holders, objects = _in_attributes(module)
    notes: list[tuple[str, Any, Any]] = [(path, each, _copied(each)) for path, each in holders]
    buffers = {id(each): each for each in module.buffers()}
    copies = [(each, each.detach().clone()) for each in buffers.values()]
    known = {id(each) for _, each in holders} | buffers.keys()
    tensors: list[tuple[str, Tensor]] = []
    deeper: list[tuple[str, Any, Any]] = []
    if deep:
        inside, tensors = _deeper(objects, known, changes)
        deeper = [(path, each, _copied(each)) for path, each in inside]
    tensors += [(path, each) for path, each in objects if _is_plain(each) and id(each) not in known]
    versions = [version_of(each) for _, each in tensors]
    kept = _copies_of((each for _, each in tensors), _MOST_COPIED_BYTES if deep else 0)
    parameters = [*module.parameters()] if deep else []
    hooks = {id(each): dict(each) for parameter in parameters for each in dicts_on(parameter)}
    with ExitStack() as stack:
        if _preserve_versions is not None and buffers:
            stack.enter_context(_preserve_versions(tuple(buffers.values())))
        try:
            yield changes
        finally:
            for _, holder, before in notes:
                _put_back(holder, before)
            for path, holder, before in deeper:
                if _put_back(holder, before):
                    changes.found(path)
            with torch.no_grad():
                for each, copy in copies:
                    if not torch.equal(each, copy):
                        each.copy_(copy)
                for (path, each), version in zip(tensors, versions, strict=True):
                    known_as = kept.get(id(each))
                    if known_as is not None and not _is_equal(each, known_as):
                        changes.found(path)
                        each.copy_(known_as)
                    elif version_of(each) != version:
                        changes.found(path)
            for parameter in parameters:
                for registered in dicts_on(parameter):
                    if _put_back(registered, hooks.get(id(registered), {})):
                        changes.found("the hooks of a parameter")


def is_used_up(value: Any) -> bool:
    """Whether it gives something else each time it is asked: an iterator, a file, a generator of numbers."""
    kind = type(value)
    return kind.__name__ in ("Generator", "Random", "RandomState") or hasattr(kind, "__next__")


def _in_attributes(module: nn.Module) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """The dictionaries of attributes and the containers in them; and every object that one of these holds."""
    holders: dict[int, tuple[str, Any]] = {}
    objects = []
    for part in module.modules():
        attributes = part.__dict__
        holders[id(attributes)] = type(part).__name__, attributes
        for name, value in list(attributes.items()):
            path = f"{type(part).__name__}.{name}"
            if isinstance(value, _CONTAINERS):
                holders[id(value)] = path, value
                objects += [(path, each) for each in _items(value)]
            else:
                objects.append((path, value))
    return list(holders.values()), objects


def _deeper(
    objects: Iterable[tuple[str, Any]], known: set[int], changes: Changes
) -> tuple[list[tuple[str, Any]], list[tuple[str, Tensor]]]:
    """What can be changed inside ``objects``: containers, dictionaries of attributes, arrays; and tensors."""
    holders: list[tuple[str, Any]] = []
    tensors: list[tuple[str, Tensor]] = []
    # By id, and held, so that no other object is given the id.
    seen: dict[int, Any] = {}
    waiting = deque((path, value, 0) for path, value in objects)
    while waiting and len(seen) < _MOST_OBJECTS:
        path, value, nested = waiting.popleft()
        if id(value) in seen or id(value) in known or isinstance(value, _FUNCTIONS):
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            if _is_plain(value) or isinstance(value, nn.Parameter):
                tensors.append((path, value))
        elif isinstance(value, (*_CONTAINERS, tuple)):
            if not isinstance(value, tuple):
                holders.append((path, value))
            waiting.extend((path, each, nested) for each in _items(value))
        elif _is_array(value):
            holders.append((path, value))
        elif is_used_up(value):
            changes.found(path)
        else:
            attributes = _attributes_of(value)
            nested += not isinstance(value, nn.Module)
            if attributes is not None and id(attributes) not in known and nested <= _MOST_NESTED:
                holders.append((path, attributes))
                waiting.extend((path, each, nested) for each in list(attributes.values()))
    return holders, tensors


def _attributes_of(value: Any) -> dict[str, Any] | None:
    """Of an object of the program's own; ``None`` for others: a lock or a logger is not put back."""
    kind = type(value)
    package = kind.__module__.partition(".")[0] if isinstance(kind.__module__, str) else ""
    own = package not in _NOT_LOOKED_INTO or isinstance(value, (nn.Module, types.SimpleNamespace))
    if not own:
        return None
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def _items(container: Any) -> list[Any]:
    if isinstance(container, bytearray):
        return []
    return list(container.values() if isinstance(container, dict) else container)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_plain(value: Any) -> bool:
    """Whether its bytes may be a forward's own: a tensor that is no parameter, with a storage."""
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and not (value.is_meta or value.is_inference())
    )


def _copied(holder: Any) -> Any:
    """What it holds now: the very objects, and an array's values."""
    if isinstance(holder, dict):
        return dict(holder)
    if isinstance(holder, set):
        return set(holder)
    return bytes(holder) if isinstance(holder, bytearray) else _array_or_list(holder)


def _array_or_list(holder: Any) -> Any:
    return holder.copy() if _is_array(holder) else list(holder)


def _put_back(holder: Any, before: Any) -> bool:
    """Make it hold what it did; whether it held something else."""
    if _is_array(holder):
        if holder.tobytes() == before.tobytes():
            return False
        holder[...] = before
        return True
    if isinstance(holder, (set, bytearray)):
        if holder == before:
            return False
    else:
        now = list(holder.items() if isinstance(holder, dict) else holder)
        then = list(before.items() if isinstance(holder, dict) else before)
        if len(now) == len(then) and all(map(_is_same, now, then)):
            return False
    fill: Callable[[Any], Any] = holder.update if isinstance(holder, (dict, set)) else holder.extend
    holder.clear()
    fill(before)
    return True


def _is_same(now: Any, then: Any) -> bool:
    """Whether two values, or two pairs of a key and a value, are the same objects."""
    if type(now) is tuple and type(then) is tuple and len(now) == len(then) == 2:
        return now[0] is then[0] and now[1] is then[1]
    return now is then


def _copies_of(tensors: Iterable[Tensor], most_bytes: int) -> dict[int, Tensor]:
    copies: dict[int, Tensor] = {}
    for each in tensors:
        if _is_plain(each) and not each.requires_grad and each.nbytes <= most_bytes:
            most_bytes -= each.nbytes
            copies[id(each)] = each.detach().clone()
    return copies


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits, ``NaN`` included."""
    first, second = (
        each.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        for each in (one, other)
    )
    return torch.equal(first, second)
