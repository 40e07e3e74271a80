"""``draw`` on graphs with modules, with repetition, and of any size: what is folded, and that it adds up."""

import sys
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from backstash import Stash
from backstash.graph import label_modules
from backstash.report import Drawing, draw
from draw_models import Gpt, chain, random_graph
from long_tests import takes_long

OPTIONS = ({}, {"depth": 1}, {"depth": 3}, {"collapse_repeated": False}, {"color_by": "dtype"})


def is_whole(drawing: Drawing) -> bool:
    """Every node and saved tensor is in one box; boxes are in one frame; no edge goes back."""
    assert sum(node.nodes for node in drawing.nodes) == drawing.graph_nodes
    rows = [tensor for node in drawing.nodes for tensor in node.tensors]
    assert sum(tensor.count for tensor in rows) == drawing.saved
    assert sum(tensor.nbytes for tensor in rows) == drawing.saved_bytes
    assert all(sum(p.count for p in tensor.places) == tensor.count for tensor in rows)
    framed = [box for group in drawing.groups for box in group.nodes]
    assert len(set(framed)) == len(framed)
    assert all(group.parent is None or group.parent < i for i, group in enumerate(drawing.groups))
    assert len({(edge.source, edge.target) for edge in drawing.edges}) == len(drawing.edges)
    return not has_cycle(drawing)


def has_cycle(drawing: Drawing) -> bool:
    waiting = Counter(edge.target for edge in drawing.edges)
    ready = [index for index in range(len(drawing.nodes)) if not waiting[index]]
    seen = 0
    while ready:
        index = ready.pop()
        seen += 1
        for edge in drawing.edges:
            if edge.source == index:
                waiting[edge.target] -= 1
                if not waiting[edge.target]:
                    ready.append(edge.target)
    return seen != len(drawing.nodes)


def labelled(model: Gpt) -> Tensor:
    with label_modules(model):
        return model.loss()


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_lost_or_drawn_twice(seed: int) -> None:
    outputs = random_graph(seed, nodes=30 + 40 * (seed % 4))
    for options in OPTIONS:
        assert is_whole(draw(outputs, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("with_labels", [True, False])
def test_nothing_of_a_model_is_lost(with_labels: bool) -> None:
    model = Gpt(5)
    loss = labelled(model) if with_labels else model.loss()
    for params in (model, None):
        for options in OPTIONS:
            assert is_whole(draw(loss, params, **options))  # type: ignore[arg-type]


def test_repeated_blocks_are_drawn_once() -> None:
    model = Gpt(12)
    drawing = draw(labelled(model), model)
    (group,) = drawing.groups
    assert group.title == "12 x Block  blocks.0 … blocks.11"
    assert (group.repeats, group.chained, group.module) == (12, True, "blocks.0")
    inside = [drawing.nodes[box] for box in group.nodes]
    labels = ["blocks.0.norm", "blocks.0.up", "Gelu", "blocks.0.down", "Add"]
    assert [node.label for node in inside] == labels
    views = ("2 View, T", "View, T, 1 other")  # torch 2.15 makes one of them an UnsafeView
    assert inside[1].detail in [f"Linear: Addmm, {each}" for each in views]
    assert [(leaf.name, leaf.shape, leaf.count) for leaf in inside[1].leaves] == [
        ("weight", ("16", "8"), 12),
        ("bias", ("16",), 12),
    ]
    (row,) = [tensor for tensor in inside[2].tensors]
    assert (row.shape, row.count, row.nbytes) == (("2", "4", "16"), 12, 12 * 512)
    assert "12 x Block  blocks.0 … blocks.11, each uses the one before" in str(drawing)
    assert (
        "Modules in which at most one operation saves something are drawn as one box"
        in drawing.notes[0]
    )
    without = draw(labelled(model), model, collapse_repeated=False)
    assert all(group.repeats == 1 for group in without.groups)
    assert len(without.nodes) > len(drawing.nodes)


def test_blocks_on_several_tiers_are_still_alike(disk_dir: object) -> None:
    model = Gpt(6)
    with Stash(keep="1000B", disk=disk_dir, min_bytes=0, inflight=0) as stash:  # type: ignore[arg-type]
        loss = labelled(model)
    (group,) = draw(loss, model).groups
    assert group.repeats == 6
    (gelu,) = [node for node in draw(loss, model).nodes if node.label == "Gelu"]
    assert [(place.where, place.count) for place in gelu.tensors[0].places] in (
        [("disk", 6)],
        [("disk", 5), ("keep", 1)],
    )
    del loss
    stash.close()


def test_what_differs_is_not_folded() -> None:
    sizes = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4 + i % 2)) for i in range(4)]
    x = torch.rand(2, 4)
    model = nn.ModuleList(sizes)
    with label_modules(model):
        y = x
        for block in model:
            y = block(y[:, :4])
    assert all(group.repeats == 1 for group in draw(y.sum(), model).groups)


