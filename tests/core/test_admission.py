"""Admission by itself: what moves and what stays, with which reason, and which block a tensor belongs to."""

from types import SimpleNamespace

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from backstash import Action
from backstash._core.admission import SMALL, Admission
from backstash._runtime.reclaim import ReclaimQueue
from backstash._saved.block import Block
from backstash._saved.entry import Entry, WrapperEntry
from backstash._saved.placement import Stored
from backstash._saved.save_counts import SaveCounts
from backstash._saved.thread_state import ThreadState
from backstash.errors import StashClosedError

KIB = 1 << 10
PARAMETER = "a parameter or another leaf that requires a gradient, or a view of one"
COPIED = "smaller than min_bytes: copied, so that its large storage is not held"


CPU = torch.device("cpu")


class Lock:
    """Counts who comes in."""

    entered = 0

    def __enter__(self):
        self.entered += 1

    def __exit__(self, *error):
        pass


class Section:
    """A critical section that is entered under its own lock only."""

    def __init__(self):
        self.lock, self.entered = Lock(), 0
        self.is_nested = lambda: False

    def __enter__(self):
        self.entered += 1
        assert self.lock.entered >= self.entered

    def __exit__(self, *error):
        pass


class Driver:
    """As much of a device as admission asks."""

    def __init__(self, capturing=False):
        self.capturing, self.recorded = capturing, []

    def is_capturing(self):
        return self.capturing

    def used(self, tensor):
        self.recorded.append(tensor)
        return self.stream()

    def stream(self):
        return "the current one"


class Around:
    """What is around admission, and what each received."""

    def __init__(self, policy=None, min_bytes=KIB, device=None, has_tier=True):
        self.steps, self.admitted, self.added = [], [], []
        self.expected, self.adopted = [], []
        self.tiers = SimpleNamespace(
            number=2,
            device=device,
            tier=object() if has_tier else None,
            evictor=SimpleNamespace(admit=self.admit, expect=self.expect, adopt=self.adopt),
        )
        self.session = SimpleNamespace(
            section=Section(),
            drain=lambda: self.steps.append("drain"),
            settle=lambda thread_state: self.steps.append(thread_state),
            known_tiers={CPU: self.tiers},
            tiers_of=lambda device: self.tiers if device == CPU else f"device {device.type}",
            reclaim_queue=ReclaimQueue(),
            add=lambda block, separate: self.added.append(block),
            predictor=SimpleNamespace(next_pass=0, passes=1),
            save_counts=SaveCounts(),
            planners={},
            small_steps=None,
            min_bytes=min_bytes,
            uses=0,
            event_log=SimpleNamespace(on=False),
            saved_again=lambda block: self.session.save_counts.again(block),
            review=lambda thread_state, most: self.steps.append(most),
        )
        self.admission = Admission(self.session, policy=policy)
        self.lock, self.thread_state = self.session.section.lock, ThreadState()
        self.pack = self.admission.hook(self.thread_state)

    def admit(self, block, *, at_once, complete):
        block.cleanup.resident_bytes = block.nbytes
        self.admitted.append((block, at_once, complete))

    def adopt(self, block):
        block.cleanup.resident_bytes = block.nbytes
        self.adopted.append(block)

    def expect(self, block):
        self.expected.append(block)

    def next_pass(self):
        self.session.predictor.passes += 1

    @property
    def left(self):
        counts, left = self.thread_state.counts, {**self.admission.left}
        if counts.parameter_saves:
            left[PARAMETER] = [counts.parameter_saves, counts.parameter_bytes]
        return left


def leaves(block, device=None):
    """It is below from now on."""
    block.cleanup.resident_bytes = 0
    if not block.saves.are_as_expected:
        block.take_fingerprint(device)
    block.placement = Stored(SimpleNamespace(tier="disk"))


def made(*shape, dtype=torch.float8_e5m2):
    """What an operation on a leaf has made; a byte each."""
    return torch.zeros(*shape).requires_grad_().exp().to(dtype)


def is_alias(one, other):
    return one is not other and one.data_ptr() == other.data_ptr()


