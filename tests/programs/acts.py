"""Steps that act on the run itself: threads, hooks, contexts, and what is seen late."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from backstash import graph
from backstash.errors import UsageError

from .functions import Broken, Doubles, SeenLate
from .operations import ALONE

if TYPE_CHECKING:
    from .run import Result, Run, Step

Act = Callable[["Run", Tensor, Tensor, int], "Result"]
CHOICES = ("exp", "square", "rrelu", "own", "mul_", "matmul", "second half", "scale")


# Threads. The main one waits, so a program means the same in every run.


def in_a_thread(run: Run, x: Tensor, y: Tensor, choice: int) -> Result:
    """An operation on a thread that has ended when the next step begins."""
    name = CHOICES[choice % len(CHOICES)]
    return run.in_a_thread(run.under_scope(lambda: run.compute(name, x, y)))


def on_the_other_thread(run: Run, x: Tensor, y: Tensor, choice: int) -> Result:
    """An operation on a thread that stays alive: only it may judge copies of what it saved."""
    name = CHOICES[choice % len(CHOICES)]
    return run.on_the_other_thread(run.under_scope(lambda: run.compute(name, x, y)))


def seen_late(run: Run, x: Tensor, y: Tensor, choice: int) -> Result:
    """The bytes change, whatever waits is written, another thread looks; then the version changes."""

    def meanwhile() -> None:
        run.gate("free")
        run.gate("elsewhere")

    run.gate("hold")
    said = run.compute("sin", x, y)
    with run.watching(x):
        SeenLate.apply(x, meanwhile)
    return said


def changed_on_its_way(run: Run, x: Tensor, y: Tensor, choice: int) -> Result:
    """Saved, changed before its bytes have gone down, and looked at once they have."""
    run.gate("hold")
    said = run.compute(("sin", "tanh", "square", "matmul")[choice % 4], x, y)
    said = run.compute(("mul_", "zero a row", "change quietly")[choice % 3], x, y) or said
    run.gate("free")
    run.gate("land")
    return said


def through_data(run: Run, x: Tensor, y: Tensor, choice: int) -> Result:
    """Written through ``.data``, and saved by another ``.data``: the same bytes, a version of its own."""
    said = run.compute("sin", x, y)
    run.compute("tanh", y, y)
    run.gate("land")
    with run.watching(x):
        x.data.mul_(0.5)
    leaf = run.leaves[choice % 2]
    return run.compute("mul", leaf if leaf.shape == x.shape else leaf.mean(), x.data) or said


def fill(run: Run, x: Tensor, y: Tensor, choice: int) -> Result:
    """A buffer is filled unseen, some columns at a time, and what is full of it is saved each time."""
    buffer = torch.full((16, 16), 0.5, dtype=torch.float64, device=y.device)
    for last in (6, 8 + choice % 4, 14):
        with run.watching(buffer[:, last - 2 : last]):
            buffer.data[:, last - 2 : last] = y.detach().abs().mean() + last
        run.values.append(run.module(torch.mul, buffer[:, :last], x.mean()))
        run.compute("tanh", y, y)
    return None


def doubles(run: Run, x: Tensor, y: Tensor, choice: int) -> Result:
    """Backward changes the very tensor that was saved, which another node has saved too."""
    held = x.detach().cos()
    run.values.append(run.module(torch.mul, y.mean(), held))
    run.values.append(Doubles.apply(run.values[-1], held, run.cut))
    return None


# Hooks on tensors and nodes.


def _hook(run: Run, x: Tensor, hook: Callable[[Tensor], Any]) -> None:
    # On a view that an in-place change of its base has outdated, register_hook ends torch 2.13's process.
    if x.requires_grad and x._base is None:
        run.handles.append(x.register_hook(hook))


def hook_changes(run: Run, x: Tensor, y: Tensor, choice: int) -> Result:
    """Backward of ``x`` changes ``y`` in place."""

    def change(grad: Tensor) -> None:
        with torch.no_grad():
            y.mul_(0.5)

    _hook(run, x, change)
    return None


def hook_changes_a_leaf(run: Run, x: Tensor, y: Tensor, choice: int) -> Result:
    """As an optimizer that steps within backward."""
    return hook_changes(run, x, run.leaves[choice % 2], choice)


def change_a_leaf(run: Run, x: Tensor, y: Tensor, choice: int) -> Result:
    """As an optimizer's step between forward and backward."""
    with torch.no_grad():
        run.leaves[choice % 2].mul_(0.5)
    return None


def hook_doubles(run: Run, x: Tensor, y: Tensor, choice: int) -> Result:
    """Backward of ``x`` doubles its gradient, and on its way calls backward of ``y``."""

    def double(grad: Tensor) -> Tensor:
        if choice % 2 and y.requires_grad and not getattr(run, "is_inside", False):
            run.is_inside = True  # type: ignore[attr-defined]
            try:
                with torch.enable_grad():
                    run.differentiate(y, retain_graph=True)
            finally:
                run.is_inside = False  # type: ignore[attr-defined]
        return grad * 2

    _hook(run, x, double)
    return None


