"""checkpoint_loop refuses what it cannot do exactly, naming the step."""

import functools
import io
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backstash import Stash
from backstash.errors import InplaceError, UsageError
from backstash.graph import Binomial, checkpoint_loop
from backstash.graph._loop._progress import LoopProgress
from backstash.units import parse_bytes

B3 = {"schedule": Binomial(3)}


def leaf(*shape: int) -> Tensor:
    return torch.ones(shape or (4,), requires_grad=True)


def ragged() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n": -1}, "n=-1: allowed is a whole number of at least 0"),
        ({"n": 2.0}, "n=2.0"),
        ({"n": True}, "n=True"),
        ({"n": None}, "n=None: allowed with until= or xs="),
        ({"step": 3}, "step=3: allowed is a callable"),
        ({"until": 3}, "until=3"),
        ({"schedule": 3}, "schedule=3: allowed is an object with keeps_graphs and next_snapshot"),
        ({"schedule": None}, "checkpoint_loop has no budget"),
        ({"state": object()}, "state holds a object"),
        ({"state": ragged()}, "state holds a NestedTensor, a tensor whose data are other tensors"),
        ({"xs": torch.ones(5)}, "n=4, but xs has inputs for 5 steps"),
        ({"xs": (torch.ones(4), torch.ones(3))}, "one first dimension in common"),
        ({"stash": Stash(), "memory": 1}, "stash= has budgets of its own"),
        ({"stash": Stash(), "schedule": None}, "stash= needs a schedule="),
    ],
)
def test_bad_arguments_before_anything_ran(wrong: dict[str, Any], message: str) -> None:
    def step(state: Tensor) -> Tensor:
        raise AssertionError("it ran")

    given = {"step": step, "state": leaf(), "n": 4, **B3, **wrong}
    with pytest.raises(UsageError, match=message.replace("(", "\\(")):
        checkpoint_loop(given.pop("step"), given.pop("state"), given.pop("n"), **given)


def at(number: int, then: Any) -> Any:
    """A step that does ``then`` at step ``number``."""
    return lambda state, i: then(state) if i == number else state * 2


@pytest.mark.parametrize(
    ("then", "message"),
    [
        (lambda s: (s, s), "step 2 returned a state of the structure"),
        (lambda s: s[:], "step 2 returned a view of its input"),
        (lambda s: s.view(2, 2), "step 2 returned a view of its input"),
        (lambda s: s.add_(1), "step 2 changed its input in place"),
        (lambda s: object(), "the state that step 2 returned holds a object"),
    ],
)
@pytest.mark.parametrize("needs", [True, False])
def test_bad_steps_by_their_number(then: Any, message: str, needs: bool) -> None:
    with pytest.raises(UsageError, match=message):
        checkpoint_loop(at(2, then), leaf().requires_grad_(needs), 5, index=True, **B3)


def test_ys_are_a_pair() -> None:
    with pytest.raises(UsageError, match=r"step 0 returned a Tensor: with ys=True"):
        checkpoint_loop(torch.sin, leaf(), 5, ys=True, **B3)


@pytest.mark.parametrize("wrong", [0, 3, 8])
def test_a_step_that_does_not_repeat_itself_is_named(wrong: int) -> None:
    runs = [0] * 9

    def step(state: Tensor, number: int) -> Tensor:
        runs[number] += 1
        return state.sin() + (1e-6 if number == wrong and runs[number] == 2 else 0)

    x = leaf()
    y = checkpoint_loop(step, x, 9, index=True, **B3)
    runs[8] += 1  # the last step's graph is kept, and does not run again
    if wrong == 8:
        y.sum().backward()
        return
    with pytest.raises(UsageError, match=f"step {wrong} gave a different result"):
        y.sum().backward()
    assert x.grad is None


def test_elements_that_change_places_are_seen() -> None:
    turns = 0

    def step(state: Tensor) -> Tensor:
        nonlocal turns
        turns += 1
        return state.roll(1 if turns <= 5 else 2)

    y = checkpoint_loop(step, torch.arange(4.0, requires_grad=True), 5, **B3)
    with pytest.raises(UsageError, match="gave a different result when it was replayed"):
        y.sum().backward()


def test_changes_in_place_are_caught() -> None:
    w, x = leaf(), torch.ones(4)
    y = checkpoint_loop(lambda s: s * w, x, 5, **B3)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(InplaceError, match="changed in place after checkpoint_loop ran"):
        y.sum().backward()
    w = leaf()
    y = checkpoint_loop(lambda s: s * w, x, 5, **B3)
    x.mul_(2)
    with pytest.raises(InplaceError):
        y.sum().backward()


