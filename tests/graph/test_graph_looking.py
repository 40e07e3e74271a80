"""``iter_graph``, ``saved``, ``label_modules`` and ``log_backward``: looking at a graph."""

import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from backstash import Stash
from backstash.errors import UsageError
from backstash.graph import (
    Node,
    allow_mutation_on_saved_tensors,
    get_gradient_edge,
    iter_graph,
    label_modules,
    log_backward,
    only,
    save_on_cpu,
    saved,
    saved_tensors_hooks,
)
from long_tests import takes_long


def short(node: Node) -> str:
    return node.name().removesuffix("Backward0").rpartition("::")[2]


def test_every_node_comes_once_and_before_what_it_leads_to() -> None:
    x, y = (torch.rand(3, requires_grad=True) for _ in range(2))
    a = x * y
    loss = (a.exp() + a.sin() * y).sum() + x.sum()
    order = list(iter_graph(loss))
    place = {node: index for index, node in enumerate(order)}
    assert len(place) == len(order) == 10
    for node in order:
        for following, _ in node.next_functions:
            assert following is None or place[node] < place[following]
    assert short(order[0]) == "Add" and loss.grad_fn is order[0]


def test_outputs_may_be_tensors_nodes_and_edges() -> None:
    x = torch.rand(3, requires_grad=True)
    a, b = x.exp(), x.sin()
    assert [short(n) for n in iter_graph([a, b.grad_fn, get_gradient_edge(a), torch.ones(1)])] == [
        "Exp", "Sin", "AccumulateGrad",
    ]  # fmt: skip
    assert [short(n) for n in iter_graph(x)] == ["AccumulateGrad"]
    assert list(iter_graph(torch.ones(1))) == list(iter_graph([])) == []
    with pytest.raises(UsageError, match="int among the outputs: allowed are tensors"):
        list(iter_graph(3))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="int among the outputs"):
        log_backward(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="str among the outputs"):
        list(iter_graph(["loss"]))  # type: ignore[list-item]


def test_a_root_inside_the_graph_of_another_comes_in_its_place() -> None:
    x = torch.rand(3, requires_grad=True)
    a = x.exp()
    b = a.sin()
    assert [short(n) for n in iter_graph([a, b])] == ["Sin", "Exp", "AccumulateGrad"]


@pytest.mark.timeout(100)
@pytest.mark.parametrize("nodes", [200_000, pytest.param(1_000_000, marks=takes_long)])
def test_very_many_nodes_deep(nodes: int) -> None:
    y = torch.rand(1, requires_grad=True)
    for _ in range(nodes):
        y = y + 1
    assert sum(1 for _ in iter_graph(y)) == nodes + 1


@pytest.mark.timeout(100)
@takes_long
def test_many_outputs_of_one_deep_graph_are_freed_with_what_is_theirs_alone() -> None:
    y = torch.rand(1, requires_grad=True)
    outputs, gone = [], []

    def branch(start: Tensor, nodes: int) -> Tensor:
        for _ in range(nodes):
            start = start + 1
        return start

    # What all share, and what some have alone, is long enough that freeing it must not nest.
    y = branch(y, 150_000)
    for number in range(300):
        y = branch(y, 100)
        outputs.append(branch(y, 100_000 if number in (0, 150) else 2))
        marker = nn.Module()
        outputs[-1].grad_fn.next_functions[0][0].metadata["marker"] = marker
        gone.append(weakref.ref(marker))
        del marker
    assert len(list(iter_graph(outputs))) == 180_000 + 298 * 2 + 200_000 + 1
    del y
    for number in (0, 7, 299):
        outputs[number] = outputs[1]
        assert gone[number]() is None
        assert sum(ref() is not None for ref in gone) == {0: 299, 7: 298, 299: 297}[number]
    (slope,) = torch.autograd.grad(outputs[298], list(leaves_of(outputs[298])))
    assert slope.item() == 1
    outputs.clear()
    assert not any(ref() for ref in gone)