# What is small.


def test_what_is_small_stays_without_a_lock_or_a_reason():
    around = Around()
    tensor = torch.zeros(1023, dtype=torch.uint8)
    assert is_alias(around.pack(tensor), tensor)
    tensor.add_(1)
    kept, version = around.pack(tensor)
    assert is_alias(kept, tensor) and version == tensor._version == 1
    assert (
        around.thread_state.small_saves,
        around.thread_state.small_bytes,
        around.thread_state.saves,
    ) == (2, 2046, 0)
    assert (around.steps, around.left) == ([], {})


def test_what_is_small_and_no_plain_tensor_is_asked_what_it_is():
    around = Around()
    small = TwoTensor(torch.zeros(3), torch.zeros(3))
    assert type(around.pack(small)) is WrapperEntry
    assert around.pack(torch.nn.Parameter(torch.zeros(3))).numel() == 3
    assert around.left == {PARAMETER: [1, 12]} and around.thread_state.saves == 2


def test_what_is_as_large_as_min_bytes_is_not_small():
    around = Around()
    assert type(around.pack(torch.zeros(1024, dtype=torch.uint8))) is Entry
    assert (around.thread_state.small_saves, around.thread_state.saves) == (0, 1)


def test_with_a_policy_everything_is_asked_for():
    around = Around(policy=lambda saved: None)
    tensor = torch.zeros(10, dtype=torch.uint8)
    assert around.pack(tensor) == (tensor, 0, "")
    assert around.left == {SMALL: [1, 10]} and around.thread_state.small_saves == 0
    assert type(around.pack(torch.zeros(1024, dtype=torch.uint8))) is Entry


def test_a_sparse_tensor_has_no_storage_to_be_small():
    around = Around()
    tensor = torch.eye(3).to_sparse()
    kept, version, module = around.pack(tensor)
    assert kept is tensor and (version, module) == (0, "")
    assert around.left == {"layout sparse_coo": [1, 0]}  # nobody knows how many bytes
    assert around.thread_state.saves == around.lock.entered == 1


# What stays, and what is held for it.


def test_a_closed_stash_holds_no_more():
    around = Around()
    around.admission.closed = True
    with pytest.raises(StashClosedError):
        around.pack(torch.zeros(KIB))
    assert is_alias(around.pack(small := torch.zeros(3)), small)


@pytest.mark.parametrize("waiting, settles", [((), False), ((1,), True)])
def test_what_waited_for_its_operation_s_end_is_settled_first(waiting, settles):
    around = Around()
    around.thread_state.waiting.extend(waiting)
    around.pack(torch.zeros(KIB))
    assert around.steps == [around.thread_state] * settles


def test_what_is_dead_is_settled_before_a_block_is_made():
    around = Around()
    around.pack(torch.zeros(KIB))
    assert around.steps == []  # there was nothing
    around.session.reclaim_queue.append(object())
    around.pack(torch.zeros(KIB))
    assert around.steps == ["drain"]


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"has_tier": False}, "no tier below: give disk="),
        ({"has_tier": False, "device": Driver()}, "no tier below: give host="),
        ({"device": Driver(capturing=True)}, "a graph of the accelerator is being captured"),
        ({"device": Driver()}, ""),
    ],
)
def test_where_nothing_can_move(options, reason):
    around = Around(**options)
    tensor = torch.zeros(KIB)
    packed = around.pack(tensor)
    assert around.left == ({reason: [1, 4096]} if reason else {})
    assert type(packed) is (tuple if reason else Entry)


def test_a_device_that_nothing_drives():
    around = Around()
    assert around.pack(torch.zeros(KIB, device="meta"))[1:] == (0, "")
    assert around.left == {"device meta": [1, 4096]}


def test_all_stays_where_a_forked_process_cannot_use_the_store():
    around = Around()
    around.pack(torch.zeros(3))
    around.admission.restart("a forked process")
    around.pack(torch.zeros(KIB))
    around.pack(torch.zeros(KIB, device="meta"))
    assert around.left == {
        "a forked process": [1, 4096],
        "device meta": [1, 4096],
    }
    around.tiers.tier = None  # whatever there is below
    around.pack(torch.zeros(KIB))
    assert around.left["a forked process"] == [2, 8192]