def test_there_is_no_double_backward() -> None:
    x = leaf()
    y = checkpoint_loop(torch.sin, x, 5, **B3)
    with pytest.raises(UsageError, match="no double backward"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_autocasts_cache_would_round_otherwise() -> None:
    w, x = leaf(4, 4), leaf(4, 4)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(UsageError, match="cache_enabled=False"),
    ):
        checkpoint_loop(lambda s: (s @ w).float(), x, 5, **B3)


def test_progress_is_off_where_nobody_looks(capfd: pytest.CaptureFixture[str]) -> None:
    checkpoint_loop(torch.sin, leaf(), 5, **B3).sum().backward()
    assert capfd.readouterr().err == ""
    checkpoint_loop(torch.sin, leaf(), 5, progress=True, **B3).sum().backward()
    assert "backward 5 of 5 steps" in capfd.readouterr().err


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    progress = LoopProgress(10, None)
    progress.done(9, 1)
    assert terminal.getvalue() == ""
    now[0] = 4.0
    progress.done(6, 4)
    assert "\rcheckpoint_loop: backward 4 of 10 steps, 4 evaluations, 4 s, about 6 s to go" in (
        terminal.getvalue()
    )


def test_what_a_step_left_behind_for_a_later_one() -> None:
    """A replay would leave another tensor: its gradient belongs in the state."""
    w, left = leaf(), []

    def step(state: Tensor, number: int) -> Tensor:
        product = state * w
        if number == 0:
            left.append(product)
        return product + left[0] if number == 4 else product

    with pytest.raises(UsageError, match=r"step 4 uses .* computed by an earlier step"):
        checkpoint_loop(step, leaf(), 5, index=True, **B3)


@pytest.mark.parametrize("earlier", [0, 1000])
def test_what_another_thread_computes_inside_a_step(earlier: int) -> None:
    """Its nodes have numbers of that thread, which mean nothing here: above or below this one's."""
    w = leaf()

    def step(state: Tensor) -> Tensor:
        found: list[Tensor] = []

        def compute() -> None:
            for _ in range(2000 - earlier):
                product = (state * w).sin()
            found.append(product)

        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
        return found[0] * w

    for _ in range(earlier * 100):
        w * 2
    with pytest.raises(UsageError, match=r"step 0 uses .* on another thread"):
        checkpoint_loop(step, leaf(), 1, **B3)


def test_what_another_thread_computed_before_a_loop() -> None:
    v, x = leaf(), leaf()
    for _ in range(1000):
        c = v * 2
    with ThreadPoolExecutor(1) as pool:
        loop = functools.partial(pool.submit, checkpoint_loop)
        with pytest.raises(UsageError, match=r"pass it as one of \*args"):
            loop(lambda state: (state * c).sin(), x, 5, **B3).result()
        loss = loop(lambda state, c: (state * c).sin(), x, 5, c, **B3).result().sum()
    found = torch.autograd.grad(loss, [v, x])
    state = x
    for _ in range(5):
        state = (state * (v * 2)).sin()
    for one, other in zip(found, torch.autograd.grad(state.sum(), [v, x]), strict=True):
        assert torch.allclose(one, other)


def test_hooks_that_a_step_puts_where_they_would_see_a_part() -> None:
    w = leaf()

    def on_input(state: Tensor) -> Tensor:
        state.register_hook(lambda gradient: gradient * 2)
        return state * w

    def on_weight(state: Tensor) -> Tensor:
        w.register_hook(lambda gradient: gradient * 2)
        return state * w

    with pytest.raises(UsageError, match="step 0 registered a hook on its input"):
        checkpoint_loop(on_input, leaf(), 5, **B3)
    with pytest.raises(UsageError, match="step 1 registered a hook on a tensor from outside"):
        checkpoint_loop(on_weight, leaf(), 5, **B3)


def test_what_is_on_its_way_to_the_disk_is_in_the_budget(disk_dir: Path) -> None:
    """A small state goes there, too; on its way are at most two windows of an eighth each."""
    found: list[Any] = []

    def made(**given: Any) -> Stash:
        found.append(given)
        return Stash(**given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("backstash.graph._loop._call.Stash", made)
        checkpoint_loop(torch.sin, leaf(), 2, memory="8MiB", disk=disk_dir)
    (given,) = found
    assert parse_bytes(given["keep"]) + given["inflight"] + given["prefetch"] == 8 << 20
    assert given["inflight"] == given["prefetch"] == 1 << 20
    assert given["min_bytes"] == 4096
