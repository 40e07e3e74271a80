"""What a newcomer touches: construction, contexts, wrappers, attach, stats."""

import ast
import copy
import dataclasses
import functools
import inspect
import json
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

import backstash
from backstash import Stash
from backstash.errors import SizeError, StashError, UsageError


def test_the_signature_is_the_contract():
    parameters = inspect.signature(Stash).parameters
    assert {name: p.default for name, p in parameters.items()} == {
        "keep": 0,
        "host": "auto",
        "disk": None,
        "policy": None,
        "recompute": "auto",
        "verify": "auto",
        "codec": None,
        "min_bytes": "auto",
        "inflight": "auto",
        "prefetch": "auto",
        "on_full": "keep",
        "name": None,
        "budget": None,
        "plan": None,
        "strict": False,
    }
    assert all(p.kind is p.KEYWORD_ONLY for p in list(parameters.values())[1:])  # after budget
    assert backstash.__version__.count(".") == 2


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"keep": "2 gigs"}, SizeError, "keep='2 gigs'"),
        ({"min_bytes": -1}, SizeError, "min_bytes=-1 is negative"),
        ({"inflight": None}, SizeError, "inflight=None"),
        ({"prefetch": "64Q"}, SizeError, "unknown unit 'Q'"),
        ({"host": "all"}, SizeError, "host='all'"),
        ({"on_full": "panic"}, UsageError, '"keep" and "raise"'),
        ({"policy": "disk"}, UsageError, "callable"),
        ({"codec": "zip"}, UsageError, "allowed is a Codec"),
    ],
)
def test_wrong_arguments_say_what_is_allowed(wrong, error, said):
    with pytest.raises(error, match=said) as caught:
        Stash(**wrong)
    assert isinstance(caught.value, StashError)


ON_DEMAND = """
import sys
import backstash
assert "torch" not in sys.modules and {"Stash", "policy", "__version__"} <= set(dir(backstash))
assert backstash.StashError.__module__ == "backstash.errors" and "torch" not in sys.modules
assert backstash.units.parse_bytes("1KiB") == 1024 and "torch" not in sys.modules
try:
    backstash.Stahs
except AttributeError as error:
    assert str(error) == "module 'backstash' has no attribute 'Stahs'"
else:
    raise AssertionError("a name that is not there was found")
from backstash import *
names = {name for name in vars() if name in backstash.__all__}
assert names == set(backstash.__all__) and "torch" in sys.modules
assert backstash.Stash is Stash and vars(backstash)["Stash"] is Stash
import pickle
assert pickle.loads(pickle.dumps([Stash, Disk, Action("keep")])) == [Stash, Disk, Action("keep")]
for module in "errors graph hooks memory policy report stash stores units".split():
    assert getattr(backstash, module) is sys.modules[f"backstash.{module}"]
"""


def test_names_are_loaded_on_demand():
    """torch with them: `backstash --help` and the process that starts a script need neither."""
    subprocess.run([sys.executable, "-c", ON_DEMAND], timeout=100, check=True)


def test_names_on_demand_are_those_that_type_checkers_see():
    tree = ast.parse(inspect.getsource(backstash))
    (typed,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    )
    seen = {alias.name: each.module for each in typed.body for alias in each.names}
    assert seen == backstash._WHERE
    assert {*seen, "__version__"} == set(backstash.__all__)


def model_and_input():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(400, 64)


def gradients(model, x, call=None):
    model.zero_grad()
    (call or model)(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_context_decorator_wrapper_and_attach_agree_with_plain(tmp_path):
    model, x = model_and_input()
    expected = gradients(model, x)
    stash = Stash(disk=tmp_path)

    @stash
    def forward(x):
        "Doubles as documentation."
        return model(x)

    assert forward.__doc__ == "Doubles as documentation."
    assert same(gradients(model, x, forward), expected)
    assert same(gradients(model, x, stash(model.forward)), expected)
    with stash:
        assert same(gradients(model, x), expected)
    written = stash.stats().written_bytes
    handle = stash.attach(model)
    assert same(gradients(model, x), expected)
    assert stash.stats().written_bytes > written
    handle.remove()
    handle.remove()
    written = stash.stats().written_bytes
    gradients(model, x)
    assert stash.stats().written_bytes == written
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_a_stash_may_be_entered_again_inside_itself(tmp_path):
    model, x = model_and_input()
    expected = gradients(model, x)
    stash = Stash(disk=tmp_path)
    with stash, stash:
        first = model[:2](x)
        with stash:
            loss = model[2](first).square().sum()
    model.zero_grad()
    loss.backward()
    assert same([p.grad for p in model.parameters()], expected)


def test_a_custom_function_is_wrapped(tmp_path):
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.clone())
            return x**3

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return gradient * 3 * x**2

    stash = Stash(disk=tmp_path)
    x = torch.randn(40_000, requires_grad=True)
    y = stash(Cube.apply)(x)
    assert stash.stats().written_bytes == x.nbytes
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, 3 * x.detach() ** 2)


