"""Keep ``torch.compile`` out of this package's functions.

In a part of a compiled model that it cannot trace, Dynamo (the tracer of ``torch.compile``) tries to compile
every Python frame that begins there, including those of hooks that autograd or a module calls. It would
compile a stash's functions again and again as their numbers change, warn about builtins that it does not know,
and fail on tensors that it cannot fake.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, TypeVar

from .lookup import optional

__all__ = ["leave_untraced", "not_compiled", "untraced"]

_REASON = (
    "a hook of backstash runs as it is; with fullgraph=True, attach or hook what torch.compile returned, or "
    "enter `with stash:` around the call"
)
_F = TypeVar("_F", bound=Callable[..., Any])
_marked: dict[str, int] = {}  # how many names each module had when it was marked
_eval_frame: Any = optional("torch._C._dynamo.eval_frame", None)

not_compiled: Callable[[_F], _F] = optional("torch._disable_dynamo", lambda function: function)
"""A decorator. Compiled code calls the function without tracing it and without a warning. Exists in torch 2.11
to 2.15; if it is missing, the function is returned unchanged, and compiled code may warn."""


def leave_untraced(module: str) -> None:
    """Mark the imported functions of ``module``'s package, so that Dynamo does not begin in any of them.

    Functions that they call may still be compiled, so a compiled function inside a stash works. Each code
    object gets the mark that torch gives its own. ``torch.compiler.disable`` would import the whole compiler
    with backstash, and cost some microseconds at each call. A torch without this mark traces the functions.
    """
    strategy = getattr(_eval_frame, "_FrameExecStrategy", None)
    if strategy is None:
        return
    action = _eval_frame._FrameAction
    mark = strategy(action.SKIP, action.DEFAULT)
    package = module.partition(".")[0]
    for name, part in list(sys.modules.items()):
        if name == package or name.startswith(package + "."):
            known = len(vars(part))
            if _marked.get(name) == known:
                continue
            _marked[name] = known
            codes = [code for each in vars(part).values() for code in _codes_of(each, name)]
            while codes:
                code = codes.pop()
                _eval_frame.set_code_exec_strategy(code, mark)
                codes += [each for each in code.co_consts if isinstance(each, CodeType)]


def untraced(function: _F) -> _F:
    """A decorator that keeps Dynamo from tracing a function that a compiled model calls, such as a hook.

    It sets the same mark as ``torch.compiler.disable``, which torch 2.11 to 2.15 read; another version traces
    the function. Calling ``torch.compiler.disable`` would import the whole compiler with backstash.
    """
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = _REASON
    return function


def _codes_of(value: Any, module: str) -> list[CodeType]:
    if isinstance(value, type):
        if value.__module__ != module:
            return []
        return [code for each in vars(value).values() for code in _codes_of(each, module)]
    if isinstance(value, property):
        return [
            each.__code__ for each in (value.fget, value.fset) if isinstance(each, FunctionType)
        ]
    value = getattr(value, "__func__", value)  # a classmethod or staticmethod
    value = getattr(value, "__wrapped__", value)
    if isinstance(value, FunctionType) and value.__module__ == module:
        return [value.__code__]
    return []