def test_wiring_counts_for_what_is_repeated() -> None:
    x = torch.rand(4, requires_grad=True)

    def most_repeats(wires: list[int]) -> int:
        made = [x.sin() for _ in range(6)]
        for back in wires:
            made.append(made[-1] * made[-1 - back])
        drawing = draw(made[-1])
        assert is_whole(drawing)
        return max(node.repeats for node in drawing.nodes)

    assert most_repeats([1] * 40) > 30
    assert most_repeats([1, 2, 4, 3, 1, 5, 2, 3, 5, 4, 1, 1, 3, 2, 5, 3, 4, 1, 2, 2] * 2) == 1
    assert 15 < most_repeats([1] * 20 + [5] * 18) <= 20


def test_branches_side_by_side() -> None:
    x = torch.rand(4, requires_grad=True)
    y = torch.stack([x.sin().exp() for _ in range(50)]).sum()
    drawing = draw(y, {"x": x})
    (group,) = drawing.groups
    assert (group.title, group.repeats, group.chained) == ("50 x 2 nodes", 50, False)
    (into,) = [edge for edge in drawing.edges if drawing.nodes[edge.target].label == "Stack"]
    assert (into.count, into.label) == (50, "50 x")
    assert "50 x 2 nodes, side by side" in str(drawing)


def test_modules_that_are_called_twice_make_no_circle() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.one, self.two = nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.two(self.act(self.one(self.act(x)))))

    model = Twice()
    with label_modules(model):
        y = model(torch.rand(2, 3, requires_grad=True))
    drawing = draw(y.sum(), model, depth=1)
    assert [node.label for node in drawing.nodes if node.kind == "module"] == [
        "act", "one", "act", "two", "act",
    ]  # fmt: skip
    assert is_whole(drawing)


def test_operations_are_in_the_order_in_which_forward_ran() -> None:
    x = torch.rand(4, requires_grad=True)
    a, b = x.sin(), x.cos()
    c, d = a.exp(), b.tanh()
    drawing = draw([d * c + a.sqrt() + b.sigmoid()])
    labels = [node.label for node in drawing.nodes if node.kind == "operation"]
    assert labels == ["Sin", "Cos", "Exp", "Tanh", "Mul", "Sqrt", "Add", "Sigmoid", "Add"]


def test_nodes_of_one_module_in_a_row_are_one_frame() -> None:
    model = Gpt(2)
    drawing = draw(labelled(model), model, depth=9, collapse_repeated=False)
    titles = [group.title for group in drawing.groups]
    assert titles == [
        "blocks  ModuleList", "0  Block", "up  Linear", "down  Linear",
        "1  Block", "up  Linear", "down  Linear", "head  Linear",
    ]  # fmt: skip
    parents = [group.parent for group in drawing.groups]
    assert parents == [None, 0, 1, 1, 0, 4, 4, None]


def test_depth_opens_modules() -> None:
    model = Gpt(3)
    loss = labelled(model)
    whole = draw(loss, model, depth=0)
    assert [node.label for node in whole.nodes] == ["the whole graph", "output"]
    assert whole.nodes[0].leaves[0].name.endswith("parameters") and is_whole(whole)
    labels = [node.label for node in draw(loss, model, depth=1).nodes if node.kind == "module"]
    assert labels == ["table", "blocks", "head"]
    two = draw(loss, model, depth=2)
    (block,) = [node for node in two.nodes if node.repeats > 1]
    assert (block.label, block.repeats, block.kind) == ("blocks.0", 3, "module")
    assert "Modules are opened to depth 2; depth=4 opens all of them" in two.notes[0]
    everything = draw(loss, model, depth=4, collapse_repeated=False)
    assert {node.kind for node in everything.nodes} == {"operation", "parameter", "output"}
    operations = sum(node.kind == "operation" for node in everything.nodes)
    leaves = sum(node.kind == "parameter" for node in everything.nodes)
    assert operations + leaves == everything.graph_nodes
    assert not any("depth" in note for note in everything.notes)


