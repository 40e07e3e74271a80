"""An interrupt where Python could deliver one: at the n-th such point inside backstash, for every n.

A signal's handler runs only where the interpreter looks for one: when a Python function begins, when a call
to something that is not Python has returned, and when a loop goes round; Python 3.10 looks wherever a
condition makes it jump, too. A trace function counts those points and raises ``KeyboardInterrupt`` at the
n-th, which is what a Ctrl-C does that arrives just then.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import backstash
from faulty import INPUTS, are_right, forward

_INSIDE = str(Path(backstash.__file__).parent)
_CALLS = ("CALL", "CALL_FUNCTION_EX", "CALL_FUNCTION", "CALL_METHOD", "CALL_FUNCTION_KW", "CALL_KW")
_BACK = {
    code for name, code in dis.opmap.items() if "JUMP_BACKWARD" in name or name == "JUMP_ABSOLUTE"
}
_JUMPS = {
    code
    for name, code in dis.opmap.items()
    if name.startswith("POP_JUMP_IF") and sys.version_info < (3, 11)
}
_LOOKS = (
    _BACK
    | _JUMPS
    | {code for name, code in dis.opmap.items() if name in _CALLS or name == "RESUME"}
)
_NOWHERE = -1


class Interrupter:
    """Raises ``KeyboardInterrupt`` at the ``at``-th point of this thread; a negative one only counts.

    Args:
        at: which point.
        inside: the beginnings of the paths of files whose points count.

    Python 3.13 shows the points of a function only from the call on after the first that it was shown:
    what is counted is counted twice there.
    """

    def __init__(self, at: int, inside: tuple[str, ...] = (_INSIDE,)) -> None:
        self.at = at
        self.count = 0
        self.where = ""
        self._inside = inside
        self._last: dict[FrameType, int] = {}  # where its last look may follow from, or _NOWHERE

    def _global(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        back = frame.f_back
        if back in self._last:
            self._last[back] = _NOWHERE  # the call goes to Python, and its return is no look
        if not frame.f_code.co_filename.startswith(self._inside):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        self._last[frame] = _NOWHERE
        return self._local

    def _local(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if event == "return":
            self._last.pop(frame, None)
        elif event == "exception":  # a call that raised has not returned: nobody looks
            self._last[frame] = _NOWHERE
        elif event == "opcode":
            code, last, here = frame.f_code.co_code, self._last[frame], frame.f_lasti
            self._last[frame] = here if code[here] in _LOOKS else _NOWHERE
            if last != _NOWHERE and _has_looked(code[last], last, here):
                self._point(frame)
        return self._local

    def _point(self, frame: FrameType) -> None:
        self.count += 1
        if self.count == self.at:
            self.where = (
                f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
            )
            self._last.clear()
            sys.settrace(None)
            raise KeyboardInterrupt(self.where)

    def __enter__(self) -> Interrupter:
        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks when the function is set, only
        sys.settrace(self._global)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self._last.clear()


def _has_looked(code: int, last: int, here: int) -> bool:
    """A conditional jump that is not taken is no look: what follows may be the end of a ``with``."""
    if code in _JUMPS:
        return here != last + 2
    return code not in _BACK or here <= last


def step_interrupted_at(at: int, stash: backstash.Stash) -> tuple[Interrupter, list[str]]:
    """One step, interrupted; and what is wrong with its graph, whose backward can be tried again."""
    loss, found = None, []
    with Interrupter(at) as interrupter:
        try:
            with stash:
                loss = forward()
            torch.autograd.grad(loss, INPUTS, retain_graph=True)
        except KeyboardInterrupt:
            pass
    if loss is not None and not are_right(torch.autograd.grad(loss, INPUTS)):
        found.append("a wrong gradient of the interrupted graph")
    return interrupter, found


def threads_of_ours() -> list[threading.Thread]:
    """The workers that are alive."""
    return [each for each in threading.enumerate() if each.name.startswith("backstash")]
