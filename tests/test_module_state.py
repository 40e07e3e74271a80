"""What a module holds is put back after a second run of its forward."""

import argparse
import random
from collections import deque
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from backstash._torch import module_state
from backstash._torch.module_state import Changes, is_used_up, unchanged


class Own:
    """An object of the program's own."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("one", "other")


class OwnList(list):
    pass


def holds(**attributes):
    module = nn.Linear(2, 2)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def ran(module, act, *, deep):
    with unchanged(module, deep=deep) as changes:
        act()
    return changes


def fill(tensor, value=7.0):
    with torch.no_grad():
        tensor.fill_(value)


def test_the_first_is_told():
    changes = Changes()
    changes.found("a")
    changes.found("b")
    assert changes.text == "a"


def test_what_lies_deeper_is_looked_at_only_where_asked():
    own = Own(count=0)
    module = holds(own=own)
    assert ran(module, lambda: setattr(own, "count", 1), deep=False).text == ""
    assert own.count == 1
    assert ran(module, lambda: setattr(own, "count", 2), deep=True).text == "Linear.own"
    assert own.count == 1


def test_a_tensor_that_is_no_buffer_is_copied_only_where_asked():
    one, other = torch.zeros(2), torch.zeros(2)
    module = holds(one=one, other=other)
    changes = ran(module, lambda: (fill(one), fill(other)), deep=False)
    # The last that was noted is looked at first.
    assert (changes.text, changes.lost) == ("", "Linear.other")
    assert one.tolist() == other.tolist() == [7, 7]
    changes = ran(module, lambda: fill(one, 8.0), deep=True)
    assert (changes.text, changes.lost) == ("Linear.one", "")
    assert one.tolist() == [7, 7]


def test_a_trained_parameter_is_not_looked_at_by_a_later_run():
    module = nn.Linear(2, 2)
    changes = ran(module, lambda: fill(module.weight), deep=False)
    assert (changes.text, changes.lost) == ("", "")
    assert module.weight[0, 0] == 7


def test_only_so_many_bytes_are_copied(monkeypatch):
    monkeypatch.setattr(module_state, "_MOST_COPIED_BYTES", 48)
    frozen = nn.Parameter(torch.zeros(100), requires_grad=False)
    one, two, three = torch.zeros(6), torch.zeros(6), torch.zeros(1)
    module = nn.Module()
    module.first, module.one, module.two, module.frozen, module.three = (
        frozen,
        one,
        two,
        nn.Parameter(torch.zeros(100), requires_grad=False),
        three,
    )
    for each, is_put_back in ((frozen, True), (module.frozen, True), (one, True), (two, True)):
        changes = ran(module, lambda each=each: fill(each), deep=True)
        assert (each[0] == 0) == is_put_back, each
        assert changes.text
        assert not changes.lost
    changes = ran(module, lambda: fill(three), deep=True)  # what is left is less
    assert changes.lost == "Module.three"
    assert three[0] == 7


def test_a_frozen_tensor_that_is_no_parameter_counts(monkeypatch):
    monkeypatch.setattr(module_state, "_MOST_COPIED_BYTES", 10)
    module = holds(plain=torch.zeros(3))
    changes = ran(module, lambda: fill(module.plain), deep=True)
    assert changes.lost == "Linear.plain"
    trained = nn.Module()
    trained.weight = nn.Parameter(torch.zeros(3))
    assert ran(trained, lambda: fill(trained.weight), deep=True).lost == "Module.weight" or (
        ran(trained, lambda: fill(trained.weight, 8.0), deep=True).lost == "Module._parameters"
    )


def test_a_sparse_tensor_is_not_copied():
    sparse = torch.eye(3).to_sparse()
    module = holds(sparse=sparse)
    assert ran(module, sparse.zero_, deep=True).lost == "Linear.sparse"


def test_the_same_bytes_written_again_are_a_change():
    module = holds(plain=torch.ones(2))
    assert ran(module, lambda: module.plain.mul_(1), deep=True).text == "Linear.plain"


def test_without_the_private_call_the_version_rises(monkeypatch):
    module = nn.BatchNorm1d(2)
    before = module.running_mean._version
    ran(module, lambda: fill(module.running_mean), deep=False)
    assert module.running_mean._version == before
    monkeypatch.setattr(module_state, "_preserve_versions", None)
    ran(module, lambda: fill(module.running_mean), deep=False)
    assert module.running_mean._version > before
    assert module.running_mean.tolist() == [0, 0]


def test_a_buffer_of_another_dtype_or_shape_is_put_back():
    module = nn.BatchNorm1d(4)
    mean = module.running_mean
    before = mean.dtype, mean.shape

    def to_double():
        mean.data = mean.double()

    def to_matrix():
        mean.data = mean.view(2, 2)

    for act in (to_double, to_matrix):
        ran(module, act, deep=False)
        assert (mean.dtype, mean.shape) == before


def test_a_buffer_keeps_its_memory():
    module = nn.BatchNorm1d(4)
    view = module.running_mean[:2]
    ran(module, lambda: fill(module.running_mean), deep=False)
    assert view.tolist() == [0, 0]


def test_hooks_on_a_parameter():
    module = nn.Linear(2, 2)
    changes = ran(module, lambda: module.weight.register_hook(print), deep=True)
    assert changes.text == "the hooks of a parameter"
    assert not module.weight._backward_hooks
    ran(module, lambda: module.weight.register_hook(print), deep=False)
    assert len(module.weight._backward_hooks) == 1


def test_slots():
    own = Slotted()
    own.one = 1

    def act():
        own.one, own.other = 2, 3

    assert ran(holds(own=own), act, deep=True).text == "Linear.own"
    assert own.one == 1
    assert not hasattr(own, "other")


@pytest.mark.parametrize(
    "given", [random.Random(), numpy.random.RandomState(), iter([]), torch.Generator()]
)
def test_used_up(given):
    assert is_used_up(given)
    assert not is_used_up([given])


def test_an_attribute_of_a_list_of_lists():
    inner = OwnList([1])
    inner.count = 0
    module = holds(lists=[inner])
    assert ran(module, lambda: setattr(inner, "count", 1), deep=True).text == "Linear.lists"
    assert inner.count == 0


def test_an_attribute_of_a_list():
    outer = OwnList([1])
    outer.count = 0
    module = holds(outer=outer)
    ran(module, lambda: setattr(outer, "count", 1), deep=False)
    assert outer.count == 0


@pytest.mark.parametrize(
    "own", [argparse.Namespace(count=0), SimpleNamespace(count=0), Own(count=0)]
)
def test_objects_that_are_looked_into(own):
    ran(holds(own=own), lambda: setattr(own, "count", 1), deep=True)
    assert own.count == 0


def test_two_objects_deep_and_no_deeper():
    third = Own(count=0)
    second = Own(count=0, third=third)
    first = Own(count=0, second=second)

    def act():
        first.count = second.count = third.count = 1

    assert ran(holds(first=first), act, deep=True).text
    assert (first.count, second.count, third.count) == (0, 0, 1)


def test_a_module_does_not_count_as_an_object():
    second = Own(count=0)
    part = holds(first=Own(second=second))
    module = holds(parts=[[part]])
    assert ran(module, lambda: setattr(second, "count", 1), deep=True).text
    assert second.count == 0


def test_what_holds_itself():
    loop = deque([1])
    loop.append([loop])
    assert ran(holds(loop=[loop]), lambda: None, deep=True).text == ""


@pytest.mark.parametrize("most, is_too_many", [(5, True), (6, False)])
def test_only_so_many_objects(monkeypatch, most, is_too_many):
    module = nn.Module()
    module.lists = [*range(20), *([] for _ in range(6))]
    monkeypatch.setattr(module_state, "_MOST_OBJECTS", most)
    told = ran(module, lambda: None, deep=True).text
    assert ("objects that its attributes hold" in told) == is_too_many
