"""Find the ``nn.Module`` that is running by reading the call stack, so that no module needs a hook.

``Module._call_impl`` runs a module's forward. Its frames refer to every module between the outermost call and
the operation that saves. Reading them costs a few microseconds, is done only for tensors large enough to move,
and leaves nothing behind on any model.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from types import FrameType
from typing import Any

from torch import Tensor, nn

from .lookup import optional
from .module_parts import own_buffers, own_parameters
from .storages import storage_identity
from .tensors import flattened, is_wrapper_subclass

__all__ = [
    "CALL_CODE",
    "as_if_running",
    "call_frame",
    "child_names",
    "compiled_around",
    "is_buffer",
    "is_compiled",
    "is_parameter",
    "is_running",
    "mark_outermost_call",
    "module_path",
    "module_that_has",
    "running_modules",
]

_PLAIN = (Tensor, nn.Parameter)
_MOST_PATHS = 4096
_paths: dict[tuple[int, int], str] = {}  # by the id of a module and of one somewhere below it

CALL_CODE: Any = optional("torch.nn.Module._call_impl.__code__", None)
"""The code of the frames that run a module's forward, whose local variable ``self`` is the module. Exists in
torch 2.11 to 2.15; if it is missing, no running module is found."""

_WRAPPER_CODE: Any = optional("torch.nn.Module._wrapped_call_impl.__code__", None)
"""The code that calls it, with the same ``self``. Exists in torch 2.11 to 2.15; if it is missing or not the
caller, the frame itself is read."""


def running_modules(frame: FrameType | None = None) -> list[nn.Module]:
    """Return the modules whose forward is running on this thread, outermost first."""
    modules: list[nn.Module] = []
    if frame is None:
        if _late.modules is not None:
            return [*_late.modules]
        frame = sys._getframe(1)
    current: FrameType | None = frame
    while current is not None:
        caller = current.f_back
        if current.f_code is CALL_CODE:
            # The caller mostly has the same ``self``. Before Python 3.13 reading a frame's locals takes time
            # for each local variable, and the caller has few.
            is_wrapped = caller is not None and caller.f_code is _WRAPPER_CODE
            modules.append((caller if is_wrapped else current).f_locals["self"])  # type: ignore[union-attr]
        current = caller
    modules.reverse()
    return modules


class _Late(threading.local):
    modules: list[nn.Module] | None = None


_late = _Late()


class as_if_running:
    """Within it, :func:`running_modules` returns these: those that ran when a tensor was saved which is packed
    later. ``None``: those that run then."""

    __slots__ = ("_before", "_modules")

    def __init__(self, modules: list[nn.Module] | None) -> None:
        self._modules = modules

    def __enter__(self) -> None:
        self._before, _late.modules = _late.modules, self._modules

    def __exit__(self, *_: object) -> None:
        _late.modules = self._before


def is_parameter(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is an ``nn.Parameter``, or a subclass's tensor that torch marks as one.

    Equivalent to ``isinstance(tensor, nn.Parameter)`` without its extra Python call per tensor. The mark
    ``_is_param`` exists in torch 2.11 to 2.15; without it, only the class counts.
    """
    return issubclass(type(tensor), nn.Parameter) or getattr(tensor, "_is_param", False)


def call_frame() -> FrameType | None:
    """Return the innermost frame on this thread that runs a module's forward."""
    current: FrameType | None = sys._getframe(1)
    while current is not None and current.f_code is not CALL_CODE:
        current = current.f_back
    return current


def mark_outermost_call(make: Callable[[], object]) -> bool:
    """Make the outermost module call of this thread own the result of ``make`` until it returns.

    Returns whether that worked. The object is stored in ``f_trace``, the only attribute of a frame that can be
    set. A debugger that already uses it has precedence.
    """
    outermost: FrameType | None = None
    current: FrameType | None = sys._getframe(1)
    while current is not None:
        if current.f_code is CALL_CODE:
            outermost = current
        current = current.f_back
    if outermost is None:
        return False
    wrapper = outermost.f_back
    if wrapper is not None and wrapper.f_code is _WRAPPER_CODE:
        outermost = wrapper  # the inner frame may have the mark of a report
    if outermost.f_trace is not None:
        return False
    outermost.f_trace = make()  # type: ignore[assignment]
    return True


