"""Record saves under any saved-tensors hooks, without changing what those hooks do.

Only the innermost hook pair sees a save. The recorder pushes a pair of its own, which passes each tensor to the
pair around the context. Without such a pair it holds the tensor in place, with the version check that autograd
omits under hooks. Each pair pushed inside the context is replaced by one that records and then calls it. If one
pair passes a tensor to another, the first records the save, once.

The module call that makes a save is found on the call stack, by the call's frame. To count calls, the recorder
marks the frame in ``f_trace``, the one attribute of a frame that can be set. The mark ends with the frame; a
reference to the frame would keep the tensors in its local variables alive. A debugger also uses ``f_trace``. If
it is taken, paths are still found, but calls are not counted.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import Tensor, nn

from ..._torch.checkpoints import (
    CHECKPOINT_MODULE,
    checkpoint_that_saves,
    is_caching,
    is_recomputing,
)
from ..._torch.dispatch import without_function_modes
from ..._torch.engine import in_backward
from ..._torch.func_transforms import let_transforms_pass
from ..._torch.hook_stack import Pair, current_pair, pop_owned
from ..._torch.module_parts import own_buffers, own_parameters
from ..._torch.modules import CALL_CODE, module_path
from ..._torch.node_saves import RECOMPUTED
from ..._torch.pushed_pairs import Pack, Unpack, is_listening, listen, push_unseen, stop_listening
from ..._torch.trees import tree_leaves
from ..._torch.versions import HeldVersion
from ...errors import UsageError
from .save import Found, RecordedPack, Save, identities
from .storages import Storages, existing_tensors
from .waste import LEAST_BYTES, find_waste

__all__ = ["SaveRecorder"]

_serials = itertools.count()


class SaveRecorder:
    """Record what the thread that calls :meth:`start` saves until :meth:`stop`.

    Args:
        model: gives modules their paths, and identifies parameters and buffers.
        look: read the values of large CPU tensors, once each, to find smaller forms of them.
    """

    def __init__(self, model: nn.Module | None, *, look: bool) -> None:
        self._model = model
        self._look = look
        self._storages = Storages()
        self._local = threading.local()
        self._base: _Base | None = None
        self._stand_in = self._stand_in_for  # one object, which stop_listening() can find
        self.found = Found()
        self._calls = _Calls(model, self._note_module, self._given, self.found)

    # The context.

    def start(self) -> None:
        """Begin, on this thread. Raise ``RuntimeError`` if saved-tensors hooks are disabled."""
        let_transforms_pass()
        outer = current_pair()
        base = _Base(self, outer)
        push_unseen(base.pack, base.unpack)
        self._base = base
        self._storages.own_all(existing_tensors())
        if self._model is not None:
            for module in self._model.modules():
                self._note_module(module)
        listen(self._stand_in)

    def stop(self) -> None:
        """End the recording. Raise ``UsageError`` if contexts are left in the wrong order; the recording has
        ended then.

        On another thread than that of :meth:`start` it raises the same error, and the recording continues.
        """
        if not is_listening(self._stand_in):
            raise UsageError("a saved report must be exited on the thread that entered it")
        self._base = None
        stop_listening(self._stand_in)
        try:
            pop_owned(self, "saved_report(...)")
        finally:
            self._storages.close()
            self._calls.end()
            self._model = None

    def take(self) -> Found:
        """Return what was recorded since the start or the last call, and begin a new record."""
        taken, self.found = self.found, Found()
        self._calls.found = self.found
        self._storages.forget()
        return taken

    @property
    def is_on(self) -> bool:
        """Whether it is between :meth:`start` and :meth:`stop`."""
        return self._base is not None

    def _note_module(self, module: nn.Module) -> None:
        for _, parameter in own_parameters(module):
            self._storages.own(parameter, "parameter")
        for _, buffer in own_buffers(module):
            self._storages.own(buffer, "buffer")

    def _given(self, arguments: list[Any]) -> None:
        for each in arguments:
            if isinstance(each, Tensor) and each.grad_fn is None:
                self._storages.own(each, "input")

    # The pairs.

    def _stand_in_for(self, pack: Pack, unpack: Unpack) -> tuple[Pack, Unpack]:
        has_stood_in = self in getattr(pack, "recorders", ())
        if not self.is_on or has_stood_in:
            return pack, unpack

        def stand_in(tensor: Tensor) -> Any:
            return self.pack(tensor, pack, unpack)

        # Copy the attributes of the pair's own pack hook, for programs that read them.
        functools.update_wrapper(stand_in, pack, assigned=())
        marked: Any = stand_in
        marked.__wrapped__ = _own(pack)
        marked.recorders = (*getattr(pack, "recorders", ()), self)
        return stand_in, RecordedPack.get

    def pack(self, tensor: Tensor, pack: Pack | None, unpack: Unpack) -> RecordedPack:
        """Record a save and pass the tensor to ``pack``; without ``pack``, hold it in place."""
        if not self.is_on or getattr(self._local, "is_packing", False):
            return RecordedPack(HeldVersion(tensor) if pack is None else pack(tensor), unpack)
        self._local.is_packing = True
        try:
            value = HeldVersion(tensor) if pack is None else pack(tensor)
            with without_function_modes():  # a function mode must see only the program's operations
                save = self._save(tensor, pack, sys._getframe(1))
            if save is None or not save.is_saved:
                return RecordedPack(value, unpack, save)
            packed = RecordedPack(value, unpack, save, self.found.lives)
            if pack is None:
                return packed
            packed.storages = identities(tensor)
            save.where = packed.where()
            if save.where in ("hooks", "copied", "compressed"):
                name, foreign = _name_of(pack), self.found.foreign
                foreign[name] = foreign.get(name, 0) + save.unique_bytes
            return packed
        finally:
            self._local.is_packing = False

    def _save(self, tensor: Tensor, pack: Pack | None, frame: FrameType) -> Save | None:
        if in_backward() and is_recomputing(frame):
            return None
        module, boundary = self._calls.running(frame)
        stored, nbytes = self._storages.of(tensor)
        save = Save(tensor, module, nbytes if stored else _nbytes_of(tensor))
        if _module_of(pack) == CHECKPOINT_MODULE:
            save.where, save.is_saved = RECOMPUTED, False
            self.found.is_selective |= is_caching()
        elif boundary:
            save.boundary, save.op = boundary, "checkpoint"
        save.looks_into(stored)
        self.found.saves.append(save)
        if self._look and save.is_saved and save.kind == "activation":
            self._look_at(tensor, save)
        return save

    def _look_at(self, tensor: Tensor, save: Save) -> None:
        found = find_waste(tensor)
        if found is None:
            self.found.not_looked += save.nbytes >= LEAST_BYTES
        elif found[1] < save.nbytes:
            save.waste = found


class _Base:
    """The recorder's own pair, at the bottom of its context."""

    __slots__ = ("left", "outer", "owner")

    def __init__(self, owner: SaveRecorder, outer: Pair | None) -> None:
        self.owner = owner
        self.outer = outer

    def pack(self, tensor: Tensor) -> RecordedPack:
        if self.outer is None:
            return self.owner.pack(tensor, None, HeldVersion.get)
        return self.owner.pack(tensor, *self.outer)

    def steps_aside(self) -> None:
        self.owner.found.transforms += 1

    def unpack(self, packed: RecordedPack) -> Tensor:
        return packed.get()


