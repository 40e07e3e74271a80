"""What a module and its parts hold in their attributes, noted before a second run of its forward and put back.

Attributes, what is in the containers that they hold, and the bytes of buffers are put back after every second
run. What lies deeper (the items of a list in a list, the attributes of an object, the bytes of a tensor that is
no buffer) is noted only where a caller wants to know whether a run changes it.

All names are public but ``torch.autograd._unsafe_preserve_version_counter``, in torch 2.11 to 2.15; where
that one is missing, a buffer or another tensor that a second run changes has a higher version afterwards, and
a graph that had saved it says so in backward.
"""

from __future__ import annotations

import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping
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
_UNCHANGING = (
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    type,
)
_NOT_LOOKED_INTO = sys.stdlib_module_names - {"argparse", "collections"} | {"torch", "backstash"}
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
        self.lost = ""
        """Of the first that was changed and could not be put back: its bytes were not copied."""

    def found(self, path: str) -> None:
        """``path`` was changed."""
        self.text = self.text or path


@contextmanager
def unchanged(module: nn.Module, *, deep: bool) -> Iterator[Changes]:
    """What runs inside leaves ``module`` and its parts as they were.

    Args:
        module: whose attributes are looked at.
        deep: look at and put back also what lies deeper, in the first 10,000 objects, of which two of the
            program's own may lie in each other; then tell of it. Parameters that are trained, and other
            tensors, are copied up to 64 MiB of them; what is changed beyond is lost.

    Yields:
        What was changed that is not put back by a call without ``deep``; complete at the end.
    """
    changes = Changes()
    holders, objects = _in_attributes(module)
    buffers = {id(each): each for each in module.buffers()}
    known = {id(each) for _, each in holders} | buffers.keys()
    deeper: list[tuple[str, Any]] = []
    tensors: list[tuple[str, Tensor]] = []
    if deep:
        deeper, tensors = _deeper(objects, known, changes)
    tensors += [(path, each) for path, each in objects if _is_plain(each) and id(each) not in known]
    left_bytes = _MOST_COPIED_BYTES if deep else 0
    copies: dict[int, Tensor] = {}
    for _, tensor in tensors:
        is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        if deep and _has_bytes(tensor) and (is_frozen or tensor.nbytes <= left_bytes):
            left_bytes -= 0 if is_frozen else tensor.nbytes
            copies[id(tensor)] = tensor.detach().clone()
    # What is put back has the version that it had, too: a graph may have saved it.
    put_back = (*buffers.values(), *(each for _, each in tensors if id(each) in copies))
    with ExitStack() as stack:  # each is put back whatever becomes of the others
        if _preserve_versions is not None:
            stack.enter_context(_preserve_versions(put_back))
        for each in buffers.values():
            stack.callback(_fill_again, each, each.detach().clone())
        for path, tensor in tensors:
            copy = copies.get(id(tensor))
            stack.callback(_look_at, tensor, version_of(tensor), copy, changes, path)
        for parameter in module.parameters() if deep else ():
            hooks = {id(each): dict(each) for each in dicts_on(parameter)}
            stack.callback(_take_off_hooks, parameter, hooks, changes)
        for path, holder in deeper:
            stack.callback(_put_back, holder, _copied(holder), changes, path)
        for _, holder in holders:
            stack.callback(_put_back, holder, _copied(holder))
        yield changes


def _look_at(
    tensor: Tensor, version: Any, copy: Tensor | None, changes: Changes, path: str
) -> None:
    if copy is None:
        if version_of(tensor) != version:
            changes.lost = changes.lost or path
    elif version_of(tensor) != version or not _is_equal(tensor, copy):
        changes.found(path)
        _fill_again(tensor, copy)


def _fill_again(tensor: Tensor, copy: Tensor) -> None:
    """Give ``tensor`` the bits of ``copy`` again, which it had."""
    alike = tensor.shape == copy.shape and tensor.dtype == copy.dtype
    if alike and tensor.layout is torch.strided and _is_equal(tensor, copy):
        return
    if alike:
        tensor.detach().copy_(copy)
    else:
        tensor.data = copy


def _take_off_hooks(
    parameter: nn.Parameter, hooks: dict[int, dict[int, Any]], changes: Changes
) -> None:
    for each in dicts_on(parameter):
        _put_back(each, hooks.get(id(each), {}), changes, "the hooks of a parameter")