def is_running(frame: FrameType) -> bool:
    """Return whether ``frame`` is on this thread's stack."""
    current: FrameType | None = sys._getframe(1)
    while current is not None and current is not frame:
        current = current.f_back
    return current is frame


def module_path(modules: list[nn.Module]) -> str:
    """Return the path of the last of ``modules`` in the first: ``"blocks.3.mlp"``.

    The root alone gives its class in parentheses, and an empty list gives ``""``. A module that is not
    registered under its caller is given by its class, ``"blocks.3.(Helper)"``.
    """
    if not modules:
        return ""
    names: list[str] = []
    for parent, child in pairwise(modules):
        for name, module in parent._modules.items():  # not named_children(): this runs at each save
            if module is child:
                names.append(name)
                break
        else:
            names.append(_path_under(parent, child) or f"({type(child).__name__})")
    return ".".join(names) or f"({type(modules[0]).__name__})"


def child_names(module: nn.Module) -> list[str]:
    """Return the names of the modules that are registered in ``module``."""
    return list(module._modules)


def _path_under(parent: nn.Module, child: nn.Module) -> str:
    """The path of ``child`` below the children of ``parent``, as in a ``ModuleList`` that its forward iterates.

    It is asked for at each save, so the search of all modules is made once: a path that was found holds while
    it leads to the same module.
    """
    key = id(parent), id(child)
    known = _paths.get(key, "")
    if known:
        found: Any = parent
        for name in known.split("."):
            if name not in found._modules:
                break
            found = found._modules[name]
        else:
            if found is child:
                return known
    for path, module in parent.named_modules():
        if module is child and path:
            if len(_paths) >= _MOST_PATHS:
                _paths.clear()
            _paths[key] = str(path)
            return str(path)
    return ""


def is_buffer(cdata: int, modules: list[nn.Module]) -> bool:
    """Return whether the storage with this ``_cdata`` belongs to a buffer or parameter of a running module."""
    for module in reversed(modules):
        for tensors in (module._buffers, module._parameters):  # this runs at each save
            for tensor in tensors.values():
                if tensor is None:
                    continue
                try:
                    if storage_identity(tensor.untyped_storage()) == cdata:
                        return True
                except (NotImplementedError, RuntimeError):
                    pass
                if type(tensor) not in _PLAIN and _is_part_of(cdata, tensor):
                    return True
    return False


def module_that_has(tensor: Tensor) -> str:
    """Return the path of the module with ``tensor``'s storage as parameter or buffer; ``""`` if none.

    Searches all modules of the process, so it is for error messages only.
    """
    cdata = _cdata_of(tensor)
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    longest, found = -1, ""
    for root in modules if cdata else ():
        for path, module in root.named_modules():
            for name, each in (*own_parameters(module), *own_buffers(module)):
                if _cdata_of(each) == cdata and len(path) > longest:
                    longest = len(path)
                    found = f"{path or f'({type(module).__name__})'}, whose {name} it is,"
    return found


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module`` is a wrapper that ``torch.compile`` returned."""
    return "_orig_mod" in module._modules


def compiled_around(module: nn.Module) -> bool:
    """Return whether a compiled graph may contain ``module`` and so ignore hooks that are registered now.

    This reads what ``torch._dynamo`` has compiled since its last reset, in torch 2.11 to 2.15. If that name is
    missing, everything passed to ``torch.compile`` counts as compiled. If nothing was compiled, nothing is
    searched; otherwise all objects of the process are.
    """
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    codes = getattr(getattr(compiler, "input_codes", None), "seen", True)
    if compiler is None or not codes:
        return False
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    # torch.compile's wrappers. A module compiled in place is recompiled if a hook is added to a part of it.
    regions = [each for each in modules if each is not module and "_orig_mod" in each._modules]
    return any(part is module for region in regions for part in region.modules())


def _is_part_of(cdata: int, tensor: Any) -> bool:
    """Return whether a wrapper subclass (such as a DTensor) has an inner tensor with this storage."""
    return is_wrapper_subclass(tensor) and any(
        _cdata_of(part) == cdata or _is_part_of(cdata, part)
        for part in flattened(tensor)[0].values()
    )


def _cdata_of(tensor: Tensor | None) -> int:
    try:
        return storage_identity(tensor.untyped_storage()) if tensor is not None else 0
    except (NotImplementedError, RuntimeError):
        return 0