def test_a_leaf_stays_itself_and_what_was_made_as_an_alias():
    around = Around(has_tier=False)
    leaf, output = torch.zeros(KIB), made(KIB)
    assert around.pack(leaf)[0] is leaf
    kept, version, module = around.pack(output)
    assert is_alias(kept, output) and not kept.requires_grad and (version, module) == (0, "")
    assert around.left == {"no tier below: give disk=": [2, 4096 + 1024]}


def test_what_cannot_be_aliased_as_what_it_is_stays_itself():
    class Undone(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

    around = Around()
    tensor = made(KIB).as_subclass(Undone)
    assert type(tensor) is Undone is not type(tensor.detach())
    assert around.pack(tensor)[0] is tensor


def test_a_parameter_stays_with_its_version_if_it_has_one():
    around = Around()
    parameter = torch.nn.Parameter(torch.zeros(KIB))
    view = parameter[1:]
    leaf = torch.zeros(KIB, requires_grad=True)
    assert around.pack(parameter) is parameter and around.pack(leaf) is leaf
    assert is_alias(around.pack(view), view)
    with torch.no_grad():
        parameter.add_(1)
    assert around.pack(parameter) == (parameter, 1)
    assert around.left == {PARAMETER: [4, 4 * 4096 - 4]}
    frozen = torch.nn.Parameter(torch.zeros(KIB), requires_grad=False)
    around.pack(frozen[1:])
    assert around.left[PARAMETER][0] == 5


def test_what_is_left_is_an_alias_with_its_version():
    """Whatever is no plain tensor with memory of its own goes the usual way, and so does a leaf."""
    around = Around()
    leave = around.admission.hook_leaving(around.thread_state, 2 * KIB * 4)
    x = torch.zeros(KIB)
    assert is_alias(leave(x), x)
    x.add_(1)
    left, version = leave(x)
    assert is_alias(left, x) and version == x._version > 0
    assert around.thread_state.fitting_saves == 2 and not around.left
    parameter, leaf = torch.nn.Parameter(torch.zeros(KIB)), torch.zeros(KIB, requires_grad=True)
    assert leave(parameter) is parameter and leave(leaf) is leaf
    sparse = torch.eye(4).to_sparse()
    assert leave(sparse)[0].layout is torch.sparse_coo
    assert around.thread_state.fitting_saves == 2 and len(around.left) == 2


def test_a_call_that_saves_more_than_was_measured_is_managed_from_then_on():
    around = Around()
    leave = around.admission.hook_leaving(around.thread_state, 8 * KIB)
    first, second, third = (torch.zeros(KIB) for _ in range(3))
    for each in (first, second[: KIB // 2], second[KIB // 2 :], first):  # 8 KiB, whatever views
        leave(each)
    weight = torch.nn.Parameter(torch.zeros(64, KIB))
    assert is_alias(leave(weight.t()), weight), "it is no part of what the call holds"
    assert around.thread_state.fitting_saves == 4
    assert type(leave(third)) is Entry
    assert type(leave(torch.zeros(KIB))) is Entry
    assert around.thread_state.fitting_saves == 4


def test_a_frozen_parameter_and_a_buffer():
    around = Around()
    packed = []

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.zeros(KIB))
            self.frozen = torch.nn.Parameter(torch.zeros(KIB), requires_grad=False)

        def forward(self):
            packed.append(around.pack(self.mask))
            packed.append(around.pack(self.frozen))
            packed.append(around.pack(self.frozen.detach()))
            packed.append(around.pack(torch.zeros(KIB)))

    net = Net()
    net()
    assert packed[0] == (net.mask, 0, "(Net)") and packed[1] is net.frozen
    assert around.left == {
        "a module's buffer, or a view of one": [2, 8192],
        PARAMETER: [1, 4096],
    }
    assert packed[3].block.cleanup.module == "(Net)"


# The policy.


def test_a_policy_receives_a_description_of_each_tensor():
    received = []
    around = Around(policy=received.append)
    around.pack(torch.zeros(3))
    around.thread_state.small_saves = 5
    around.pack(made(2, KIB, dtype=torch.float64)[1:])
    around.pack(torch.nn.Parameter(torch.zeros(2)))
    around.pack(torch.zeros(2, requires_grad=True)[1:])
    first, second, third = received
    assert (first.shape, first.dtype, first.nbytes) == ((3,), torch.float32, 12)
    assert (first.is_leaf, first.is_parameter, first.module, first.index) == (True, False, "", 0)
    assert (second.shape, second.dtype, second.nbytes) == ((1, KIB), torch.float64, 8 * KIB)
    assert (second.is_leaf, second.is_parameter, second.index) == (False, False, 6)
    assert (third.is_leaf, third.is_parameter, third.index) == (False, True, 8)


@pytest.mark.parametrize(
    "tier, device, moves",
    [
        ("keep", None, False),
        ("host", None, False),
        ("disk", None, True),
        ("host", Driver(), True),
        ("keep", Driver(), False),
    ],
)
def test_a_policy_names_the_tier(tier, device, moves):
    around = Around(policy=lambda saved: Action(tier), device=device)
    packed = around.pack(torch.zeros(3, requires_grad=True)[1:])  # whatever it is
    assert (type(packed) is Entry) == moves
    assert around.left == ({} if moves else {"the policy said so": [1, 8]})
    if moves:
        [(block, at_once, _)] = around.admitted
        assert at_once and block.tier == tier


# Blocks.


def test_all_views_of_a_storage_are_one_block():
    around = Around(device=(driver := Driver()))
    tensor = made(2, 4 * KIB)
    whole, half, again = (around.pack(each) for each in (tensor, tensor[1], tensor.t()))
    assert whole.block is half.block is again.block and whole.block.entries == 3
    assert (whole.offset_bytes, half.offset_bytes) == (0, 4 * KIB)
    assert len(around.admitted) == len(around.added) == 1 and len(driver.recorded) == 3
    assert around.admission.eligible_bytes == 8 * KIB
    assert around.admission.deduplicated_bytes == 4 * KIB + 8 * KIB


def test_a_changed_storage_is_another_block():
    around = Around()
    tensor = torch.zeros(KIB)
    before = around.pack(tensor)
    tensor.add_(1)
    after = around.pack(tensor)
    assert before.block is not after.block and after.block.storage_version.version == 1
    assert around.admission.deduplicated_bytes == 0


@pytest.mark.parametrize("make", [torch.zeros, made])
def test_the_same_tensor_again_is_the_same_block(make):
    around = Around()
    tensor = make(KIB)
    assert around.pack(tensor).block is around.pack(tensor).block
    assert len(around.admitted) == 1


def test_what_is_recorded_about_a_new_block():
    around = Around()
    entry, other = around.pack(made(KIB)), around.pack(torch.zeros(KIB))
    assert entry.block.thread_state is around.thread_state
    assert around.added == [entry.block, other.block]
    assert around.admitted == [(entry.block, False, True), (other.block, False, False)]
    assert not entry.block.tier and entry.block.cleanup.module == ""
    assert entry.block.storage_version.block() is entry.block
    assert (entry.block.number, entry.block.stream) == (2, None)


def test_on_an_accelerator_a_block_has_the_stream_that_it_was_made_on():
    around = Around(min_bytes=100, device=Driver())
    base = made(4 * KIB)
    whole, copied = around.pack(made(KIB)), around.pack(base[:1000])
    assert copied.block.is_copy
    assert whole.block.stream == copied.block.stream == "the current one"


@pytest.mark.parametrize("make", [torch.zeros, made])
def test_a_large_region_is_held_whole(make):
    around = Around()
    base = make(4 * KIB)
    itemsize = base.element_size()
    part = around.pack(base[KIB : 2 * KIB])  # a quarter
    assert part.region is None and part.block.nbytes == 4 * KIB * itemsize
    assert part.offset_bytes == KIB * itemsize
    assert around.pack(base[KIB : 2 * KIB]).block is part.block


def test_what_has_left_is_the_same_while_its_bytes_are():
    around = Around(min_bytes=0)
    base = torch.zeros(4 * KIB, dtype=torch.uint8)
    part = around.pack(base[:KIB])
    leaves(part.block)
    assert around.pack(base[10:20]).block is around.pack(base[2 * KIB :]).block is part.block
    assert part.block.mark.matched and around.admission.moved_again_bytes == 0
    base.data[3 * KIB] = 1
    other = around.pack(base[KIB : 2 * KIB])  # of which not a byte has changed
    assert (
        other.block is not part.block
        and other.block.storage_version.origin is part.block.storage_version
    )
    assert other.block.nbytes == KIB == around.admission.moved_again_bytes
    assert around.pack(base[KIB : 2 * KIB]).block is other.block
    base.data[KIB] = 1
    assert around.pack(base[KIB : 2 * KIB]).block is not other.block
    whole = around.pack(base)
    assert whole.block.nbytes == 4 * KIB and around.admission.moved_again_bytes == 6 * KIB
    assert around.pack(base).block is whole.block


def test_in_place_all_saves_have_the_memory_itself():
    around = Around(policy=lambda saved: Action("disk"))
    base = torch.zeros(2 * KIB)
    one, two = (around.pack(half.requires_grad_()) for half in (base[:KIB], base.detach()[KIB:]))
    assert one.block is two.block  # with whatever is written
    base.data.fill_(2)
    assert around.pack(base.detach()).block is one.block
    assert one.block.mark is None


def test_without_a_fingerprint_nobody_knows_and_it_moves_again():
    around = Around()
    tensor = made(KIB)
    first = around.pack(tensor)
    leaves(first.block)
    first.block.mark = None
    second = around.pack(tensor)
    assert second.block is not first.block
    assert around.admission.moved_again_bytes == KIB and around.admission.deduplicated_bytes == 0
    assert second.block.saves.history is first.block.saves.history and second.block.saves.done == 2


def test_an_accelerator_compares_later():
    class Compares(Driver):
        found, marked = object(), ()

        def mark(self, storage, made_on):
            self.marked += (storage.data_ptr(), made_on)
            return "mark"

        def compare(self, mark, storage):
            assert mark == "mark"
            return self.found

    around = Around(device=(driver := Compares()), min_bytes=100)
    tensor, base = made(KIB), made(64 * KIB)
    first, part = around.pack(tensor), around.pack(base[:KIB])
    leaves(first.block, driver), leaves(part.block, driver)
    assert driver.marked[:2] == (tensor.data_ptr(), "the current one") and first.check is None
    second, again = around.pack(tensor), around.pack(base[:KIB])
    assert second.block is first.block and second.check is again.check is driver.found
    assert again.block is part.block
    driver.found = None  # without memory for it
    third, other = around.pack(tensor), around.pack(base[:KIB])
    assert third.block is not first.block and third.check is other.check is None
    assert other.block is not part.block


def test_what_was_saved_again_is_expected_to_be_and_waits_for_that():
    around = Around()
    for step in range(3):
        once, tensor = made(KIB), made(KIB)
        one, first = around.pack(once), around.pack(tensor)
        assert around.expected == [first.block] * (step > 0)
        assert first.block.waits == (step > 0) and not one.block.waits
        second = around.pack(tensor.detach())
        assert second.block is first.block and not first.block.waits
        assert first.block.saves.done == 2 and first.block.saves.expected == (2 if step else 0)
        # The last save shows whether the operation that made it has ended.
        assert [each[::2] for each in around.admitted] == [
            (one.block, True),
            (first.block, not step),
        ]
        around.admitted.clear(), around.expected.clear(), around.next_pass()


def test_the_last_save_may_come_from_another_thread():
    around = Around()
    tensor = made(KIB)
    around.pack(tensor), around.pack(tensor), around.next_pass()
    around.admitted.clear()
    tensor = made(KIB)
    first = around.pack(tensor)
    other = ThreadState()
    assert around.admission.hook(other)(tensor).block is first.block
    assert around.adopted == [first.block] and around.admitted == []
    assert first.block.thread_state is around.thread_state


def test_blocks_that_wait_are_looked_at_again_at_each_save():
    around = Around()
    around.pack(made(KIB))
    assert around.steps == []
    around.thread_state.expecting.append(None)
    around.pack(made(KIB))
    assert around.steps == [2]


@pytest.mark.parametrize("min_bytes, tier", [(1000, ""), (1001, "disk"), (1001, "")])
def test_a_small_region_is_copied(min_bytes, tier):
    action = Action(tier) if tier else None
    around = Around(min_bytes=min_bytes, policy=lambda saved: action)
    base = made(4 * KIB)
    entry, again, other = (around.pack(base[low : low + 1000]) for low in (64, 64, 100))
    assert entry.block is again.block is not other.block
    assert entry.block.entries == 2 and entry.region is None and entry.offset_bytes == 0
    assert entry.block.storage_version.origin is other.block.storage_version.origin is not None
    assert other.offset_bytes == other.block.nbytes - 1000 > 0  # as far from an aligned address
    assert around.admission.deduplicated_bytes == 1000
    assert entry.block.storage_version.origin.copied_bytes == 2000
    if min_bytes == 1000 or tier:
        assert [block for block, *_ in around.admitted] == [entry.block, other.block]
        assert {complete for *_, complete in around.admitted} == {True} and around.left == {}
    else:
        assert around.admitted == [] and around.left == {COPIED: [2, 2000]}
        assert around.admission.eligible_bytes == 0
    assert around.added == [entry.block, other.block]


def test_what_repeats_an_element_needs_that_one_only():
    around = Around(min_bytes=1)
    entry = around.pack(made(4 * KIB)[:1].expand(4 * KIB))
    assert entry.block.nbytes == 1 and entry.shape == (4 * KIB,)


def test_where_a_copied_region_begins_is_said_in_bytes():
    around = Around(min_bytes=4)
    entry = around.pack(made(4 * KIB, dtype=torch.float32)[3:100])
    assert entry.offset_bytes == entry.block.nbytes - 4 * 97 == 4 * 3


def test_a_copied_region_is_complete_whatever_made_its_storage():
    around = Around(min_bytes=100)
    around.pack(torch.zeros(4 * KIB, dtype=torch.uint8)[:1000])
    assert around.admitted[0][2] is True


def test_a_region_with_gaps_is_spread_out_again():
    around = Around(min_bytes=100)
    base = made(64, 64)
    entry = around.pack(base[:, 3:10])
    assert entry.region is not None and entry.block.nbytes == 64 * 7 + 3
    spread = entry.view_of(entry.block.placement.alias, 0)
    assert spread.shape == (64, 7) and spread.stride() == (64, 1)
    assert set(spread.float().flatten().tolist()) == {1.0}


def test_a_copied_region_that_a_backward_changed_is_copied_again():
    around = Around(min_bytes=100)
    base = made(4 * KIB)
    first = around.pack(base[:1000])
    first.block.placement.alias.add_(1)
    assert around.pack(base[:1000]).block is not first.block
    assert around.admission.deduplicated_bytes == 0


def test_regions_are_copied_until_they_cost_what_the_whole_does():
    around = Around(min_bytes=100)
    base = made(4000)
    parts = [around.pack(base[low : low + 800]) for low in range(5)]
    assert {each.block.nbytes - 800 for each in parts} == {0, 1, 2, 3, 4}
    assert parts[0].block.storage_version.origin.copied_bytes == 4000
    assert around.pack(base[5:805]).block.nbytes == 4000


def test_without_memory_for_a_copy_the_whole_is_held(monkeypatch):
    around = Around(min_bytes=100)

    def no_memory(region, tensor):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr("backstash._saved.view.StridedRegion.copy", no_memory)
    base = made(4 * KIB)
    assert around.pack(base[:1000]).block.nbytes == 4 * KIB


# Slices that make up their storage.


def slices(around, parts=8, nbytes=800, base=None):
    """The entries of so many slices of 8, one after the other."""
    base = made(8 * nbytes) if base is None else base
    return [around.pack(base[at * nbytes :][:nbytes]) for at in range(parts)]


def are_one_block(entries):
    return entries[0].block.nbytes > 1000


def test_slices_that_made_up_all_of_their_storage_are_one_block_the_next_time():
    around = Around(min_bytes=1000)
    first = slices(around)
    assert len({each.block for each in first}) == 8 and around.expected == []
    around.next_pass()
    second = slices(around)
    assert {each.block for each in second} == {second[0].block} and second[0].block.nbytes == 6400
    assert [each.offset_bytes for each in second] == list(range(0, 6400, 800))
    assert second[0].block.saves.expected == second[0].block.saves.done == 8
    assert around.expected == [second[0].block], "until all of them were saved it waits"
    assert [block for block, *_ in around.admitted] == [second[0].block]


def test_slices_that_do_not_make_up_their_storage_are_copied_the_next_time():
    around, found = Around(min_bytes=1000), []
    for parts in (8, 3, 7, 8, 8):
        found.append(are_one_block(slices(around, parts)))
        around.next_pass()
    assert found == [False, True, False, False, True]


def test_slices_that_are_saved_twice_are_no_others_and_are_expected_twice():
    around = Around(min_bytes=1000)
    for parts, is_one in ((4, False), (4, False), (8, False), (8, True)):
        base = made(6400)
        found = [*slices(around, parts, base=base), *slices(around, parts, base=base)]
        assert are_one_block(found) == is_one
        around.next_pass()
    assert found[0].block.saves.expected == found[0].block.saves.done == 16
    assert around.admitted[-1][0] is found[0].block


def test_what_is_expanded_is_counted_once():
    around = Around(min_bytes=1000)
    for _ in range(3):
        base = made(64, 100)
        around.pack(base[:, :1].expand(64, 100))
        assert are_one_block([around.pack(base[:, 1:2].expand(64, 100))]) is False
        around.next_pass()


def test_slices_are_known_by_their_place_in_the_pass():
    """Some storages are interleaved, and others of the same size are not made up."""
    around = Around(min_bytes=1000)
    for step in range(3):
        bases = [made(6400) for _ in range(3)]
        found = [
            [around.pack(base[at * 800 :][:800]) for base in bases[: 3 if at == 0 else 2]]
            for at in range(8)
        ]
        assert [are_one_block([each]) for each in found[0]] == [step > 0, step > 0, False]
        around.next_pass()


def test_slices_of_another_size_or_module_are_copied(monkeypatch):
    around = Around(min_bytes=1000)
    slices(around)
    around.next_pass()
    assert not are_one_block(slices(around, nbytes=808))
    base = made(6400)
    assert not are_one_block([around.pack(base[at * 400 :][:400]) for at in range(16)])
    monkeypatch.setattr("backstash._core.identity.module_path", lambda modules: "another")
    assert not are_one_block(slices(around))


def test_of_too_many_storages_nothing_is_known(monkeypatch):
    monkeypatch.setattr("backstash._saved.slice_counts._MOST_STORAGES", 1)
    around = Around(min_bytes=1000)
    for _ in range(2):
        assert not any(are_one_block(slices(around, nbytes=nbytes)) for nbytes in (800, 808))
        around.next_pass()


def test_slices_of_an_accelerator_s_storage_are_copied():
    around = Around(min_bytes=1000, device=Driver())
    for _ in range(2):
        assert len({each.block for each in slices(around)}) == 8
        around.next_pass()


def test_a_slice_whose_block_has_left_is_copied(monkeypatch):
    """The whole is not compared for each of them."""
    around = Around(min_bytes=1000)
    slices(around)
    around.next_pass()
    base = made(6400)
    first, *_ = slices(around, parts=4, base=base)
    leaves(first.block)
    monkeypatch.setattr(Block, "has", None)
    last = around.pack(base[5600:])
    assert last.block is not first.block and last.block.nbytes < 1000


# Subclasses.


def test_a_subclass_that_does_not_say_how_it_is_made_up_stays():
    class Plain(torch.Tensor):
        pass

    around = Around()
    tensor = torch.zeros(KIB).as_subclass(Plain)
    assert around.pack(tensor)[0] is tensor
    assert around.left == {
        "a Plain, which does not list its inner tensors (__tensor_flatten__)": [1, 4096]
    }


def test_a_subclass_is_packed_part_by_part_and_once():
    around = Around(device=(driver := Driver()))
    parts = torch.zeros(KIB), torch.zeros(KIB)
    tensor = TwoTensor(*parts)
    entry = around.pack(tensor)
    assert type(entry) is WrapperEntry and around.pack(tensor) is entry
    assert len(around.admitted) == 2 and around.thread_state.saves == 4
    assert len({each.block for each in entry.parts.values()}) == 2
    blocks = [each.block.placement.alias for each in entry.parts.values()]
    assert not any(is_alias(one, other) for one in blocks for other in parts)  # copies
    assert driver.recorded[0] is parts[0]
    parts[0].add_(1)
    assert around.pack(tensor) is not entry


def test_a_subclass_of_whole_numbers_moves_too():
    around = Around()
    numbers = [torch.zeros(KIB, dtype=torch.int32) for _ in range(2)]
    entry = around.pack(TwoTensor(*numbers))
    assert [type(each) for each in entry.parts.values()] == [Entry] * 2


def test_a_part_keeps_its_strides_and_one_elsewhere_is_no_use_of_this_device():
    around = Around(device=(driver := Driver()))
    wrapper = SimpleNamespace(is_nested=False, device=torch.device("cpu"))
    base = torch.zeros(KIB, 4)
    entry = around.admission._pack_inner(wrapper, base[:, 1], around.thread_state, around.tiers)
    assert entry.stride == (4,) and len(driver.recorded) == 2
    elsewhere = torch.zeros(KIB, device="meta")
    around.admission._pack_inner(wrapper, elsewhere, around.thread_state, around.tiers)
    assert len(driver.recorded) == 2 and "device meta" in around.left


@pytest.mark.parametrize("reason", ["no tier below: give disk=", "device meta", PARAMETER])
def test_a_subclass_that_stays(reason):
    around = Around(has_tier=not reason.startswith("no"))
    device = "meta" if reason == "device meta" else "cpu"
    tensor = TwoTensor(torch.zeros(KIB, device=device), torch.zeros(KIB, device=device))
    if reason == PARAMETER:
        tensor.requires_grad_()
    packed = around.pack(tensor)
    assert (packed if reason == PARAMETER else packed[0]) is tensor
    assert list(around.left) == [reason]


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_a_nested_tensor_s_offsets_stay_the_very_same(dtype):
    around = Around()
    rows = [torch.ones(size, dtype=dtype) for size in (300, 500)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    entry = around.pack(nested)
    kept, *_ = entry.parts["_offsets"]
    assert kept is nested.offsets()
    assert type(entry.parts["_values"]) is Entry
    assert around.left["the offsets of a nested tensor"][0] == 1


def test_a_part_that_cannot_be_moved_is_copied_and_stays():
    around = Around(device=(driver := Driver()))
    sparse = torch.eye(3).to_sparse()
    inner = TwoTensor(torch.zeros(KIB), torch.zeros(KIB))
    wrapper = SimpleNamespace(is_nested=False, device=torch.device("cpu"))
    kept, *_ = around.admission._pack_inner(wrapper, sparse, around.thread_state, around.tiers)
    assert kept is not sparse and torch.equal(kept.to_dense(), torch.eye(3))
    packed = around.admission._pack_inner(wrapper, inner, around.thread_state, around.tiers)
    assert type(packed) is WrapperEntry and len(around.admitted) == 2
    assert {type(each) for each in driver.recorded} == {torch.Tensor}
