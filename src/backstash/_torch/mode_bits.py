"""Correct operations whose bits under a dispatch mode differ from those without one.

``linalg.svdvals``, ``eigvalsh`` and ``eigvals`` also compute vectors if a gradient may be needed or a dispatch
mode is active; LAPACK's values then differ in the last bits. So do ``svd(compute_uv=False)``, ``cond`` and the
norms of singular values, which call them. Of all operators that PyTorch lists for its own tests (``op_db``)
only these differ, for tensors that need no gradient (``scripts/soak_replays.py --modes``).

Whether a tensor needs a gradient is read from the tensor, except where it is a conjugate or negative view: the
operation then gets a clone that needs none, which PyTorch has made just before. The mode sees the clone, too.

A mode sees the same operation for ``svd`` as for ``svdvals``. So this module reads from the caller's current
instruction which function is called. If that function returns values only, the caller gets the values that
PyTorch computes without a mode. If the instruction does not decide this (a function in a local variable, for
example), the next operation shows whether the program kept the vectors.
"""

from __future__ import annotations

import dis
import sys
import weakref
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from .dispatch import schema_of
from .lookup import required
from .storages import keep_identity, storage_of

__all__ = [
    "NODES_THAT_DIFFER",
    "OPERATIONS_SEEN",
    "TANGENTS_THAT_DIFFER",
    "ModeBits",
    "is_in_func_grad",
    "is_in_jvp",
]

_FLAG = {"aten::_linalg_svd": 2, "aten::_linalg_eigh": 2}  # the argument that requests vectors
_VALUES = {
    "aten::_linalg_svd": 1,
    "aten::_linalg_eigh": 0,
    "aten::linalg_eig": 0,
}  # which result they are
NODES_THAT_DIFFER = frozenset(
    ("ProdBackward0", "ProdBackward1", "CumprodBackward0", "LinalgDetBackward0")
)
"""Nodes that compute differently while a dispatch mode is active: of all operators in ``op_db``, those of torch
2.13."""
TANGENTS_THAT_DIFFER = frozenset(
    (
        "native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit",
        "_batch_norm_with_update", "cudnn_batch_norm", "miopen_batch_norm", "prod",
    )
)  # fmt: skip
"""Operations of which forward-mode AD computes the tangent differently: in ``op_db``, those of torch 2.13 (and
two for GPUs)."""
OPERATIONS_SEEN = frozenset(("clone", *(each.partition("::")[2] for each in _VALUES)))
"""The names of the operations that :class:`ModeBits` has to see."""
_CLONE = torch.ops.aten.clone.default
_eigenvalues: Callable[..., Tensor] = required(
    "torch.ops.aten._linalg_eigvals.default", "computes eigenvalues without vectors"
)
_WITH_VECTORS = frozenset(("linalg_svd", "linalg_eigh", "linalg_eig"))
_VALUES_ALONE = frozenset(
    (
        "linalg_svdvals", "linalg_eigvalsh", "linalg_eigvals", "linalg_cond", "linalg_norm",
        "linalg_matrix_norm", "linalg_matrix_rank", "norm", "nuclear_norm",
    )
)  # fmt: skip


_UNKNOWN = (
    "it is unknown whether torch.linalg.svdvals, eigvalsh or eigvals (also in cond, matrix_rank, "
    "svd(compute_uv=False), norms of singular values) was called on a tensor that needs no gradient, and "
    "recording operations would change its bits: call it by its global name (torch.linalg.svdvals), outside of "
    "torch.func's transforms, or outside of what is recomputed or planned and of checkpoint_loop's step 0, or "
    "give Stash(recompute=False)"
)