def test_modules_are_inferred_from_names_where_there_are_no_labels() -> None:
    model = Gpt(4)
    drawing = draw(model.loss(), model)
    assert any(
        note.startswith("Modules are inferred from the parameters' names") for note in drawing.notes
    )
    titles = [group.title for group in drawing.groups]
    assert any("Block" in title for title in titles)
    certain = draw(labelled(model), model)
    assert not any("inferred" in note for note in certain.notes)
    nothing = draw(model.loss())
    assert any(note.startswith("No modules are known") for note in nothing.notes)


def test_a_weight_that_is_used_elsewhere_is_a_box_of_its_own() -> None:
    model = Gpt(3)
    drawing = draw(labelled(model), model)
    (table,) = [node for node in drawing.nodes if "head.weight" in node.label]
    users = [edge for edge in drawing.edges if drawing.nodes[edge.source] is table]
    assert len(users) == 2


def test_leaves_of_a_module_that_is_called_again_stay_separate() -> None:
    model = nn.ModuleDict({"cell": nn.Linear(3, 3), "out": nn.Linear(3, 1)})
    with label_modules(model):
        h, found = torch.zeros(2, 3), []
        for _ in range(20):
            h = model["cell"](h).tanh()
            found.append(model["out"](h))
    drawing = draw(torch.stack(found).sum(), model)
    leaves = {node.label: node.repeats for node in drawing.nodes if node.kind == "parameter"}
    assert leaves == {"cell.weight": 1, "cell.bias": 1, "out.weight": 1, "out.bias": 1}
    assert is_whole(drawing)


@pytest.mark.timeout(110)
@takes_long
def test_a_hundred_thousand_nodes_in_a_row() -> None:
    y = chain(100_000)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(180)  # far less than the depth: what recursed would fail
    try:
        drawing = draw(y)
        texts = str(drawing), drawing.to_dot()
    finally:
        sys.setrecursionlimit(limit)
    assert drawing.graph_nodes == 100_001 and len(drawing.nodes) == 14
    (folded,) = [node for node in drawing.nodes if node.kind == "folded"]
    assert folded.label == "… 99,989 nodes …" and folded.nodes == 99_989
    assert all("… 99,989 nodes …" in text for text in texts)
    assert drawing.notes[0].startswith("99,989 nodes in the middle of long stretches")
    assert is_whole(drawing)


def test_alike_nodes_in_a_row_are_one() -> None:
    drawing = draw(chain(5_000, alike=True))
    assert [(node.label, node.repeats) for node in drawing.nodes] == [
        ("Add", 1),  # which alone uses the leaf
        ("Add", 4_999),
        ("leaf", 1),
        ("output", 1),
    ]
    assert "4,999 x Add" in str(drawing)


def test_wide_graphs_are_folded_too() -> None:
    leaves = [torch.ones(2, requires_grad=True) for _ in range(1_500)]
    drawing = draw(torch.stack(leaves).sum(), {f"leaf{i}": leaf for i, leaf in enumerate(leaves)})
    assert [node.label for node in drawing.nodes] == ["Stack", "Sum", "1,500 leaves", "output"]
    assert drawing.nodes[2].nbytes == 1_500 * 8 and is_whole(drawing)
    many = draw([leaf * 2 for leaf in leaves])
    assert len(many.nodes) < 70 and is_whole(many)


def test_what_was_asked_for_has_its_limit_too() -> None:
    model = Gpt(40)
    loss = labelled(model)
    drawing = draw(loss, model, depth=9, collapse_repeated=False)
    assert 60 < len(drawing.nodes) <= 240 and is_whole(drawing)
    assert any("in the middle of long stretches" in note for note in drawing.notes)
    deep = torch.rand(2, requires_grad=True) * 2
    deep.grad_fn.metadata["backstash.module"] = ".".join("a" * 5_000)
    assert is_whole(draw(deep.exp()))
