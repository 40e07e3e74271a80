"""``draw``: what is in a drawing, where it says that bytes are, and that nothing is unpacked for it."""

import gc
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from backstash import Stash
from backstash.errors import UsageError
from backstash.graph import (
    allow_mutation_on_saved_tensors,
    get_gradient_edge,
    label_modules,
    saved,
    saved_tensors_hooks,
)
from backstash.report import Drawing, draw
from draw_models import HOSTILE, Gpt

N = 200_000  # elements: large enough to be written each by itself


def kinds(drawing: Drawing) -> list[tuple[str, str]]:
    return [(node.kind, node.label) for node in drawing.nodes]


def places(drawing: Drawing) -> dict[str, tuple[int, int]]:
    return {place.where: (place.count, place.nbytes) for place in drawing.places}


def test_the_tutorials_product() -> None:
    a, b = torch.rand(5, requires_grad=True), torch.ones(5, requires_grad=True)
    drawing = draw(a * b, {"a": a, "b": b})
    assert [(edge.source, edge.target) for edge in drawing.edges] == [(0, 3), (1, 0), (2, 0)]
    mul = drawing.nodes[0]  # the docstring of draw has its tensors, and the guide its text
    assert (mul.name, mul.shape, mul.dtype, mul.repeats) == ("MulBackward0", ("5",), "float32", 1)
    assert (drawing.saved, drawing.saved_bytes) == (2, 40)
    assert (drawing.unique_bytes, drawing.leaf_bytes) == (0, 40)
    assert drawing.notes == ()
    assert repr(drawing) == "<Drawing of 3 nodes as 4 boxes; print() shows it>"


def test_the_tutorials_powers_share_what_they_save() -> None:
    x = torch.rand(5, requires_grad=True)
    y = x
    for _ in range(3):
        y = y * y
    drawing = draw(y, {"x": x})
    assert [label for _, label in kinds(drawing)] == ["Mul", "Mul", "Mul", "x", "output"]
    again = [[tensor.same_as for tensor in node.tensors] for node in drawing.nodes[:3]]
    assert again == [["x", "x"], ["", "saved above"], ["", "saved above"]]
    assert (drawing.saved_bytes, drawing.unique_bytes, drawing.leaf_bytes) == (120, 40, 20)
    assert [edge.label for edge in drawing.edges] == ["2 x", "2 x", "", "2 x"]
    without = draw(y, {"x": x}, show_saved=False)
    assert all(node.tensors == () for node in without.nodes) and without.saved_bytes == 120


def test_bytes_are_no_more_than_there_is_memory() -> None:
    x = torch.rand(1, 100, requires_grad=True)
    wide = x.neg().expand(1000, 100)
    drawing = draw((wide.sin() + wide.cos()).sum())
    assert (drawing.saved_bytes, drawing.unique_bytes) == (800_000, 400)
    one, other = x.neg().chunk(2, 1)
    assert draw(one.sin() + other.sin()).unique_bytes == 400


def test_nothing_is_unpacked_and_backward_is_as_ever(disk_dir: Path) -> None:
    calls: list[str] = []

    def unpack(packed: Any) -> Any:
        calls.append("unpack")
        return packed[0] if isinstance(packed, tuple) else torch.ones(N)

    x = torch.rand(N, requires_grad=True)
    stash = Stash(disk=disk_dir, min_bytes=0, inflight=0)
    pairs = (
        saved_tensors_hooks(lambda t: "elsewhere", unpack),
        torch.autograd.graph.saved_tensors_hooks(lambda t: None, unpack),
        torch.autograd.graph.saved_tensors_hooks(lambda t: (t.clone(),), unpack),
    )
    y = x
    for pair in pairs:
        with pair:
            y = y.exp() * y
    with stash:
        y = (y.exp() * y).sin()
    for color_by in ("where", "module", "dtype", "bytes"):
        drawing = draw(y.sum(), color_by=color_by)  # type: ignore[arg-type]
        drawing.to_dot(), drawing._repr_html_(), str(drawing)
    assert calls == [] and stash.stats().read_bytes == stash.stats().prefetch_hits == 0
    assert places(drawing)["hooks"] == (9, 3 * 4 * N)  # our own pairs note the shape
    assert drawing.notes == (
        "6 saved tensors are known only to hooks, which report no shape and no bytes.",
    )
    assert places(drawing)["disk"] == (4, 4 * 4 * N)
    y.sum().backward()
    assert calls and stash.stats().read_bytes
    stash.close()


def test_where_saved_tensors_live(disk_dir: Path) -> None:
    class Elsewhere:
        where, shape, dtype, device = "host, compressed", torch.Size([4]), torch.float32, "cpu"

    x = torch.rand(4, requires_grad=True)
    y = x.exp()
    kept = Stash(keep="16B", disk=disk_dir, min_bytes=0)
    with kept:
        z = y.exp().exp()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: Elsewhere(), lambda p: x):
        z = z.exp()
    z = checkpoint(lambda t: t.sin().cos(), z, use_reentrant=False)
    found = places(draw(z))
    assert found == {
        "recomputed": (2, 32),
        "disk": (1, 16),
        "in place": (1, 16),
        "keep": (1, 16),
        "host, compressed": (1, 16),
    }
    assert draw(z).unique_bytes == 64  # what is recomputed takes no memory now
    drawing = draw(z)
    for words in ("to be recomputed", "host, compressed", "on disk", "in place", "kept"):
        assert words in str(drawing) and words in drawing.to_dot()
    z.sum().backward()
    assert places(draw(z)) == {"freed": (6, 0)}
    assert draw(z).notes == ("6 saved tensors were freed by a backward.",)
    kept.close()


