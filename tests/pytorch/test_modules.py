"""Which module is running, and what it is called."""

import sys

import pytest
import torch
from torch import nn

from backstash._torch import modules as _modules
from backstash._torch.modules import call_frame, is_running, module_path, running_modules


class Looks(nn.Module):
    """Runs ``inner`` or, where there is none, looks."""

    def __init__(self, look, inner=None):
        super().__init__()
        self.look, self.inner = look, inner

    def forward(self):
        return self.look() if self.inner is None else self.inner()


@pytest.mark.parametrize("wrapper", ["PyTorch's", "another one's"])
def test_what_runs_is_read_from_the_stack_outermost_first(monkeypatch, wrapper):
    if wrapper == "another one's":
        monkeypatch.setattr(_modules, "_WRAPPER_CODE", None)
    inner = Looks(running_modules)
    outer = Looks(None, inner)
    assert outer() == [outer, inner]
    assert outer._call_impl() == [outer, inner], "called by nobody who has the same self"
    assert running_modules() == []


def test_a_frame_of_somebody_else_s_may_be_asked():
    inner = Looks(lambda: (sys._getframe(), call_frame()))
    outer = Looks(None, inner)
    deepest, innermost = outer()
    assert running_modules(deepest) == running_modules(innermost) == [outer, inner]
    assert running_modules(innermost.f_back) == [outer]
    assert innermost.f_locals["self"] is inner
    assert call_frame() is None, "no module runs here"


def test_a_frame_runs_while_it_is_on_the_stack():
    here = sys._getframe()
    assert is_running(here)

    def deeper():
        assert is_running(sys._getframe()) and is_running(here)
        return sys._getframe()

    assert not is_running(deeper())


def test_a_path_is_from_the_outermost():
    shared = nn.Linear(1, 1)
    model = nn.Sequential(nn.Sequential(nn.Tanh(), shared), shared)
    block, tanh = model[0], model[0][0]
    stranger = nn.ReLU()
    for modules, path in (
        ([], ""),
        ([model], "(Sequential)"),
        ([model, block], "0"),
        ([model, block, tanh], "0.0"),
        ([model, tanh], "0.0"),  # called past its parent
        ([model, shared], "1"),  # the name that its caller has for it
        ([model, block, shared], "0.1"),
        ([model, stranger], "(ReLU)"),
        ([model, block, stranger], "0.(ReLU)"),
        ([model, model], "(Sequential)"),  # calls itself
        ([model, block, block], "0.(Sequential)"),
    ):
        assert module_path(modules) == path, modules


def test_buffers_and_parameters_of_what_runs():
    norm, linear = nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2)
    linear.bias = None
    of = _modules._cdata_of
    running = [nn.Sequential(norm, linear), norm, linear]
    assert _modules.is_buffer(of(norm.running_mean), running)
    assert _modules.is_buffer(of(linear.weight), running)
    assert not _modules.is_buffer(of(norm.running_mean), [linear])
    assert not _modules.is_buffer(of(torch.ones(2)), running)


@pytest.mark.parametrize(
    "name, tensor", [("weight", "weight"), ("weight", "a view"), ("", "other")]
)
def test_whose_a_tensor_is(name, tensor):
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 3)))
    weight = model[0][0].weight
    asked = {"weight": weight, "a view": weight.t(), "other": torch.ones(2)}[tensor]
    found = _modules.module_that_has(asked)
    assert found == (f"0.0, whose {name} it is," if name else "")


def test_the_longest_path_is_chosen_and_the_first_of_equals(monkeypatch):
    linear = nn.Linear(2, 3)
    one, other = nn.ModuleDict({"one": linear}), nn.ModuleDict({"two": linear})
    outer = nn.Sequential(one)
    for modules, path in (
        ([linear, outer, one], "0.one"),
        ([outer, linear], "0.one"),
        ([one, other], "one"),
        ([other, linear, one], "two"),
    ):
        monkeypatch.setattr(_modules.gc, "get_objects", lambda modules=modules: modules)
        assert _modules.module_that_has(linear.weight) == f"{path}, whose weight it is,"


def test_a_module_alone_is_called_by_its_class():
    alone, without = nn.Linear(2, 3), nn.BatchNorm1d(2, affine=False)
    assert without.weight is None
    assert _modules.module_that_has(alone.bias) == "(Linear), whose bias it is,"
    assert _modules.module_that_has(torch.ones(2).to_sparse()) == ""
