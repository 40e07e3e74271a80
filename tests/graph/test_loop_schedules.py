"""checkpoint_loop's schedules: the number of evaluations against the published optimum."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from backstash.errors import UsageError
from backstash.graph import Binomial, KeepAll, Schedule, TwoLevel, checkpoint_loop
from backstash.graph._loop import _schedules
from backstash.graph._loop._choose import Budgets, MeasuredStep, choose
from backstash.graph._loop._schedules import costs, least_evaluations, play
from test_loop_exact import check, plain


@lru_cache(None)
def by_trying_all(n: int, snapshots: int) -> int:
    """The least evaluations that run ahead, by trying every split."""
    if n <= 1:
        return 0
    if snapshots == 1:
        return n * (n - 1) // 2
    return min(
        k + by_trying_all(n - k, snapshots - 1) + by_trying_all(k, snapshots) for k in range(1, n)
    )


def test_binomial_takes_the_least_evaluations_that_there_are() -> None:
    for n in range(1, 61):
        for snapshots in range(1, 11):
            least = n + by_trying_all(n, snapshots)
            assert play(Binomial(snapshots), n)[0] == least, (n, snapshots)
            assert least_evaluations(n, snapshots) == least, (n, snapshots)


def test_the_oracle_takes_as_many() -> None:
    oracle = pytest.importorskip("checkpoint_schedules", reason="pip install checkpoint_schedules")
    for n in range(2, 40):
        for snapshots in range(1, min(n, 9)):
            evaluations = 0
            schedule = oracle.Revolve(n, snapshots)
            for action in schedule:
                if isinstance(action, oracle.Forward):
                    evaluations += action.n1 - action.n0
            assert play(Binomial(snapshots), n)[0] == evaluations, (n, snapshots)


@pytest.mark.parametrize(
    "schedule", [Binomial(1), Binomial(3), Binomial(50), TwoLevel(4, 2), TwoLevel(1, 1), KeepAll()]
)
@pytest.mark.parametrize("n", [1, 2, 13])
def test_a_run_takes_the_evaluations_that_are_counted(schedule: Schedule, n: int) -> None:
    assert calls_of(n, schedule=schedule) == play(schedule, n)[0]


def calls_of(n: int, **budget: Any) -> int:
    """How often the step of a loop runs, with its backward."""
    calls = 0

    def step(state: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return state.sin()

    x = torch.ones(3, requires_grad=True)
    checkpoint_loop(step, x, n, **budget).sum().backward()
    return calls


def test_no_step_runs_twice_where_the_budget_allows() -> None:
    assert calls_of(50, memory="1MiB") == 50


class EveryThird:
    """One of a user's own."""

    keeps_graphs = False

    def next_snapshot(self, held: tuple[int, ...], stop: int) -> int | None:
        return held[-1] + 3 if held[-1] + 3 < stop else None


def test_a_schedule_of_ones_own() -> None:
    def run(loop: Any) -> list[Any]:
        x = torch.ones(3, requires_grad=True)
        loop(torch.sin, x, 20).sum().backward()
        return [x.grad]

    check(run, {"schedule": EveryThird()})


def test_a_schedule_that_answers_outside_the_allowed_range_is_refused() -> None:
    class Wrong(EveryThird):
        def next_snapshot(self, held: tuple[int, ...], stop: int) -> int | None:
            return stop

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(UsageError, match="next_snapshot returned 5 for held=\\(0,\\), stop=5"):
        checkpoint_loop(torch.sin, x, 5, schedule=Wrong())


@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_snapshots_are_counted_from_one(value: object) -> None:
    with pytest.raises(UsageError, match="Binomial snapshots="):
        Binomial(value)
    with pytest.raises(UsageError, match="TwoLevel every="):
        TwoLevel(value, 1)


def test_a_plan_measures_nothing_that_is_passed_to_it() -> None:
    def step(state: torch.Tensor) -> torch.Tensor:
        raise AssertionError("it ran")

    plan = checkpoint_loop.plan(
        step, torch.ones(1000), 100, memory=24_000, step_seconds=0.01, saved_bytes=4000
    )
    assert plan.schedule == Binomial(5)
    assert plan.evaluations == least_evaluations(100, 5)
    assert (plan.snapshots, plan.memory_bytes, plan.disk_bytes) == (5, 24_000, 0)
    assert plan.predicted_seconds == pytest.approx(0.01 * (plan.evaluations + 200))
    assert "Binomial(snapshots=5)" in str(plan)