def leaves_of(tensor: Tensor) -> Any:
    return (node.variable for node in iter_graph(tensor) if short(node) == "AccumulateGrad")


def one(tensor: Tensor) -> Any:
    (found,) = saved(tensor.grad_fn)
    return found


def test_what_is_saved_in_place() -> None:
    x = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
    found = one(x.exp())
    assert (found.name, found.shape, found.nbytes, found.where) == (
        "result",
        (2, 3),
        48,
        "in place",
    )
    assert (found.dtype, found.device) == (torch.float64, torch.device("cpu"))
    assert [each.name for each in saved((x * x).grad_fn)] == ["other", "self"]
    assert saved((x + 1).grad_fn) == ()


def test_lists_custom_functions_and_freed_ones() -> None:
    class Two(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x, None, x[:1])
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            assert ctx.saved_tensors
            return grad

    x = torch.rand(3, requires_grad=True)
    y = Two.apply(x)
    assert [(s.name, s.shape) for s in saved(y.grad_fn)] == [
        ("tensors[0]", (3,)),
        ("tensors[2]", (1,)),
    ]
    z = x[torch.tensor([0, 2])]
    assert [(s.name, s.dtype) for s in saved(z.grad_fn)] == [("indices[0]", torch.int64)]
    e = x.exp()
    (y.sum() + z.sum() + e.sum()).backward()
    assert one(e).where == "freed" and one(e).shape is None
    assert saved(z.grad_fn) == () or one(z).where == "freed"


def test_where_the_bytes_are_without_unpacking(disk_dir: Any) -> None:
    x = torch.rand(4, requires_grad=True)
    unpacked: list[int] = []

    def unpack(packed: Any) -> Tensor:
        unpacked.append(1)
        return torch.zeros(4)

    stash = Stash(disk=disk_dir, min_bytes=0)
    for context, where in [
        (saved_tensors_hooks(lambda t: t.numpy().tobytes(), unpack), "hooks"),
        (saved_tensors_hooks(lambda t: t.clone(), unpack), "in place"),
        (torch.autograd.graph.saved_tensors_hooks(lambda t: "elsewhere", unpack), "hooks"),
        (only(lambda t: False), "in place"),
        (save_on_cpu(), "in place"),
        (Stash(min_bytes=0), "in place"),
        (stash, "disk"),
    ]:
        with context:
            y = x.exp()
        assert one(y).where == where
        if where != "hooks":
            assert (one(y).shape, one(y).nbytes) == ((4,), 16)
        with context, allow_mutation_on_saved_tensors():
            y = x.exp()
            assert one(y).where == where
    with allow_mutation_on_saved_tensors():
        y = x.exp()
        assert one(y).where == "in place"
    assert one(y).where == "freed"
    with stash, saved_tensors_hooks(lambda t: (t.half(),), lambda p: p[0].float(), compose=True):
        y = x.exp()
    assert unpacked == []
    stash.close()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": self.act(self.first(x)) * 2}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)["out"].sum()


def test_labels_name_the_innermost_module() -> None:
    model = Model()
    x = torch.rand(2, 3, requires_grad=True) * 1
    with label_modules(model):
        loss = model(x)
    with log_backward(loss, model=model) as log:
        loss.backward()
    found = {(row.node.rpartition("::")[2], row.module) for row in log.rows}
    assert found == {
        ("SumBackward0", ""), ("MulBackward0", "block"), ("TanhBackward0", "block.act"),
        ("AddmmBackward0", "block.first"), ("TBackward0", "block.first"),
        ("AccumulateGrad", "block.first.weight"), ("AccumulateGrad", "block.first.bias"),
        ("MulBackward0", ""), ("AccumulateGrad", ""),
    }  # fmt: skip


