"""Where PyTorch computes other bits under a dispatch mode than without one, which no replay could show.

``linalg.svdvals`` and ``eigvalsh``, and with them ``cond`` and the norms of singular values, compute vectors,
too, where a gradient may be wanted or a dispatch mode is active; LAPACK's values then differ in the last bits.
Of all operators that PyTorch lists for its own tests (``op_db``) these are the ones, each for a tensor that
needs no gradient (``scripts/soak_replays.py --modes``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from .dispatch import schema_of
from .storages import keep_identity, storage_of

__all__ = ["ModeBits"]

_FLAG = {"aten::_linalg_svd": 2, "aten::_linalg_eigh": 2}  # the argument that asks for vectors
_VALUES = {"aten::_linalg_svd": 1, "aten::_linalg_eigh": 0}  # the result that has the values


class ModeBits:
    """Looks at the operations that one dispatch mode sees."""

    def __init__(self) -> None:
        self._vectors: list[Any] = []

    def saw(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operation has run."""
        schema = schema_of(func)
        name = schema.name if schema is not None else ""
        if name not in _FLAG or schema.overload_name:
            return
        matrix = args[0]
        if matrix.requires_grad and torch.is_grad_enabled():
            return
        names = [each.name for each in schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        flag = names[_FLAG[name]]
        if given.get(flag, True):
            at = _VALUES[name]
            alone = func(**(given | {flag: False}))[at]
            if not torch.equal(alone.view(torch.uint8), result[at].view(torch.uint8)):
                self._vectors = [_weak(each) for place, each in enumerate(result) if place != at]

    def look(self) -> None:
        """The next operation is about to run.

        Raises:
            UsageError: nobody has the vectors that were computed, so only the values may have been asked for.
        """
        vectors, self._vectors = self._vectors, []
        if vectors and all(each.expired() for each in vectors):
            raise UsageError(
                "torch.linalg.svdvals or eigvalsh (also in cond, matrix_rank, norms of singular values) of a "
                "tensor that needs no gradient has other bits while operations are recorded than without: "
                "compute it outside of what is recomputed, or outside of checkpoint_loop's step 0"
            )


def _weak(tensor: Tensor) -> Any:
    storage = storage_of(tensor)
    assert storage is not None
    return keep_identity(storage)