class _Slots(MutableMapping[str, Any]):
    """The attributes of an object that has them in slots, as a dictionary."""

    def __init__(self, owner: Any, names: list[str]) -> None:
        self._owner = owner
        self._names = names

    def __getitem__(self, name: str) -> Any:
        return getattr(self._owner, name)

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._owner, name, value)

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._owner, name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if hasattr(self._owner, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def is_used_up(value: Any) -> bool:
    """Whether it gives something else each time it is asked: an iterator, a file, a generator of numbers."""
    kind = type(value)
    is_generator = kind.__name__ in ("Generator", "RandomState", "SobolEngine")
    return is_generator or isinstance(value, random.Random) or hasattr(kind, "__next__")


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
                more = _dict_of(value)
                if more is not None:  # a subclass's own attributes
                    holders[id(more)] = path, more
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
        if id(value) in seen or id(value) in known or isinstance(value, _UNCHANGING):
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            tensors.append((path, value))
        elif isinstance(value, (*_CONTAINERS, tuple)):
            if not isinstance(value, tuple):
                holders.append((path, value))
            more = _dict_of(value)
            if more is not None:  # a subclass's own attributes
                holders.append((path, more))
            waiting.extend((path, each, nested) for each in _items(value))
        elif _is_array(value):
            holders.append((path, value))
        elif is_used_up(value):
            changes.found(path)
        else:
            nested += not isinstance(value, nn.Module)
            for attributes in _attributes_of(value) if nested <= _MOST_NESTED else ():
                if id(attributes) not in known:
                    holders.append((path, attributes))
                    waiting.extend((path, each, nested) for each in _copied(attributes).values())
    if waiting:
        changes.found(f"more than {_MOST_OBJECTS:,} objects that its attributes hold")
    return holders, tensors


def _attributes_of(value: Any) -> list[Any]:
    """Of an object of the program's own: what holds its attributes. Nothing of others: a lock or a logger is
    not put back."""
    kind = type(value)
    package = kind.__module__.partition(".")[0] if isinstance(kind.__module__, str) else ""
    is_own = package not in _NOT_LOOKED_INTO or isinstance(
        value, (nn.Module, types.SimpleNamespace)
    )
    if not is_own:
        return []
    slots = [each.__dict__.get("__slots__", ()) for each in kind.__mro__]
    names = [
        name
        for each in slots
        for name in ([each] if isinstance(each, str) else each)
        if not name.startswith("__")
    ]
    found = [_dict_of(value), _Slots(value, names) if names else None]
    return [each for each in found if each is not None]


def _dict_of(value: Any) -> dict[str, Any] | None:
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
    """Whether its bytes may be a forward's own: a tensor that is no parameter."""
    return type(value) is Tensor and _has_bytes(value)


def _has_bytes(tensor: Tensor) -> bool:
    """Whether they can be copied and compared."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_plain and not (tensor.is_meta or tensor.is_inference())


def _copied(holder: Any) -> Any:
    """What it holds now: the very objects, and an array's values."""
    if isinstance(holder, MutableMapping):
        return dict(holder)
    if isinstance(holder, set):
        return set(holder)
    if isinstance(holder, bytearray):
        return bytes(holder)
    return holder.copy() if _is_array(holder) else list(holder)


def _put_back(holder: Any, before: Any, changes: Changes | None = None, path: str = "") -> None:
    """Make it hold what it did, and tell ``changes`` where it held something else."""
    now = _copied(holder)
    if _is_array(holder):
        is_same = now.tobytes() == before.tobytes()
    elif isinstance(holder, (set, bytearray)):
        is_same = now == before
    else:
        pairs = [list(each.items() if isinstance(each, dict) else each) for each in (now, before)]
        is_same = len(now) == len(before) and all(map(_is_same, *pairs))
    if is_same:
        return
    if changes is not None:
        changes.found(path)
    if _is_array(holder):
        holder[...] = before
    elif isinstance(holder, MutableMapping):
        # Without a moment in which another thread finds nothing there.
        for key in now.keys() - before.keys():
            del holder[key]
        holder.update(before)
        if list(holder) != list(before):
            holder.clear()
            holder.update(before)
    else:
        holder.clear()
        (holder.update if isinstance(holder, set) else holder.extend)(before)


def _is_same(now: Any, then: Any) -> bool:
    """Whether two values, or two pairs of a key and a value, are the same objects."""
    if type(now) is tuple and type(then) is tuple and len(now) == len(then) == 2:
        return now[0] is then[0] and now[1] is then[1]
    return now is then


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits, ``NaN`` included."""
    first, second = (
        each.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        for each in (one, other)
    )
    return torch.equal(first, second)