def _own(pack: Any) -> Any:
    """Return the pack hook that a context pushed, also if a wrapper replaces it."""
    return getattr(pack, "__wrapped__", pack)


def _module_of(pack: Any) -> str:
    return getattr(_own(pack), "__module__", None) or ""


def _nbytes_of(tensor: Tensor) -> int:
    try:
        return int(tensor.nbytes)
    except (NotImplementedError, RuntimeError, TypeError, AttributeError):
        return 0


def _name_of(pack: Any) -> str:
    pack = getattr(getattr(_own(pack), "__self__", None), "pack_hook", _own(pack))
    code = getattr(pack, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return f"{getattr(pack, '__qualname__', None) or type(pack).__name__}{where}"


class _FrameMark:
    """The mark of a running call on its frame. It is callable, and does nothing, in case tracing begins."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        # The path, and the running modules down to this one, by the serial of a _Calls.
        self.calls: dict[int, tuple[str, list[nn.Module]]] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        return None


class _Calls:
    """The module calls during which something was saved, for one report.

    Args:
        model: its modules have the paths of ``named_modules()``; the path of any other module extends the path
            of its caller.
        encountered: called with each module outside the model when it first runs.
        given: called with the arguments of each outermost call, flattened.
        found: the record in which calls are counted.
    """

    def __init__(
        self,
        model: nn.Module | None,
        encountered: Callable[[nn.Module], None],
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
        self._modules: dict[int, nn.Module] = {}  # held, so that their ids are not reused
        self._encountered, self._given = encountered, given
        self.found = found

    def running(self, frame: FrameType | None) -> tuple[str, str]:
        """Return (the path of the innermost running module, the kind of checkpoint that makes the save or
        ``""``)."""
        new: list[FrameType] = []
        path, modules = "", list[nn.Module]()
        boundary = checkpoint_that_saves(frame)
        while frame is not None:
            if frame.f_code is CALL_CODE:
                mark: Any = frame.f_trace
                if type(mark) is _FrameMark and self._serial in mark.calls:
                    path, modules = mark.calls[self._serial]
                    break
                new.append(frame)
            frame = frame.f_back
        for each in reversed(new):
            path, modules = self._begin(each, modules)
        return path, boundary

    def _begin(self, frame: FrameType, above: list[nn.Module]) -> tuple[str, list[nn.Module]]:
        local = frame.f_locals
        module = local["self"]
        if id(module) not in self._names and id(module) not in self._modules:
            self._modules[id(module)] = module
            self._encountered(module)
        if not above:
            self._given(tree_leaves((local.get("args"), local.get("kwargs"))))
        modules = [*above, module]
        path = self._path(modules)
        mark: Any = frame.f_trace
        if mark is None:
            frame.f_trace = mark = _FrameMark()
        if type(mark) is _FrameMark:
            mark.calls[self._serial] = path, modules
            self.found.calls[path] += 1
        else:
            self.found.has_calls = False
        return path, modules

    def _path(self, modules: list[nn.Module]) -> str:
        """Return the path of the last module, from the innermost one that has a name, or from the outermost."""
        named = [at for at, module in enumerate(modules) if id(module) in self._names]
        begin = named[-1] if named else 0
        start = self._names[id(modules[begin])] if named else self._root(modules[0])
        below = module_path(modules[begin:]) if begin + 1 < len(modules) else ""
        return ".".join(filter(None, (start, below))) or f"({type(modules[-1]).__name__})"

    def _root(self, module: nn.Module) -> str:
        """Return the start of paths below an outermost module: ``""`` for the first one, the class for
        others."""
        known = self._roots.get(id(module))
        if known is None:
            kind = type(module).__name__
            self._kinds[kind] += 1
            first = not self._roots and self._model is None
            number = f" {self._kinds[kind]}" if self._kinds[kind] > 1 else ""
            known = self._roots[id(module)] = "" if first else f"({kind}{number})"
        return known

    def end(self) -> None:
        """Drop the references to modules."""
        self._modules.clear()
        self._names.clear()
        self._model = None