def test_what_an_operation_left_out_is_no_saved_tensor() -> None:
    x = torch.rand(4, requires_grad=True)
    assert [each.name for each in saved((x * 2).grad_fn)] == ["other"]  # self is not needed
    drawing = draw((x * 2).sum())
    assert [tensor.name for tensor in drawing.nodes[0].tensors] == ["other"]
    with allow_mutation_on_saved_tensors():
        y = x.exp()
        assert places(draw(y)) == {"in place": (1, 16)}
    assert places(draw(y)) == {"freed": (1, 0)}


def test_a_drawing_keeps_nothing_alive() -> None:
    x = torch.rand(4, requires_grad=True)
    y = x.exp().sin()
    marker = nn.Module()  # goes when the node goes
    y.grad_fn.next_functions[0][0].metadata["marker"] = marker
    dead = [weakref.ref(x), weakref.ref(marker)]
    drawing = draw(y, {"x": x})
    del x, y, marker
    gc.collect()
    assert [ref() for ref in dead] == [None, None]
    assert "#2  x  [4]" in str(drawing)


def test_names_of_leaves_come_in_every_form() -> None:
    model = Gpt(2)
    extra = torch.ones(3, requires_grad=True)
    loss = model.loss()
    of_module = draw(loss, model, depth=9)
    for params in (dict(model.named_parameters()), model.named_parameters()):
        drawing = draw(loss, params, depth=9)
        names = {node.name for node in drawing.nodes if node.kind == "parameter"}
        assert "blocks.0.up.weight" in names and "table.weight" in names
    names = {node.name for node in of_module.nodes if node.kind == "parameter"}
    assert "table.weight = head.weight" in names
    notes = draw(loss, {"extra": extra, "frozen": torch.ones(1)}).notes
    assert "Of the names given, not reached from the outputs: extra." in notes
    assert "Of the names given, without requires_grad: frozen." in notes
    middle = (extra * 2).exp()
    assert draw(middle.sum(), {"middle": middle}).nodes[1].detail == "middle"
    unnamed = draw(nn.Linear(2, 2)(torch.ones(1, 2)))
    assert sorted(node.label for node in unnamed.nodes if node.kind == "parameter") == [
        "parameter",
        "parameter",
    ]


def test_outputs_may_be_several_nodes_edges_and_leaves() -> None:
    x = torch.rand(4, 4, requires_grad=True)
    u, s, v = torch.linalg.svd(x)
    drawing = draw([u, v, s.sum(), get_gradient_edge(x), torch.ones(1)], {"x": x})
    assert [node.label for node in drawing.nodes] == [
        "LinalgSvd", "Sum", "x", "output 0", "output 1", "output 2", "output 3",
    ]  # fmt: skip
    labels = {(edge.source, edge.target): edge.label for edge in drawing.edges}
    assert labels == {
        (0, 1): "output 1", (0, 3): "output 0", (0, 4): "output 2",
        (1, 5): "", (2, 0): "", (2, 6): "",
    }  # fmt: skip
    assert {edge.output for edge in drawing.edges if edge.source == 0} == {0, 1, 2}
    assert drawing.notes == ("1 of the outputs need no gradient and have no graph.",)
    assert draw(u.grad_fn).nodes[0].label == "LinalgSvd"
    many = draw(list(torch.unbind(x)))
    assert [node.label for node in many.nodes if node.kind == "output"] == ["4 outputs"] or [
        node.label for node in many.nodes if node.kind == "output"
    ] == [f"output {n}" for n in range(4)]
    nothing = draw(torch.ones(1))
    assert nothing.nodes == () and nothing.notes == (
        "No output needs a gradient: there is no graph.",
    )
    for text in (str(nothing), nothing.to_dot(), nothing._repr_html_() or str(nothing)):
        assert "there is no graph" in text