class ModeBits:
    """Checks the operations that one dispatch mode sees."""

    def __init__(self) -> None:
        self.vectors: list[Any] = []
        """What :meth:`look` has to check."""
        self._wants_vectors = True
        self._clone: Callable[[], Tensor | None] = _nothing
        self._cloned_by: tuple[int, int] = (0, 0)

    def saw(self, func: Any, args: Any, kwargs: Any, result: Any, depth: int) -> Any:
        """Return the result of an operation that has run, or what it would have been without a mode.

        Args:
            func: the operation.
            args: its positional arguments.
            kwargs: its keyword arguments.
            result: its result.
            depth: the depth of the caller's frame, counted from this one.
        """
        if not self.may_differ(func, args, depth + 1):
            self.note_clone(func, args, result, depth + 1)
            return result
        schema = schema_of(func)
        name = schema.name
        if name in _FLAG:
            names = [each.name for each in schema.arguments]
            given = dict(zip(names, args, strict=False)) | kwargs
            flag = names[_FLAG[name]]
            if not given.get(flag, True):
                return result
            alone = func(**(given | {flag: False}))[_VALUES[name]]
        else:
            alone = _eigenvalues(*args, **kwargs)
        at = _VALUES[name]
        if torch.equal(alone.view(torch.uint8), result[at].view(torch.uint8)):
            return result
        caller = sys._getframe(depth)
        called = _called_name(caller)
        if called in _WITH_VECTORS:
            return result
        if _is_in_transform(caller):
            # Its wrapper of the tensor would request vectors, and it is not seen whether there is one.
            raise UsageError(_UNKNOWN)
        self.vectors = [_weak(each) for place, each in enumerate(result) if place != at]
        self._wants_vectors = called not in _VALUES_ALONE
        if self._wants_vectors:
            return result
        return (*result[:at], alone, *result[at + 1 :])

    def may_differ(self, func: Any, args: Any, depth: int) -> bool:
        """Whether the bits of an operation's result may differ. ``depth`` as in :meth:`saw`."""
        schema = schema_of(func)
        if schema is None or schema.name not in _VALUES or schema.overload_name:
            return False
        given = args[0]
        needs_gradient = given.requires_grad or (
            self._clone() is given and self._cloned_by == _instruction(sys._getframe(depth))
        )
        return not (needs_gradient and torch.is_grad_enabled())

    def note_clone(self, func: Any, args: Any, result: Any, depth: int) -> None:
        """If ``func`` cloned a conjugate or negative view that needs a gradient, record the clone. The program
        may have called it, too: only an operation of the same instruction gets the clone from PyTorch.
        """
        if func is not _CLONE or not (args[0].is_conj() or args[0].is_neg()):
            return
        if args[0].requires_grad and torch.is_grad_enabled():
            self._clone = weakref.ref(result)
            self._cloned_by = _instruction(sys._getframe(depth))

    def look(self) -> None:
        """Check the last operation, before the next one runs.

        Raises:
            UsageError: no one kept the computed vectors, so perhaps only the values were requested; or the
                vectors were kept although only the values seemed to be requested.
        """
        vectors, self.vectors = self.vectors, []
        if vectors and self._wants_vectors == all(each.expired() for each in vectors):
            raise UsageError(_UNKNOWN)


def _called_name(frame: FrameType) -> str:
    """Return the name of the function that ``frame`` calls; ``""`` if the instruction does not show which one
    that is, or before Python 3.11."""
    code = frame.f_code
    if not hasattr(code, "co_positions"):
        return ""
    instructions = list(dis.get_instructions(code))
    call = next((each for each in instructions if each.offset == frame.f_lasti), None)
    where = call.positions if call is not None else None
    if where is None or where.lineno is None or where.col_offset is None:
        return ""
    begin, end = (where.lineno, where.col_offset), (where.end_lineno, where.end_col_offset)
    parts = [
        each
        for each in instructions
        if (at := each.positions) is not None
        and (at.lineno, at.col_offset) == begin
        and (at.end_lineno, at.end_col_offset) < end
    ]
    names = [
        each for each in parts if each.opname.startswith("LOAD_") and isinstance(each.argval, str)
    ]
    if not names or len(names) < sum(each.opname not in _SILENT for each in parts):
        return ""
    return str(getattr(_found(names, frame), "__name__", ""))


_SILENT = ("PUSH_NULL", "CACHE", "EXTENDED_ARG", "PRECALL", "KW_NAMES")


def _found(names: list[dis.Instruction], frame: FrameType) -> Any:
    """Return the object that a chain of names refers to, such as ``torch.linalg.svd``, if it begins with a
    global name and leads through modules."""
    first = names[0]
    if first.opname not in ("LOAD_GLOBAL", "LOAD_NAME"):
        return None
    scopes = [frame.f_globals]
    if first.opname == "LOAD_NAME":  # in no function: this makes no copy of local variables
        scopes = [frame.f_locals, frame.f_globals]
    found = next((each[first.argval] for each in scopes if first.argval in each), None)
    for each in names[1:]:
        if not isinstance(found, ModuleType):
            return None
        found = getattr(found, each.argval, None)
    return found


def is_in_func_grad(frame: FrameType | None) -> bool:
    """Return whether ``frame`` is of a backward that ``torch.func.grad`` runs itself. Then all its nodes read
    wrapped tensors, with which formulas compute the same whether a mode is active or not. A backward that
    ``torch.func.vjp`` returned may run after the tensors were unwrapped."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith("torch.") or module.startswith("torch._functorch"):
            break
        frame = frame.f_back
    if frame is None or frame.f_code.co_name != "_autograd_grad" or frame.f_back is None:
        return False
    return _is_transform_s(frame.f_back, "grad_and_value_impl")


def is_in_jvp(frame: FrameType | None) -> bool:
    """Return whether ``torch.func.jvp`` calls ``frame``. Then all tensors with a tangent are wrapped."""
    while frame is not None and not _is_transform_s(frame, "_jvp_with_argnums"):
        frame = frame.f_back
    return frame is not None


def _is_transform_s(frame: FrameType, name: str) -> bool:
    is_named = frame.f_code.co_name == name
    return is_named and str(frame.f_globals.get("__name__", "")).startswith("torch._functorch")


def _is_in_transform(frame: FrameType | None) -> bool:
    """Return whether a transform of ``torch.func`` calls ``frame``."""
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("torch._functorch"):
            return True
        frame = frame.f_back
    return False


def _instruction(frame: FrameType) -> tuple[int, int]:
    """Return what identifies the instruction that ``frame``, which is running, executes now."""
    return id(frame), frame.f_lasti


def _nothing() -> None:
    return None


def _weak(tensor: Tensor) -> Any:
    storage = storage_of(tensor)
    assert storage is not None
    return keep_identity(storage)
