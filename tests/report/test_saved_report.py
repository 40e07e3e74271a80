"""saved_report: the plain graph's figures, under whichever hooks, and nothing is changed or left."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from backstash import Action, SavedTensor, Stash, graph
from backstash.errors import InplaceError, UsageError
from backstash.report import draw, saved_report
from backstash.report._saved import budgets
from backstash.units import parse_bytes
from saved_programs import PAIRS, figures, gradients, pairs, program, saved_plainly

PLACES = {
    "disk": {"disk", "in place"},
    "clone": {"copied"},
    "composed": {"copied"},
    "numpy": {"hooks"},
}


def test_figures_are_those_of_the_plain_graph() -> None:
    model, forward = program()
    total, unique, count = saved_plainly(forward(), model)
    with saved_report(model) as saved:
        loss = forward()
    assert (saved.total_bytes, saved.unique_bytes) == (total, unique)
    assert sum(row.saves for row in saved.rows) == len(saved.tensors) == count
    for rows in (saved.rows, saved.by_module(1), saved.by_op(), saved.by_dtype(), saved.by_kind()):
        assert sum(row.saved_bytes for row in rows) == total
        assert sum(row.unique_bytes for row in rows) == unique == saved.peak_bytes
        assert sum(row.share for row in rows) == pytest.approx(1)
    loss.backward()
    assert (saved.total_bytes, saved.unique_bytes) == (total, unique)


@pytest.mark.parametrize("order", ["around", "inside"])
@pytest.mark.parametrize("name", PAIRS)
def test_figures_and_gradients_under_any_pair(name: str, order: str, disk_dir: Path) -> None:
    model, forward = program()
    expected = gradients(model, forward())
    with saved_report(model) as plain:
        forward()
    saved = saved_report(model)
    pair = pairs(disk_dir)[name]()
    outer, inner = (saved, pair) if order == "inside" else (pair, saved)
    with outer, inner:
        loss = forward()
        found = gradients(model, loss) if name == "mutation" else []
    if order == "inside" and name == "skip":
        assert saved.rows == ()  # within skip() there is no pair, not even ours
        return
    places = {place for row in saved.rows for place in row.where}
    found = found or gradients(model, loss)
    assert figures(saved) == figures(plain)
    assert places <= PLACES.get(name, {"in place", "keep"}) and places
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected)


def choose(saved: SavedTensor) -> Action | None:
    """Recompute what a Linear saves, pack what a dropout saves."""
    if saved.module.endswith(".0"):
        return Action("recompute")
    return Action("pack") if saved.module.endswith(".2") else None


@pytest.mark.parametrize("order", ["around", "inside"])
def test_what_a_stash_frees_is_freed_under_a_report_too_and_has_its_place(order: str) -> None:
    parts = (nn.Sequential(nn.Linear(300, 300), nn.GELU(), nn.Dropout(0.5)) for _ in range(2))
    model, x = nn.Sequential(*parts), torch.randn(300, 300)
    with saved_report(model) as plain:
        model(x).square().mean().backward()
    stash, saved = Stash(policy=choose, keep=None), saved_report(model)
    with stash if order == "around" else saved, saved if order == "around" else stash:
        loss = model(x).square().mean()
    places = {row.module: set(row.where) for row in saved.rows}
    assert stash.stats().recomputed_bytes == 300 * 300 * 4
    assert places["1.0"] == {"recomputed"} and places["1.2"] == {"packed"}
    assert figures(saved) == figures(plain) and saved.recomputed_bytes == 0
    assert "352 KiB to be recomputed" in str(saved)
    tensors = [each for node in draw(loss).nodes for each in node.tensors]
    drawn = {place.where for each in tensors for place in each.places}
    assert {"recomputed", "packed"} <= drawn
    loss.backward()
    stash.close()


def test_places_of_a_foreign_pair_are_reported() -> None:
    x = torch.randn(1000, requires_grad=True)
    with saved_report() as saved:
        with saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
            x.exp().sum().backward()
    assert [tensor.where for tensor in saved.tensors] == ["compressed"]
    (note,) = saved.notes
    assert "3.91 KiB went to the pack hook" in note and "test_saved_report.py" in note


def test_storages_are_distinguished_although_addresses_are_reused(disk_dir: Path) -> None:
    """What moved to disk is freed, and its address handed out again."""
    x = torch.randn(300, 300, requires_grad=True)
    with Stash(disk=disk_dir, inflight=0) as stash, saved_report() as saved:
        y = x
        for _ in range(20):
            y = y.tanh()
            stash.stats()
    assert saved.unique_bytes == saved.total_bytes == 20 * x.nbytes
    assert len({tensor.storages for tensor in saved.tensors}) == 20
    y.sum().backward()


def test_kinds() -> None:
    class Kinds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.register_buffer("buffer", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.weight[2:].repeat(2)[:8] * self.buffer[:8]
            mask = torch.rand(8) > 0.5
            return torch.where(mask, x.exp(), x.exp()[:8].sin()) * torch.ones(8)

    model = Kinds()
    with saved_report(model) as saved:
        model(torch.ones(8)[:8])
    found = {(tensor.op, tensor.name): tensor.kind for tensor in saved.tensors if tensor.op}
    assert not found  # the graph is gone, so no operation is claimed
    with saved_report(model) as saved:
        y = model(torch.ones(8)[:8])
    found = {(tensor.op, tensor.name): tensor.kind for tensor in saved.tensors}
    assert found["WhereBackward0", "condition"] == "activation"
    kinds = {row.name: row for row in saved.by_kind()}
    assert kinds["input"].saves == 1 and kinds["input"].unique_bytes == 32
    assert kinds["buffer"].saves == 1 and kinds["buffer"].unique_bytes == 0
    with saved_report() as unnamed:
        y = model(torch.ones(8)[:8])
    assert [tensor.kind for tensor in unnamed.tensors] == [tensor.kind for tensor in saved.tensors]
    assert y.requires_grad


def test_parameters_are_known_through_views_and_without_a_model() -> None:
    layer = nn.Linear(4, 4)
    x = torch.ones(2, 4, requires_grad=True)
    with saved_report() as saved:
        y = layer(x)
    assert sorted(tensor.kind for tensor in saved.tensors) == ["input", "parameter"]
    assert saved.unique_bytes == x.nbytes and saved.activation_bytes == 0
    assert y.requires_grad


def test_calls_are_counted_by_module() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Inner(), nn.Sequential(Inner(), nn.Identity())])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                for _ in range(3):
                    x = layer(x)
            return x.sin()

    x = torch.ones(4, requires_grad=True)
    with saved_report() as saved:
        y = Outer()(x)
    assert {row.module: row.calls for row in saved.rows} == {
        "layers.0": 3,
        "layers.1.0": 3,
        "(Outer)": 1,
    }
    by_depth = {row.module: (row.calls, row.saves) for row in saved.by_module(depth=2)}
    assert by_depth == {"layers.0": (3, 3), "layers.1": (3, 3), "(Outer)": (1, 1)}
    assert {row.module: row.calls for row in saved.by_module(1)} == {"layers": 0, "(Outer)": 1}
    y.sum().backward()
    with pytest.raises(UsageError, match="depth=0"):
        saved.by_module(0)


def test_paths_begin_at_the_given_model_and_other_roots_are_distinguished() -> None:
    one, two = nn.Sequential(nn.Tanh()), nn.Sequential(nn.Tanh())
    x = torch.ones(3, requires_grad=True)
    with saved_report() as saved:
        y = two(one(x))
    assert {row.module for row in saved.rows} == {"0", "(Sequential 2).0"}
    with saved_report(two) as saved:
        y = two(one(x))
        y = nn.Sequential(two)(y)
    assert {row.module: row.calls for row in saved.rows} == {"0": 2, "(Sequential 2).0": 1}
    assert y.requires_grad


def test_calls_are_not_guessed_under_a_debugger() -> None:
    model, x = nn.Sequential(nn.Tanh()), torch.ones(3, requires_grad=True)

    def trace(frame: object, event: str, argument: object) -> object:
        return trace

    before = sys.gettrace()
    with saved_report(model) as saved:
        sys.settrace(trace)
        try:
            y = model(x)
        finally:
            sys.settrace(before)
    assert [(row.module, row.calls) for row in saved.rows] == [("0", None)]
    assert "calls were not counted" in saved.notes[-1]
    assert y.requires_grad


def test_operations_are_those_of_the_graph_or_of_backward() -> None:
    x = torch.ones(3, requires_grad=True)
    with saved_report() as saved:
        y = (x * x).exp().sum()
    ops = {(tensor.op, tensor.name) for tensor in saved.tensors}
    assert ops == {("MulBackward0", "self"), ("MulBackward0", "other"), ("ExpBackward0", "result")}
    with saved_report() as saved:
        (x * x).exp().sum().backward()
    assert {row.name: row.saves for row in saved.by_op()} == {"MulBackward0": 2, "ExpBackward0": 1}
    with saved_report() as saved:
        (x * x).exp().sum()
    assert {row.name: row.saves for row in saved.by_op()} == {"": 3}
    assert y.requires_grad


def test_a_report_has_what_checkpoint_frees_and_what_it_saves() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 50), nn.Sigmoid())
    x = torch.randn(20, 50, requires_grad=True)
    expected = gradients(model, model(x).square().mean())
    for inside in (False, True):
        with saved_report(model) as saved:
            loss = checkpointing.checkpoint(model, x, use_reentrant=False).square().mean()
            found = gradients(model, loss) if inside else []
        found = found or gradients(model, loss)
        assert all(map(torch.equal, found, expected))
        # Held: the region's input, and its output for the power. Freed: what the ReLU saved.
        assert (saved.unique_bytes, saved.recomputed_bytes) == (2 * x.nbytes, x.nbytes)
        assert saved.total_bytes == 2 * x.nbytes
        boundary = [each for each in saved.tensors if each.op == "checkpoint" and each.nbytes]
        assert [(tensor.nbytes, tensor.where) for tensor in boundary] == [(x.nbytes, "in place")]
        rows = {row.module: row.recomputed_bytes for row in saved.rows}
        assert rows == {"": 0, "0": 0, "1": x.nbytes, "2": 0, "3": 0}
        assert "discarded 3.91 KiB" in saved.notes[0] and "3.91 KiB recomputed" in str(saved)


def test_reentrant_checkpoint_says_what_it_does_not_know() -> None:
    model = nn.Sequential(nn.Linear(50, 50), nn.ReLU())
    x = torch.randn(20, 50, requires_grad=True)
    for inside in (False, True):
        with saved_report(model) as saved:
            loss = checkpointing.checkpoint(model, x, use_reentrant=True).square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        assert saved.total_bytes == saved.unique_bytes == 2 * x.nbytes
        (note,) = saved.notes
        assert "1 tensor(s)" in note and "not known" in note


def test_selective_checkpoint_is_said_to_keep_more() -> None:
    model, x = nn.Linear(50, 50), torch.randn(20, 50)
    keep = [torch.ops.aten.addmm.default]

    def context() -> object:
        return checkpointing.create_selective_checkpoint_contexts(keep)

    with saved_report(model) as saved:
        checkpointing.checkpoint(
            lambda x: model(x).sin(), x, use_reentrant=False, context_fn=context
        ).sum().backward()
    assert any("selective checkpointing" in note for note in saved.notes)


def test_second_order_saves_count_and_recomputation_in_backward_does_not() -> None:
    x = torch.randn(50, requires_grad=True)
    with saved_report() as saved:
        (gradient,) = torch.autograd.grad(x.exp().sum(), x, create_graph=True)
        gradient.sum().backward()
    assert saved.total_bytes > x.nbytes


def test_what_was_held_at_once_is_less_when_backward_runs_in_between() -> None:
    x = torch.randn(1000, requires_grad=True)
    with saved_report() as saved:
        for _ in range(3):
            x.exp().sum().backward()
        held = x.exp().exp()
    assert saved.unique_bytes == 5 * x.nbytes and saved.peak_bytes == 2 * x.nbytes
    assert "at most 7.81 KiB at once" in str(saved)
    assert held.requires_grad


def test_take_begins_again_from_nothing() -> None:
    model = nn.Sequential(nn.Tanh())
    x = torch.ones(10, requires_grad=True)
    with saved_report(model) as saved:
        model(x * x).sum().backward()
        first = saved.take()
        for _ in range(2):
            model(x * x).sum().backward()
    found = [(row.module, row.calls, row.saves, row.unique_bytes) for row in first.rows]
    assert found == [("", None, 2, 40), ("0", 1, 1, 40)]  # x, and the tanh's result
    found = [(row.module, row.calls, row.saves, row.unique_bytes) for row in saved.rows]
    assert found == [("0", 2, 2, 80), ("", None, 4, 40)]
    rest = saved.take()
    assert rest.total_bytes == 240 and saved.rows == ()


def test_tensors_made_of_others_count_by_their_parts() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    dense = torch.randn(6, 3, requires_grad=True)
    sparse = torch.eye(6).to_sparse()
    with saved_report() as saved:
        y = torch.sparse.mm(sparse, dense)
        nested = torch.nested.as_nested_tensor([x[:2], x[2:]], layout=torch.jagged).exp()
    found = {tensor.op: tensor for tensor in saved.tensors}
    assert found["SparseAddmmBackward0"].nbytes == sparse._nnz() * (2 * 8 + 4)
    assert found["SparseAddmmBackward0"].kind == "input"
    assert found["ExpBackward0"].nbytes >= x.nbytes and found["ExpBackward0"].shape is None
    assert {tensor.where for tensor in saved.tensors} == {"in place"} and not saved.notes
    assert all(len(tensor.storages) > 1 for tensor in found.values())
    assert y.requires_grad and nested.requires_grad


def test_a_change_in_place_is_still_an_error() -> None:
    x = torch.ones(3, requires_grad=True)
    with saved_report():
        y = x.exp()
    y.detach().zero_()
    with pytest.raises(InplaceError, match="ExpBackward0 is at version 1"):
        y.sum().backward()


def test_nothing_is_held_for_the_report() -> None:
    x = torch.ones(1000, requires_grad=True)
    model = nn.Sequential(nn.Tanh())
    with saved_report(model) as saved:
        middle = x.exp()
        gone = weakref.ref(middle.untyped_storage())
        y = model(middle)
        given = weakref.ref(middle)
        del middle
        y.sum().backward()
        del y
        gc.collect()
        assert given() is None and gone() is None
    watched = weakref.ref(model)
    del model
    gc.collect()
    assert watched() is None and saved.total_bytes == 8000


def test_nothing_is_left_and_other_threads_are_not_touched() -> None:
    autograd = torch._C._autograd
    push = autograd._push_saved_tensors_default_hooks
    x = torch.ones(3, requires_grad=True)
    packed = []

    def elsewhere() -> None:
        with saved_tensors_hooks(lambda t: packed.append(1) or t.clone(), lambda t: t):
            (x * 2).exp().sum().backward()

    with pytest.raises(ZeroDivisionError), saved_report() as saved:
        assert autograd._push_saved_tensors_default_hooks is not push
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        raise ZeroDivisionError
    assert autograd._push_saved_tensors_default_hooks is push
    assert autograd._top_saved_tensors_default_hooks(False) is None
    assert packed == [1] and saved.rows == ()


def test_misuse_is_refused() -> None:
    with pytest.raises(UsageError, match=r"allowed is an nn\.Module"):
        saved_report("model")  # type: ignore[arg-type]
    saved = saved_report()
    with saved:
        with pytest.raises(UsageError, match="entered only once"):
            saved.__enter__()
    with pytest.raises(UsageError, match="entered only once"):
        saved.__enter__()
    with pytest.raises(UsageError, match="more often"):
        saved.__exit__(None, None, None)
    inner = saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
    with pytest.raises(UsageError, match="reverse order"), saved_report():
        inner.__enter__()
    inner.__exit__()


def test_the_graph_can_be_looked_at_meanwhile(disk_dir: Path) -> None:
    x = torch.randn(300, 300, requires_grad=True)
    with saved_report():
        plain = x.exp()
        with Stash(disk=disk_dir, inflight=0) as stash:
            moved = x.exp()
        stash.stats()
    with saved_report(), saved_tensors_hooks(lambda t: "gone", lambda name: x):
        foreign = x.exp()
    for node, where in ((plain, "in place"), (moved, "disk"), (foreign, "hooks")):
        (found,) = graph.saved(node.grad_fn)
        assert (found.name, found.shape, found.nbytes) == ("result", (300, 300), x.nbytes)
        assert (found.where, found.dtype) == (where, torch.float32)
    (plain + moved).sum().backward()


def test_it_is_left_on_the_thread_that_entered_it() -> None:
    x = torch.ones(3, requires_grad=True)
    caught = []

    def leave() -> None:
        try:
            saved.__exit__(None, None, None)
        except UsageError as error:
            caught.append(str(error))

    with saved_report() as saved:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        y = x.exp()
    assert caught == ["a saved report must be exited on the thread that entered it"]
    assert saved.unique_bytes == 12 and y.requires_grad


def test_a_stash_inside_a_checkpoint_counts_once(disk_dir: Path) -> None:
    x = torch.randn(300, 300, requires_grad=True)
    stash = Stash(disk=disk_dir, inflight=0)
    inside = stash(lambda x: x.exp().sin())
    with saved_report() as saved:
        checkpointing.checkpoint(inside, x, use_reentrant=False).sum().backward()
    ops = sorted(
        tensor.op for tensor in saved.tensors if tensor.nbytes
    )  # torch 2.11 saves an empty one
    assert ops == ["ExpBackward0", "SinBackward0", "checkpoint"]
    stash.close()


def test_modes_of_the_program_do_not_see_the_questions() -> None:
    asked = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            asked.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    class Relu(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(
                x.relu()
            )  # saved when forward has ended, outside any torch function
            return x.relu()

    x = torch.randn(300, 300, requires_grad=True)
    with saved_report() as saved, Watch():
        y = Relu.apply(x)
    assert saved.waste and "relu" in asked
    assert not set(asked) & {"untyped_storage", "storage_offset", "count_nonzero", "aminmax"}
    assert y.requires_grad


def test_a_deep_graph_is_no_trouble() -> None:
    x = torch.ones(1, requires_grad=True)
    with saved_report(look=False) as saved:
        y = x
        for _ in range(5_000):
            y = y.sin()
    assert [(row.name, row.saves) for row in saved.by_op()] == [("SinBackward0", 5_000)]
    del y


def test_budgets_are_what_a_stash_does(disk_dir: Path) -> None:
    widths = [256, 1024, 128, 512, 16, 640, 256]  # unlike sizes: what goes first matters
    layers = (nn.Linear(a, b) for a, b in itertools.pairwise(widths))
    model = nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers))
    x = torch.randn(256, 256)
    with saved_report(model) as saved:
        loss = model(x).sum()
        loss.backward()
    for budget in saved.budgets():
        stash = Stash(keep=budget.keep_bytes, disk=disk_dir, min_bytes="64KiB")
        with stash:
            loss = model(x).sum()
            loss.backward()
        stats = stash.stats()
        assert stats.written_bytes == budget.moved_bytes
        assert stats.keep_peak_bytes <= budget.keep_bytes
    moved = [budget.moved_bytes for budget in saved.budgets()]
    small = 16 * 256 * 4
    assert moved == sorted(moved) and moved[0] == 0 and moved[-1] == saved.unique_bytes - small


@pytest.mark.parametrize("inner", [nullcontext, graph.allow_mutation_on_saved_tensors])
def test_functions_of_users_are_seen(inner: type) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            x, y = ctx.saved_tensors
            return gradient * y, gradient * x

    x = torch.ones(5, requires_grad=True)
    with saved_report() as saved, inner():
        y = Double.apply(x, x.exp())
        rows = {(tensor.op, tensor.name) for tensor in saved.tensors}
    assert rows == {
        ("ExpBackward0", "result"),
        ("DoubleBackward", "tensors[0]"),
        ("DoubleBackward", "tensors[1]"),
    }
    assert y.requires_grad


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, '"0KiB"'),
        (70_000, '"69KiB"'),
        (123_456, '"130KiB"'),
        ((297 << 20) - 5, '"300MiB"'),
        ((9 << 30) + 1, '"9300MiB"'),
        ((33 << 30) + 1, '"34GiB"'),
    ],
)
def test_budgets_are_round(nbytes: int, shown: str) -> None:
    found, text = budgets._rounded(nbytes)
    assert found == parse_bytes(text.strip('"')) >= nbytes and text == shown