def test_what_a_function_keeps_on_its_ctx_is_drawn() -> None:
    class Sneaky(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            ctx.save_for_backward(x, None)
            ctx.mask = x > 0
            ctx.both = [x * 2, "text"]
            return x.clone(), x * 3

        @staticmethod
        def backward(ctx: Any, one: Tensor, two: Tensor) -> Tensor:
            return one + 3 * two

    x = torch.rand(4, requires_grad=True)
    one, two = Sneaky.apply(x * 1)
    drawing = draw(one + two)
    (node,) = [node for node in drawing.nodes if node.label == "Sneaky"]
    assert [(t.name, t.dtype, t.nbytes) for t in node.tensors] == [
        ("tensors[0]", "float32", 16),
        ("ctx.mask", "bool", 4),
        ("ctx.both[0]", "float32", 16),
    ]
    (edge,) = [edge for edge in drawing.edges if edge.label]
    assert edge.label == "outputs 0, 1" and edge.output is None and edge.count == 2


@pytest.mark.filterwarnings("ignore:.*use_reentrant:UserWarning")
def test_checkpoints_compiled_and_double_backward_graphs() -> None:
    x = torch.rand(4, requires_grad=True)
    reentrant = checkpoint(torch.sin, x, use_reentrant=True)
    drawing = draw(reentrant)
    assert drawing.nodes[0].label == "CheckpointFunction"
    assert "its operations are not in the graph" in drawing.notes[0]
    compiled = torch.compile(lambda t: (t.sin() * t).exp(), backend="aot_eager")(x)
    drawing = draw(compiled)
    assert drawing.nodes[0].label == "CompiledFunction" and drawing.saved_bytes >= 32
    assert "a graph from torch.compile" in drawing.notes[0]
    (slope,) = torch.autograd.grad(x.tanh().pow(3).sum(), x, create_graph=True)
    labels = [node.label for node in draw(slope, {"x": x}).nodes]
    assert "TanhBackward" in labels and labels.count("x") == 1


def test_a_graph_from_another_threads_backward_is_in_order() -> None:
    import threading

    x = torch.rand(4, requires_grad=True)
    y = x.tanh().pow(3).sum()
    found: list[Tensor] = []
    work = lambda: found.extend(torch.autograd.grad(y, x, create_graph=True))  # noqa: E731
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    drawing = draw([y, found[0].sum()], {"x": x})
    assert all(drawing.nodes[edge.target].label for edge in drawing.edges)
    rank = {index: index for index, node in enumerate(drawing.nodes) if node.kind == "operation"}
    for edge in drawing.edges:
        if edge.source in rank and edge.target in rank:
            assert edge.source < edge.target  # producers come first


def test_subclasses_and_nested_tensors_are_drawn(disk_dir: Path) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    pair = TwoTensor(torch.ones(64), torch.ones(64)).requires_grad_()
    assert draw(pair.sin()).nodes[0].tensors[0].shape == ("64",)
    with Stash(disk=disk_dir, min_bytes=0, inflight=0) as stash:
        y = (pair * 1).sin()
    (sin,) = [node for node in draw(y).nodes if node.label == "Sin"]
    assert (sin.tensors[0].dtype, sin.tensors[0].nbytes) == ("TwoTensor", 512)
    assert sin.tensors[0].places[0].where in ("disk", "in place")
    stash.close()
    parts = [torch.ones(2, 3), torch.ones(4, 3)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    tensor = draw(jagged.sin()).nodes[0].tensors[0]
    assert tensor.shape is not None and len(tensor.shape) == 3 and tensor.unknown == 1
    sparse = torch.eye(3).to_sparse().requires_grad_()
    assert draw(torch.sparse.mm(sparse, torch.ones(3, 3))).saved == 2


def test_strided_nested_tensors_have_no_sizes() -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], requires_grad=True)
    drawing = draw(nested.sin())
    assert drawing.nodes[0].tensors[0].shape is None
    assert drawing.nodes[0].tensors[0].unknown == 1 and "? B" in str(drawing)


def test_wrong_arguments_are_refused() -> None:
    x = torch.rand(2, requires_grad=True)
    y = x.exp()
    with pytest.raises(UsageError, match='color_by=\'size\': allowed are "where", "module"'):
        draw(y, color_by="size")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="depth=-1: allowed is an int from 0 on, or None"):
        draw(y, depth=-1)
    for depth in (True, 1.5):
        with pytest.raises(UsageError, match="depth="):
            draw(y, depth=depth)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="str among the outputs"):
        draw(["y"])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="int among the outputs"):
        draw(3)  # type: ignore[arg-type]
    for params in (x, 3, [x], {"x": 3}):
        with pytest.raises(UsageError, match="allowed are a module, a dict of name to tensor"):
            draw(y, params)  # type: ignore[arg-type]


def test_saving_to_files(tmp_path: Path) -> None:
    x = torch.rand(2, requires_grad=True)
    drawing = draw(x.exp(), {HOSTILE: x})
    pictures = (("x.svg", "<svg"), ("x.html", "<!doctype")) if shutil.which("dot") else ()
    for name, start in (*pictures, ("x.DOT", "digraph"), ("x.txt", "Autograd graph")):
        path = drawing.save(tmp_path / name)
        assert path.read_text(encoding="utf-8").startswith(start)
    with pytest.raises(UsageError, match=r"names that end in .svg, .html, .dot or .txt"):
        drawing.save(tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()
    shown = drawing._repr_html_()
    assert shown is None if not pictures else "<svg" in shown and "<script" not in shown


def test_two_drawings_of_one_graph_are_equal() -> None:
    model = Gpt(3)
    with label_modules(model):
        loss = model.loss()
    one, other = draw(loss, model), draw(loss, model)
    assert one == other and hash(one) == hash(other)
    assert one.to_dot() == other.to_dot() and one._repr_html_() == other._repr_html_()