def test_labels_survive_a_forward_that_fails_and_are_taken_off() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(2, 2))
    labels = label_modules(model)
    with pytest.raises(RuntimeError):
        model(torch.rand(1, 3))
    assert labels.starts() == []
    labels.remove()
    labels.remove()
    assert not any(module._forward_hooks for module in model.modules())


def test_labels_if_the_model_catches_what_a_pre_hook_raises() -> None:
    class Catches(Model):
        def forward(self, x: Tensor) -> Tensor:
            try:
                self.block(x)
            except ValueError:
                x = x.tanh()
            return x.sum()

    def refuse(module: nn.Module, args: Any) -> None:
        raise ValueError("refused")

    model = Catches()
    model.block.register_forward_pre_hook(refuse)
    with label_modules(model) as labels:
        loss = nn.Sequential(model)(torch.rand(2, 3, requires_grad=True))
    assert labels.starts() == []
    with log_backward(loss) as log:
        loss.backward()
    assert [row.node for row in log.rows][:2] == ["SumBackward0", "TanhBackward0"]


def test_rows_say_what_each_node_did(disk_dir: Any) -> None:
    stash = Stash(disk=disk_dir, min_bytes=0)
    x = torch.ones(2, 8, requires_grad=True)
    with stash:
        loss = (x * 2).exp().sum()
    with log_backward(loss, stash=stash) as log:
        loss.backward()
    names = [row.node for row in log.rows]
    assert names[:3] == ["SumBackward0", "ExpBackward0", "MulBackward0"]
    exp = log.rows[1]
    assert exp.gradients == ((2, 8),) and exp.norms == (4.0,)
    assert [(s.name, s.where, s.nbytes) for s in exp.unpacked] == [("result", "disk", 64)]
    assert exp.seconds is not None and 0 <= exp.waited_seconds <= exp.seconds + 1e-3
    total = sum(row.waited_seconds for row in log.rows)
    assert total == pytest.approx(stash.stats().unpack_stall_seconds)
    loss = x.sum()
    assert log.remove() is None and len(log.rows) == len(names)
    stash.close()


def test_rows_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(2, requires_grad=True)
    loss = x.exp().sum()
    with caplog.at_level(logging.DEBUG, logger="backstash.graph"), log_backward(loss):
        loss.backward()
    assert len(caplog.records) == 3
    assert (
        "ExpBackward0: gradients [(2,)] norms 1.41; unpacked [result (2,) in place]" in caplog.text
    )
    mine = logging.getLogger("mine")
    with caplog.at_level(logging.INFO, logger="mine"):
        with log_backward(loss := x.sum(), logger=mine, level=logging.INFO, norms=False):
            loss.backward()
    assert {record.name for record in caplog.records} >= {"mine"}


def test_a_node_that_fails_has_a_row_without_an_end() -> None:
    class Fails(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise KeyError("mine")

    x = torch.ones(2, requires_grad=True)
    loss = Fails.apply(x).sum()
    with log_backward(loss) as log, pytest.raises(KeyError, match="mine"):
        loss.backward()
    assert [(row.node, row.seconds is None) for row in log.rows] == [
        ("SumBackward0", False), ("FailsBackward", True),
    ]  # fmt: skip


def test_the_log_leaves_no_hook_and_no_graph() -> None:
    class Mark:
        pass

    def run() -> Any:
        x = torch.ones(2, requires_grad=True)
        loss = x.exp().sum()
        mark = Mark()
        loss.grad_fn.metadata["mark"] = mark
        log = log_backward(loss)
        loss.backward(retain_graph=True)
        log.remove()
        loss.backward()
        assert len(log.rows) == 3
        return weakref.ref(mark), log

    mark, _log = run()
    gc.collect()
    assert mark() is None
    loss = torch.ones(2, requires_grad=True).exp().sum()
    mark = weakref.ref(loss)
    _log = log_backward(loss)
    del loss
    gc.collect()
    assert mark() is None
