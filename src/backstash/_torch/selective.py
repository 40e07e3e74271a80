"""The two contexts of a selective checkpoint, with a store for outputs that follows the stash.

Torch's own contexts (``create_selective_checkpoint_contexts``) keep outputs in a dictionary that no hook sees,
and treat policies that offload as recomputation. They are recognized by their class and their policy, in torch
2.11 to 2.15. If either is missing, torch's contexts are used unchanged.

In forward, the policy is called for each operation, and an output that it keeps is passed to ``keep``. When
the function runs again, the n-th call of an operator gets the result of its n-th call in forward, if its
tensors have the same shapes and types. Three things differ from torch's contexts, each for the sake of plain
PyTorch's gradients:

- An operation that returns its input, or a view of it, is run again. A view costs nothing, and an in-place
  write has to be repeated for those who read its result.
- An operator that draws random numbers is run again, and its result is replaced by the one that was kept. So
  later operators draw the same numbers as in forward.
- Kept outputs stay until their graph dies, so ``retain_graph=True`` works.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from ..errors import UsageError
from .dispatch import TorchDispatchMode, schema_of
from .lookup import optional
from .trees import tree_leaves, tree_map_only

__all__ = ["KeptOutput", "with_kept_outputs"]

_CACHING: Any = optional("torch.utils.checkpoint._CachingTorchDispatchMode", None)
_IGNORED: Any = optional(
    "torch.utils.checkpoint.SAC_IGNORED_OPS", frozenset({torch.ops.aten.detach.default})
)
_exclude: Any = optional("torch._C._SetExcludeDispatchKeyGuard", None)
_SAVED = {CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE}
_OFFLOADED = {
    policy
    for policy in CheckpointPolicy
    if policy.name in ("MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD")
}


class KeptOutput(Protocol):
    """An output that is kept."""

    def get(self) -> Tensor:
        """Return the tensor, unchanged."""


def with_kept_outputs(
    contexts: tuple[Any, Any], keep: Callable[[Tensor, bool], KeptOutput]
) -> tuple[Any, Any]:
    """Return two contexts that replace torch's; other contexts are returned unchanged.

    Args:
        contexts: the result of ``context_fn``, for forward and for the second run of the function.
        keep: called with a tensor to keep, and with whether the policy asked for host memory.
    """
    forward, again = contexts
    policy = getattr(forward, "policy_fn", None)
    if (
        _CACHING is None
        or _exclude is None
        or type(forward) is not _CACHING
        or policy is None
        or getattr(again, "allow_cache_entry_mutation", True)
    ):
        return contexts
    calls: dict[tuple[Any, int], _SelectiveCall] = {}
    return _Forward(policy, keep, calls), _Again(calls)


class _SelectiveCall:
    """One operation of forward: the shapes and types of its tensors, and its output, if it is kept."""

    __slots__ = ("given", "output")

    def __init__(self, given: tuple[Any, ...], output: Any = None) -> None:
        self.given = given
        self.output = output


class _Mode(TorchDispatchMode):
    def __init__(self, calls: dict[tuple[Any, int], _SelectiveCall]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = calls
        self.counts: Counter[Any] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return ``True``, as torch's contexts do: compiled code inside is not inspected."""
        return True

    def next_call(self, function: Any) -> tuple[Any, int]:
        self.counts[function] += 1
        return function, self.counts[function]


class _Forward(_Mode):  # type: ignore[no-untyped-call]
    def __init__(
        self,
        policy: Callable[..., Any],
        keep: Callable[[Tensor, bool], KeptOutput],
        calls: dict[tuple[Any, int], _SelectiveCall],
    ) -> None:
        super().__init__(calls)
        self.policy = policy
        self.keep = keep

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = _likeness(args, kwargs)  # before an in-place write may change it
        output = function(*args, **kwargs)
        if function in _IGNORED:
            return output
        call = self.calls[self.next_call(function)] = _SelectiveCall(given)
        context = SelectiveCheckpointContext(is_recompute=False, op_output=output)
        chosen = self.policy(context, function, *args, **kwargs)
        is_offloaded = chosen in _OFFLOADED
        if (chosen is True or chosen in _SAVED or is_offloaded) and not _is_alias(function):
            with torch.no_grad(), _counting_versions():
                call.output = tree_map_only(
                    Tensor, functools.partial(self._kept, is_offloaded), output
                )
        return output

    def _kept(self, is_offloaded: bool, tensor: Tensor) -> KeptOutput:
        return self.keep(tensor, is_offloaded)


class _Again(_Mode):  # type: ignore[no-untyped-call]
    def __enter__(self) -> Any:
        self.counts.clear()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _IGNORED:
            return function(*args, **kwargs)
        call = self.calls.get(self.next_call(function))
        if call is None or call.given != _likeness(args, kwargs):
            self.calls.clear()  # torch never frees a graph whose function failed in its second run
            raise UsageError(
                f"a checkpoint: {function} was called differently when the function was recomputed, so "
                "the kept outputs cannot be matched; the function must make the same calls each time"
            )
        if call.output is None or torch.Tag.nondeterministic_seeded in function.tags:
            output = function(*args, **kwargs)
            if call.output is None:
                return output
        with torch.no_grad(), _counting_versions():
            return tree_map_only(object, _got, call.output)


def _got(leaf: Any) -> Any:
    # Leaves that are not tensors are returned unchanged. A tensor is detached each time, since autograd makes
    # it an output of the operation that runs again.
    return leaf.get().detach() if hasattr(leaf, "get") else leaf


def _likeness(args: Any, kwargs: Any) -> tuple[Any, ...]:
    leaves = tree_leaves((args, kwargs))
    return tuple((leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor))


@functools.cache
def _is_alias(function: Any) -> bool:
    """Return whether the operator returns its input, or a view of it."""
    schema = schema_of(function)
    return schema is not None and any(each.alias_info is not None for each in schema.returns)


def _counting_versions() -> Any:
    """Return a context in which ``detach`` shares the version counter below autograd, as it does above."""
    return _exclude(torch._C.DispatchKey.ADInplaceOrView, False)
