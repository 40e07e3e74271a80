"""Keeps ``torch.compile`` out of this package's functions.

In a part of a compiled model that it cannot trace, Dynamo (the tracer of ``torch.compile``) tries every
Python frame that begins there, also that of a hook which autograd or a module calls: it would compile
a stash's functions again and again as their numbers change, warn of each builtin it does not know, and fail
over a tensor that it cannot fake.
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
_eval_frame: Any = optional("torch._C._dynamo.eval_frame", None)

not_compiled: Callable[[_F], _F] = optional("torch._disable_dynamo", lambda function: function)
"""A decorator: compiled code calls the function as it is, and does not warn of what it cannot trace in it.
In torch 2.11 to 2.15; where it is missing, the function itself, of which compiled code may warn."""


def leave_untraced(module: str) -> None:
    """Mark the functions of ``module``'s package, as far as it is imported: Dynamo begins in none of them.

    What they call it may still compile, so a compiled function inside a stash is. Each code object is marked
    as torch marks its own; ``torch.compiler.disable`` would import all of the compiler with backstash, and
    cost each call some microseconds. A torch that knows no such mark traces what it will.
    """
    strategy = getattr(_eval_frame, "_FrameExecStrategy", None)
    if strategy is None:
        return
    action = _eval_frame._FrameAction
    mark = strategy(action.SKIP, action.DEFAULT)
    package = module.partition(".")[0]
    for name, part in list(sys.modules.items()):
        if name == package or name.startswith(package + "."):
            codes = [code for each in vars(part).values() for code in _codes_of(each, name)]
            while codes:
                code = codes.pop()
                _eval_frame.set_code_exec_strategy(code, mark)
                codes += [each for each in code.co_consts if isinstance(each, CodeType)]


def untraced(function: _F) -> _F:
    """A decorator for what a compiled model calls, such as a module's hook: Dynamo does not trace it.

    It sets what ``torch.compiler.disable`` sets, a mark that torch 2.11 to 2.15 read; one that does not
    traces the function. Calling that would import all of the compiler with backstash.
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
    value = getattr(value, "__func__", value)  # of a classmethod or a staticmethod
    value = getattr(value, "__wrapped__", value)
    if isinstance(value, FunctionType) and value.__module__ == module:
        return [value.__code__]
    return []