def test_what_cannot_be_wrapped_says_so():
    stash = Stash()

    async def coroutine():
        pass

    def generator():
        yield

    async def both():
        yield

    class Called:
        async def __call__(self):
            pass

    for wrong in (coroutine, generator, both, functools.partial(both), Called(), 3):
        with pytest.raises(UsageError, match=r"allowed is a callable|outside the call"):
            stash(wrong)
    with pytest.raises(UsageError, match=r"nn\.Module"):
        stash.attach(lambda x: x)


def test_attaching_changes_no_state_dict_and_works_in_a_copy(tmp_path):
    model, x = model_and_input()
    expected = gradients(model, x)
    keys = list(model.state_dict())
    stash = Stash(disk=tmp_path)
    with stash.attach(model[1]):
        assert list(model.state_dict()) == keys
        twin = copy.deepcopy(model)
        assert same(gradients(twin, x), expected)
        saves = stash.stats().saves
        loaded = pickle.loads(pickle.dumps(model))
        assert same(gradients(loaded, x), expected)
        assert stash.stats().saves == saves > 0, "its hooks do nothing"


def test_attached_modules_are_held_in_other_threads(tmp_path):
    model, x = model_and_input()
    stash = Stash(disk=tmp_path)
    results = []
    with stash.attach(model):
        thread = threading.Thread(target=lambda: results.append(model(x).square().sum()))
        thread.start()
        thread.join()
    assert stash.stats().written_bytes > 0
    expected = gradients(model, x)
    model.zero_grad()
    results[0].backward()
    assert same([p.grad for p in model.parameters()], expected)


def test_eight_threads_share_one_stash(tmp_path):
    stash = Stash(disk=tmp_path, keep="1MiB", inflight="2MiB", prefetch="2MiB")
    failures = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(200_000, generator=generator).mul_(0.1).requires_grad_()
        for _ in range(5):
            with stash:
                loss = (x.exp() * x.sin()).tanh().sum()
            (got,) = torch.autograd.grad(loss, x)
            (wanted,) = torch.autograd.grad((x.exp() * x.sin()).tanh().sum(), x)
            if not torch.equal(got, wanted):
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    stats = stash.stats()
    assert stats.keep_peak_bytes == 800_000  # one block, and a second would not fit
    # Not exact: how many writes are under way at once is up to the disk.
    assert 800_000 <= stats.inflight_peak_bytes <= 2 << 20
    assert stats.saves == stash.stats().saves == 8 * 5 * 5
    assert (stats.blocks, stats.keep_bytes) == (0, 0)


def test_stats_are_frozen_and_go_to_json(tmp_path):
    stash = Stash(disk=tmp_path, name="trial")
    with stash:
        loss = torch.zeros(100, 1000, requires_grad=True).exp().sum()
    stats = stash.stats()
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.saves = 3
    read = json.loads(json.dumps(stats.as_json()))
    assert (read["name"], read["written_bytes"]) == ("trial", 400_000)
    assert read["stall_seconds"] == stats.stall_seconds
    text = str(stats)
    assert text.startswith("stash trial: ") and "391 KiB down" in text
    loss.backward()


def test_saves_of_threads_that_have_ended_are_counted_too():
    stash = Stash()
    kept = []

    def work(size):
        x = torch.ones(size, requires_grad=True)
        with stash:
            kept.append(x.exp())  # saves its result
            kept.append(kept[-1].exp())

    for size in (4, 40_000, 4):  # two small, two large, two small
        thread = threading.Thread(target=work, args=(size,))
        thread.start()
        thread.join()
    work(4)
    stats = stash.stats()
    small = next(left for reason, left in stats.left.items() if "min_bytes" in reason)
    assert stats.saves == 8
    assert (small.count, small.nbytes) == (6, 6 * 16)


def test_without_a_tier_below_tensors_stay_and_are_checked():
    stash = Stash(keep=0)
    x = torch.ones(100_000, requires_grad=True)
    with stash:
        y = x * 2
        loss = (y * y).sum()
    assert stash.stats().left["no tier below: give disk="].nbytes > 0
    loss.backward(retain_graph=True)
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_closed_stash_refuses(tmp_path):
    stash = Stash(disk=tmp_path)
    with stash:
        stash.close()
        with pytest.raises(UsageError, match="closed"):
            torch.zeros(100_000, requires_grad=True).exp()


@pytest.mark.parametrize("use", [lambda stash, x: stash(x), lambda stash, x: stash.attach(x)])
def test_a_tensor_in_place_of_a_function_or_module_is_named_by_its_shape(use):
    with pytest.raises(UsageError, match=r"a Tensor of shape \(50, 50\)\): allowed is") as error:
        use(Stash(), torch.ones(50, 50))
    assert "\n" not in str(error.value)
