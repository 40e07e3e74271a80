from pathlib import Path

import pytest
import torch
from torch import nn

from backstash import Action, SavedTensor, Stash
from backstash._torch.hook_stack import current_pair
from backstash.codecs import Bits
from backstash.errors import StashError, StashIOError, StashWarning, UsageError
from backstash.policy import by_module, first, larger_than
from backstash.testing import MemoryStore


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x.sum()


def seen_by_policy(model, x, tmp_path):
    seen = []
    stash = Stash(disk=tmp_path, policy=seen.append)
    with stash:
        loss = model(x)
    return seen, loss, stash


def test_a_policy_sees_what_autograd_saves(tmp_path):
    model = Net()
    seen, loss, _ = seen_by_policy(model, torch.randn(8, 64), tmp_path)
    assert all(isinstance(saved, SavedTensor) for saved in seen)
    assert [saved.index for saved in seen] == list(range(len(seen)))
    tanh = [saved for saved in seen if saved.module == "blocks.1.1"]
    assert [(s.shape, s.nbytes, s.is_parameter, s.is_leaf) for s in tanh] == [
        ((8, 64), 2048, False, False)
    ]
    assert {s.module for s in seen if s.is_parameter} >= {"blocks.0.0", "blocks.2.0"}
    assert any(s.is_leaf and not s.is_parameter and s.module == "stem" for s in seen)
    loss.backward()


def test_none_is_the_default(tmp_path):
    model, x = Net(), torch.randn(512, 64)
    default, asked = Stash(disk=tmp_path), Stash(disk=tmp_path, policy=lambda saved: None)
    for stash in (default, asked):
        with stash:
            model(x).backward()
    assert default.stats().written_bytes == asked.stats().written_bytes > 0


def test_actions_are_obeyed_and_gradients_are_the_same(tmp_path):
    model, x = Net(), torch.randn(512, 64)
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    for policy in (
        lambda saved: Action("keep"),
        lambda saved: Action("host"),
        lambda saved: Action("disk"),  # parameters and small ones too
        by_module({"blocks.1*": Action("disk"), "*": Action("keep")}),
        first(by_module({"stem": Action("keep")}), larger_than("1KiB", Action("disk"))),
    ):
        stash = Stash(disk=tmp_path, policy=policy)
        with stash:
            loss = model(x)
        for got, wanted in zip(
            torch.autograd.grad(loss, list(model.parameters())), expected, strict=True
        ):
            assert torch.equal(got, wanted)


def test_what_the_policy_leaves_is_counted(tmp_path):
    stash = Stash(disk=tmp_path, policy=by_module({"blocks.*": Action("keep")}))
    with stash:
        Net()(torch.randn(512, 64)).backward()
    left = stash.stats().left["the policy said so"]
    assert left.count == 9  # three times: an input, a weight, a result
    assert left.nbytes == 3 * (2 * 512 * 64 * 4 + 64 * 64 * 4)


def test_a_tier_that_is_none_says_which_there_are():
    with pytest.raises(UsageError, match="'keep', 'host', 'disk'"):
        Action("tape")


def test_an_error_in_a_policy_reaches_the_caller_and_leaves_nothing(tmp_path):
    def broken(saved):
        raise LookupError("no rule")

    stash = Stash(disk=tmp_path, policy=broken)
    with pytest.raises(LookupError, match="no rule"), stash:
        Net()(torch.randn(8, 64))
    assert stash.stats().blocks == 0


@pytest.mark.parametrize("asked", ["policy", "codec"])
def test_a_type_error_of_what_is_asked_is_not_taken_for_one_of_the_operands(asked):
    x = torch.randn(300, 300, requires_grad=True)
    with pytest.raises(UsageError, match=f"the {asked} .* raised TypeError: .* takes 0 positional"):
        with Stash(disk=MemoryStore(), **{asked: lambda: None}):
            x.sin() @ x


def test_a_policy_that_returns_something_else_is_refused():
    def choose(saved):
        return "disk"

    x = torch.ones(3, requires_grad=True)
    with Stash(policy=choose, disk=MemoryStore()) as stash:
        with pytest.raises(
            UsageError, match=r"policy <.*choose.*> returned 'disk': allowed is an Action, or None"
        ):
            x * x
    # Forward raised, and nothing is held.
    assert stash.stats().blocks == 0 and current_pair() is None
    stash.close()


@pytest.mark.parametrize(
    "given, message",
    [
        ({"host": "half"}, r'host=.half.*or "auto", or None for no limit'),
        ({"keep": "x"}, r'keep=.x.*or "auto", or None for no limit'),
        ({"name": 4}, r"name=4: allowed is a string, or None"),
    ],
)
def test_a_mistake_says_all_that_is_allowed(given, message):
    with pytest.raises(StashError, match=message):
        Stash(**given)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="this system has no /proc")
def test_a_directory_that_takes_no_files_is_refused():
    with pytest.raises(
        StashIOError, match=r"'/proc' cannot hold a file \(its file system accepts no"
    ):
        Stash(disk="/proc")


def test_notes_do_not_grow_with_refused_steps():
    with Stash(disk=MemoryStore(max_bytes=1 << 16), min_bytes=0) as stash:
        with pytest.warns(StashWarning, match="kept in memory"):
            for size in range(40):
                x = torch.ones((1 << 15) + size, requires_grad=True)
                (x * 2).exp().sum().backward()
                stash.__exit__(None, None, None)  # a step ends: the next asks the tier again
                stash.__enter__()
    (note,) = stash.stats().notes
    assert "(the last of " in note
    stash.close()


@pytest.mark.parametrize("disk", [5, ""])  # an empty one would be the working directory
def test_a_disk_that_is_no_directory_is_refused(disk):
    with pytest.raises(UsageError, match=f"disk={disk!r}: allowed is a directory, a Disk, or None"):
        Stash(disk=disk)


def test_a_codec_s_class_is_not_taken_for_a_callable():
    with pytest.raises(UsageError, match=r"codec=.*Bits.*: allowed is a Codec, for example"):
        Stash(codec=Bits)
