"""``backstash.graph`` has every name of ``torch.autograd.graph``, and hands on what it does not change."""

import inspect

import pytest
import torch
from torch.autograd import graph as stock

from backstash import graph

OURS_INSTEAD = {
    "allow_mutation_on_saved_tensors",
    "register_multi_grad_hook",
    "save_on_cpu",
    "saved_tensors_hooks",
}


def test_every_name_of_the_installed_torch_is_there() -> None:
    assert set(stock.__all__) <= set(graph.__all__)


def test_all_lists_what_exists_and_nothing_twice() -> None:
    assert len(graph.__all__) == len(set(graph.__all__))
    assert all(hasattr(graph, name) for name in graph.__all__)


@pytest.mark.parametrize("name", sorted(set(stock.__all__) - OURS_INSTEAD))
def test_what_is_right_is_handed_on(name: str) -> None:
    assert getattr(graph, name) is getattr(stock, name)


@pytest.mark.parametrize("name", sorted(OURS_INSTEAD))
def test_what_is_ours_takes_torchs_arguments(name: str) -> None:
    theirs = inspect.signature(getattr(stock, name)).parameters
    ours = inspect.signature(getattr(graph, name)).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    extra = list(ours.values())[len(theirs) :]
    assert all(each.kind is each.KEYWORD_ONLY for each in extra)


def test_ours_are_torchs_kind_of_context() -> None:
    assert issubclass(graph.saved_tensors_hooks, stock.saved_tensors_hooks)
    assert issubclass(graph.save_on_cpu, stock.saved_tensors_hooks)


def test_a_node_is_a_node() -> None:
    x = torch.ones(2, requires_grad=True)
    assert isinstance(x.exp().grad_fn, graph.Node)
    assert graph.get_gradient_edge(x).node.variable is x
