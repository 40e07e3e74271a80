"""The two contexts of a selective checkpoint, with outputs that go where saved tensors go.

torch's own (``create_selective_checkpoint_contexts``) keep outputs in a dictionary that no hook sees, and take
the policies that offload for recomputation. They are known by their class and by the policy that they hold;
torch 2.11 to 2.15 have both. Where one is missing, torch's contexts are used as they are.

In forward, each operation is shown to the policy, and an output that is to stay is given to ``keep``. When the
function runs again, the n-th call of an operator gets what its n-th call made, if its tensors have the shapes
and types that they had. Three things differ from torch's, each towards plain PyTorch's gradients:

- An operation that returns its input, or a view of it, is done again: a view costs nothing, and a write in
  place must be done again for those who read what it wrote.
- An operator that draws random numbers is run again, and what it makes is dropped for what was kept: those
  that draw after it draw what they drew.
- What is kept stays until its graph dies: ``retain_graph=True`` works.
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
        """The tensor, as it was."""


def with_kept_outputs(
    contexts: tuple[Any, Any], keep: Callable[[Tensor, bool], KeptOutput]
) -> tuple[Any, Any]:
    """The two contexts that stand in for torch's; others are returned as they are.

    Args:
        contexts: what ``context_fn`` returned, for forward and for the function's second run.
        keep: is called with a tensor that stays, and with whether the policy asked for host memory.
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
    """One operation of forward: what its tensors were like, and its output, where that is kept."""

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
        """Code that is compiled inside is not looked into, as by torch's contexts."""
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
        given = _likeness(args, kwargs)  # before a write in place may change it
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
            self.calls.clear()  # torch never frees a graph whose function failed when it ran again
            raise UsageError(
                f"a checkpoint: {function} was called otherwise when the function ran again, so what was kept "
                "cannot be matched; the function must do the same each time"
            )
        if call.output is None or torch.Tag.nondeterministic_seeded in function.tags:
            output = function(*args, **kwargs)
            if call.output is None:
                return output
        with torch.no_grad(), _counting_versions():
            return tree_map_only(object, _got, call.output)


def _got(leaf: Any) -> Any:
    # What was no tensor is there as it was.
    # A new tensor each time: autograd makes it the output of the operation that runs again.
    return leaf.get().detach() if hasattr(leaf, "get") else leaf


def _likeness(args: Any, kwargs: Any) -> tuple[Any, ...]:
    leaves = tree_leaves((args, kwargs))
    return tuple((leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor))


@functools.cache
def _is_alias(function: Any) -> bool:
    """Whether the operator returns its input, or a view of it."""
    schema = schema_of(function)
    return schema is not None and any(each.alias_info is not None for each in schema.returns)


def _counting_versions() -> Any:
    """Below autograd, ``detach`` shares no version counter; in this context it does, as above."""
    return _exclude(torch._C.DispatchKey.ADInplaceOrView, False)