def test_a_plan_measures_one_step_and_puts_random_numbers_back() -> None:
    calls = 0

    def step(state: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return torch.nn.functional.dropout(state * w).exp()

    w = torch.ones(1000, requires_grad=True)
    before = torch.get_rng_state()
    plan = checkpoint_loop.plan(step, torch.ones(1000), 10, w, memory="1MiB")
    assert calls == 1
    assert torch.equal(torch.get_rng_state(), before)
    assert plan.schedule == KeepAll()
    assert plan.measured.state_bytes == 4000
    assert plan.measured.saved_bytes >= 8000


def test_a_budget_for_less_than_a_step_is_refused() -> None:
    x = torch.ones(1000, requires_grad=True)
    with pytest.raises(UsageError, match=r"one state \(4000 bytes\)"):
        checkpoint_loop(torch.sin, x, 5, memory=1000)


def test_states_of_kept_graphs_do_not_go_to_a_disk() -> None:
    """A stash takes what a graph begins with for a parameter, and leaves it in place."""
    measured = MeasuredStep(step_seconds=1.0, state_bytes=100, saved_bytes=300)
    fast = partial(Budgets, disk=10**9, disk_speed=1e9)
    assert choose(50, fast(memory=5_000), measured).schedule == KeepAll()
    tight = choose(50, fast(memory=4_999), measured)
    assert isinstance(tight.schedule, TwoLevel) and tight.memory_bytes <= 4_999
    assert choose(50, fast(memory=0), measured).memory_bytes == 0


Keep = Callable[[Tensor], Tensor]
STEPS: dict[str, Callable[[Tensor, Keep], Tensor]] = {
    "saves its input": lambda s, keep: keep(s.sin()),
    "saves its result": lambda s, keep: keep(keep(s * 1.01).tanh()),
    "saves both": lambda s, keep: keep(keep(s.sin()).exp()),
    "saves more": lambda s, keep: keep(keep(s.sin()).sin()),
    "saves nothing": lambda s, keep: keep(s + 1),
}


class Living:
    """Counts the tensors given to it that are still alive, by their storages."""

    def __init__(self) -> None:
        self._made: list[StorageWeakRef] = []

    def keep(self, tensor: Tensor) -> Tensor:
        self._made.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def count(self) -> int:
        return sum(not each.expired() for each in self._made)


@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_plan_counts_what_is_alive_if_all_steps_are_kept(
    step: Callable[[Tensor, Keep], Tensor], is_leaf: bool
) -> None:
    x = torch.ones(1000, requires_grad=True)
    start = x if is_leaf else x.clone()
    plan = checkpoint_loop.plan(step, start, 100, lambda s: s, memory="1MiB")
    assert plan.schedule == KeepAll()
    living = Living()
    result = checkpoint_loop(step, living.keep(start), 100, living.keep, memory="1MiB")
    assert plan.memory_bytes == 4000 * living.count()
    assert result.requires_grad  # and alive until here: the last state counts


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_the_choice_stays_within_the_memory(step: Callable[[Tensor, Keep], Tensor]) -> None:
    living = Living()
    x = living.keep(torch.ones(1000, requires_grad=True))
    end = checkpoint_loop(step, x, 100, living.keep, memory=40_000).sum()
    assert living.count() <= 10
    end.backward()
    y = torch.ones(1000, requires_grad=True)
    plain(step, y, 100, lambda s: s).sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_what_lives_anyway_counts_once() -> None:
    """A state that steps return as it is, and the inputs of the steps, of which each step saves a row."""

    def step(state: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        return (state[0] * state[1] * x).sin(), state[1]

    state = torch.ones(1000, requires_grad=True), torch.ones(1000, requires_grad=True)
    plan = checkpoint_loop.plan(step, state, None, xs=torch.ones(100, 1000), memory="4MiB")
    assert plan.schedule == KeepAll()
    # Each step keeps the first of its states, and the sine's input.
    assert plan.memory_bytes == 4000 * (2 + 100 * 2)


def test_a_state_that_is_part_of_a_large_tensor_counts_as_its_part() -> None:
    x = torch.ones(100_000)[:1000].requires_grad_()
    assert checkpoint_loop.plan(torch.sin, x, 10, memory=40_000).measured.saved_bytes == 4000


def test_formulas_cost_what_a_simulation_does() -> None:
    for n in range(40):
        for snapshots in range(1, 10):
            schedules = [
                Binomial(snapshots),
                *(TwoLevel(every, snapshots) for every in range(1, 12)),
            ]
            for schedule in schedules:
                assert costs(schedule, n) == play(schedule, n), (schedule, n)
    for schedule in (Binomial(1), Binomial(20), Binomial(100), TwoLevel(64, 5)):
        assert costs(schedule, 1000) == play(schedule, 1000), schedule


@pytest.mark.parametrize("memory", [1200, 60_000, "1MiB", "1GiB"])
def test_a_loop_of_unknown_length_begins_without_a_simulation(
    memory: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def simulated(*_: object) -> None:
        raise AssertionError("a schedule was simulated")

    monkeypatch.setattr(_schedules, "checked_next", simulated)
    w = torch.full((3,), 0.1, requires_grad=True)
    state = checkpoint_loop(
        lambda s, w: s * 1.1 + w * s.sin(),
        torch.ones(3),
        None,
        w,
        memory=memory,
        until=lambda s: bool(s[0] > 5),
    )
    state.sum().backward()
    v, expected = torch.full((3,), 0.1, requires_grad=True), torch.ones(3)
    while not expected[0] > 5:
        expected = expected * 1.1 + v * expected.sin()
    expected.sum().backward()
    assert torch.equal(w.grad, v.grad)