def hook_fails(run: Run, x: Tensor, y: Tensor, choice: int) -> Result:
    """The first backward of ``x`` fails, the next ones do not."""
    failed: list[int] = []

    def fail(grad: Tensor) -> None:
        if not failed:
            failed.append(1)
            raise Broken("in a hook")

    _hook(run, x, fail)
    return None


def a_leaf(run: Run, x: Tensor, y: Tensor, choice: int) -> Result:
    """The leaf itself as a value, or a view of it."""
    leaf = run.leaves[choice % 2]
    run.values.append(leaf if choice < 4 else leaf[2:, :5])
    return None


# Contexts, entered above the run's own. Only the innermost pair of hooks applies.


def _clones() -> AbstractContextManager[Any]:
    def pack(tensor: Tensor) -> Tensor:
        # What has no gradient function may still be filled, as rrelu's noise: a clone of it is anything.
        return tensor.detach().clone() if tensor.requires_grad else tensor.detach()

    return saved_tensors_hooks(pack, lambda tensor: tensor.detach())


def _aliases() -> AbstractContextManager[Any]:
    return saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor.detach())


def _fails_to_pack() -> AbstractContextManager[Any]:
    def pack(tensor: Tensor) -> Tensor:
        raise Broken("in pack")

    context: Any = saved_tensors_hooks(pack, lambda tensor: tensor)
    # torch's checkpoint that is left by an error pops its own pair only when its generator is collected.
    context.admits_no_checkpoint = True
    return context


def _fails_to_unpack() -> AbstractContextManager[Any]:
    def unpack(tensor: Tensor) -> Tensor:
        raise Broken("in unpack")

    return saved_tensors_hooks(lambda tensor: tensor.detach(), unpack)


def _entering(make: Callable[[], AbstractContextManager[Any]]) -> Act:
    def enter(run: Run, x: Tensor, y: Tensor, choice: int) -> Result:
        run.enter_above(make())
        return None

    return enter


def enter_other(run: Run, x: Tensor, y: Tensor, choice: int) -> Result:
    """Another stash within the stash."""
    if not run.above:  # in plain PyTorch it is no context: another's hooks would stay the innermost
        run.enter_above(run.other_scope())
    return None


def enter_again(run: Run, x: Tensor, y: Tensor, choice: int) -> Result:
    """The same stash within itself."""
    if not run.above:
        run.enter_above(run.scope())
    return None


def leave_above(run: Run, x: Tensor, y: Tensor, choice: int) -> Result:
    """Leave the newest of them."""
    run.leave_above()
    return None


def leave_ours_first(run: Run, x: Tensor, y: Tensor, choice: int) -> Result:
    """Leave the stash while another context that was entered later is active: it must stay so."""
    if run.above and all(type(each) is saved_tensors_hooks for each in run.above):
        # torch's own pair, as the reference's is, pops whatever is on top: that is put back.
        is_torch_s = type(run.context) is saved_tensors_hooks
        above = run.above if is_torch_s else []
        for context in reversed(above):
            context.__exit__(None, None, None)
        try:
            run.leave()
        except UsageError:
            pass
        for context in above:
            context.__enter__()
    return None


def without_hooks(run: Run, x: Tensor, y: Tensor, choice: int) -> Result:
    """What refuses to run under hooks, run outside them."""
    if run.above or run.context is None:
        return None
    run.leave()
    try:
        with graph.disable_saved_tensors_hooks("no hooks here"):
            out = torch.func.grad(lambda a: (a.sin() * y.detach().mean()).sum())(x.detach())
            run.values.append(out * x if out.shape == x.shape else out)
    finally:
        run.enter()
    return None


ACTS: dict[str, Act] = {
    "in a thread": in_a_thread,
    "on the other thread": on_the_other_thread,
    "seen late": seen_late,
    "changed on its way": changed_on_its_way,
    "through data": through_data,
    "fill": fill,
    "doubles": doubles,
    "a leaf": a_leaf,
    "change a leaf": change_a_leaf,
    "hook changes": hook_changes,
    "hook changes a leaf": hook_changes_a_leaf,
    "hook doubles": hook_doubles,
    "hook fails": hook_fails,
    "enter clones": _entering(_clones),
    "enter aliases": _entering(_aliases),
    "enter save_on_cpu": _entering(graph.save_on_cpu),
    "enter skip": _entering(graph.skip),
    "enter failing to pack": _entering(_fails_to_pack),
    "enter failing to unpack": _entering(_fails_to_unpack),
    "enter other": enter_other,
    "enter again": enter_again,
    "leave above": leave_above,
    "leave ours first": leave_ours_first,
    "without hooks": without_hooks,
}
LATER_ACTS = {"doubles", "hook changes", "hook changes a leaf", "hook fails"}
CONTEXTS = frozenset(name for name in ACTS if name.startswith(("enter", "leave")))


def is_alone(step: Step) -> bool:
    """Whether a step uses state of the whole process, so that no other program may run at the same time."""
    name, _, choice = step
    if name in ("in a thread", "on the other thread"):
        name = CHOICES[choice % len(CHOICES)]
    return name in ALONE
