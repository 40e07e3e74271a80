"""The version rule, piece by piece: which storage, at which version, and what of it can be moved at all."""

from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from backstash import Stash
from backstash._runtime.reclaim import ReclaimQueue
from backstash._saved import block as _block
from backstash._saved import view as _view
from backstash._saved.block import Block, BlockCleanup, Loaded, StorageVersion
from backstash._saved.placement import Lost, Resident, Stored, Writing
from backstash._saved.view import extent_bytes, raw_alias, reason_to_stay
from backstash._torch import storages as _storages
from backstash._torch import versions as _versions
from backstash._torch.dispatch import TorchDispatchMode
from backstash._torch.versions import same_counter
from oracle import gradients, same_bits

RECLAIM_QUEUE = ReclaimQueue()
DISK = SimpleNamespace(tier="disk")  # as much of a backing as a block asks


def version_of(tensor):
    return StorageVersion(tensor, tensor.untyped_storage())


def block_of(tensor):
    return Block(version_of(tensor), raw_alias(tensor), RECLAIM_QUEUE, 3)


# Which tensors share a version counter.


@pytest.mark.parametrize("version", [0, 1, 5])
def test_views_and_detached_aliases_share_a_counter_and_data_does_not(version):
    x = torch.zeros(6)
    for _ in range(version):
        x.add_(1)
    for shares in (x, x.detach(), x[2:], x.view(2, 3).t()):
        assert same_counter(x, shares) is True
        assert same_counter(shares, x) is True
    separate = torch.zeros(6)
    for _ in range(version):
        separate.add_(1)
    assert same_counter(x, separate) is False
    assert same_counter(x, x.data) is False
    assert x._version == separate._version == version


def test_where_torch_cannot_say_the_answer_is_no(tmp_path, monkeypatch):
    monkeypatch.setattr(_versions, "_set_versions", None)
    x = torch.zeros(6)
    assert same_counter(x, x) is False
    x = torch.randn(200, 200, requires_grad=True)
    stash = Stash(disk=tmp_path, inflight=0)
    with stash:
        h = x.sin()
        loss = h * h + h.detach() * h  # h, and what may not share its counter: moved twice
    assert stash.stats().written_bytes == 2 * h.nbytes
    (found,) = gradients(loss, x)
    h = x.sin()
    assert same_bits(found, *gradients(h * h + h.detach() * h, x))
    stash.close()


def test_a_storage_version_holds_no_memory_and_keeps_the_identity(monkeypatch):
    referred, freed = [], []

    def weak_ref(storage):
        referred.append(_storages.weak_ref(storage))
        return referred[-1]

    def free_weak_ref(reference):
        freed.append(reference)
        _storages.free_weak_ref(reference)

    monkeypatch.setattr(_block, "weak_ref", weak_ref)
    monkeypatch.setattr(_block, "free_weak_ref", free_weak_ref)
    x = torch.ones(1000)
    storage_version = version_of(x)
    assert storage_version.probe.untyped_storage().nbytes() == 0
    assert storage_version.cdata == x.untyped_storage()._cdata
    assert storage_version.copied_bytes == 0
    weak = StorageWeakRef(x.untyped_storage())
    assert not weak.expired()
    del x
    assert weak.expired()  # it did not keep the bytes
    assert referred == [storage_version.cdata] and freed == []  # but what they were known by
    del storage_version
    assert freed == referred


@pytest.mark.parametrize("before", [0, 2])
def test_a_source_sees_a_change_and_is_of_no_other_bytes(before):
    x = torch.ones(10)
    for _ in range(before):
        x.add_(1)
    storage_version = version_of(x)
    assert storage_version.version == before
    assert storage_version.changed is False
    assert storage_version.is_of(x) is True and storage_version.is_of(x[3:]) is True
    assert (
        storage_version.is_of(x.data) is False
    )  # the same memory; its changes raise no version of x
    assert storage_version.is_of(torch.ones(10)) is False
    alias = x.data
    for _ in range(before + 1):
        alias.add_(1)
    assert storage_version.is_of(alias) is False and storage_version.changed is False
    x.detach()[2:].zero_()
    assert storage_version.changed is True
    assert storage_version.is_of(x) is False
    assert version_of(x).is_of(x) is True


def test_views_of_one_base_are_known_where_torch_cannot_say(monkeypatch):
    base = torch.zeros(6)
    storage_version = version_of(base[2:])
    monkeypatch.setattr(_versions, "_set_versions", None)
    assert (
        storage_version.is_of(base)
        and storage_version.is_of(base.view(2, 3))
        and storage_version.is_of(base[:1])
    )
    assert not storage_version.is_of(
        base.detach()
    )  # which shares the counter, too: it costs a copy


def test_a_tensor_whose_version_was_put_back_is_not_taken_for_another():
    """``tensor`` at the saved version, with a probe of another one: both have to agree."""
    x, y = torch.ones(4), torch.ones(4)
    storage_version = version_of(x)
    x.add_(1)
    assert storage_version.is_of(y) is False  # y is at the saved version, the probe is not
    y.add_(1)
    assert storage_version.is_of(y) is False


def test_a_version_that_was_put_back_below_the_saved_one():
    """As ``torch.autograd._unsafe_preserve_version_counter`` does, if something was saved inside."""
    x, y = torch.ones(4), torch.ones(4)
    x.add_(1)
    storage_version = version_of(x)
    _versions._set_versions((x,), (0,))
    y.add_(1)
    assert storage_version.changed and not storage_version.is_of(y) and not storage_version.is_of(x)


def test_an_identity_is_not_handed_out_again_while_a_source_has_it(tmp_path):
    """``.data =`` keeps the counter and frees the storage: only the weak reference distinguishes them."""
    x = torch.randn(300, 300, requires_grad=True)
    held = torch.full((300, 300), 2.0)
    stash = Stash(disk=tmp_path, inflight=0)
    with stash:
        first = x * held
        later = first.sin()  # now what the first one saved goes down
        identity = held.untyped_storage()._cdata
        held.data = torch.empty(0)  # what went down has no other owner
        others = []
        for _ in range(20):
            others.append(torch.full((300, 300), 7.0))
            if others[-1].untyped_storage()._cdata == identity:
                break
        held.data = others[-1]
        second = x * held
    assert torch.all(gradients(second, x)[0] == 7.0)
    assert torch.all(gradients(first, x)[0] == 2.0)
    del later
    stash.close()


# What can be moved exactly.


def zerotensor():
    return torch._efficientzerotensor(3)


def on_a_functorch_level(tensor):
    found = []
    torch.func.vmap(lambda each: found.append(reason_to_stay(each)) or each)(tensor)
    return found[0]


def unaligned():
    return torch.frombuffer(bytearray(64), dtype=torch.uint8, offset=1)


def cut_short():
    x = torch.zeros(100)
    x.untyped_storage().resize_(396)
    return x


REASONS = {
    "layout sparse_coo": lambda: torch.eye(3).to_sparse(),
    "layout sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "a quantized tensor": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "a tensor of zeros without memory": zerotensor,
    "no bytes": lambda: torch.empty(0, 3),
    "its storage is smaller than the view": cut_short,
    "its memory is not aligned": unaligned,
    "": lambda: torch.ones(3),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("reason", REASONS)
def test_why_a_tensor_stays(reason):
    assert reason_to_stay(REASONS[reason]()) == reason


def test_more_of_why_a_tensor_stays(monkeypatch):
    assert on_a_functorch_level(torch.ones(3)) == "a functorch transform's tensor"
    gone = torch.ones(3)
    gone.untyped_storage().resize_(0)  # what FSDP2 does to a weight: elements, and no memory
    assert gone.numel() == 3 and reason_to_stay(gone) == "no bytes"
    assert reason_to_stay(torch.ones(4)[2:2]) == "no bytes"
    assert reason_to_stay(torch.ones(1)) == "" and reason_to_stay(torch.ones(4)[1:]) == ""
    # An element of one byte, eight bytes into its storage, whose own address is aligned to nothing.
    assert reason_to_stay(torch.ones(64, dtype=torch.uint8)[9:]) == ""
    named = SimpleNamespace(
        layout=torch.strided, is_nested=False, is_quantized=False, names=(None, "row")
    )
    monkeypatch.setattr(_view, "is_functorch_wrapped", lambda tensor: False)
    monkeypatch.setattr(_view, "_HAS_NAMES", True)
    assert reason_to_stay(named) == "a named tensor"


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda x: x, (0, 480)),
        (lambda x: x[1], (96, 192)),
        (lambda x: x.t(), (0, 480)),
        (lambda x: x[:, 3:5], (12, 4 * (24 * 4 + 5))),
        (lambda x: x[::2, ::3], (0, 4 * (24 * 4 + 22))),
        (lambda x: x[2, 7].expand(9), (4 * 55, 4 * 56)),
        (lambda x: x.view(torch.int16)[1, 1:3], (98, 102)),
    ],
)
def test_the_bytes_that_a_view_needs(make, expected):
    assert extent_bytes(make(torch.zeros(5, 24))) == expected


def test_a_raw_alias_has_the_bytes_as_they_lie():
    z = torch.complex(torch.tensor([1.0, 2.0]), torch.tensor([3.0, -4.0]))
    raw = torch.view_as_real(z).clone()
    for view in (z, z.conj(), torch._neg_view(z), torch._neg_view(z).conj()):
        alias = raw_alias(view)
        assert not alias.is_conj() and not alias.is_neg()
        assert torch.equal(torch.view_as_real(alias), raw)
        assert alias.data_ptr() == z.data_ptr() and same_counter(alias, z)


# Blocks.


def test_a_new_block_is_in_place_and_unused():
    x = torch.zeros(3)
    block = block_of(x)
    cleanup = block.cleanup
    assert type(block.placement) is Resident and same_counter(block.placement.alias, x)
    assert (cleanup.resident_bytes, cleanup.loaded_bytes) == (0, 0)
    assert (block.index, block.offset, block.entries, block.turn, block.served) == (0, 0, 0, 0, 0)
    assert (block.loaded, block.stream, block.tier) == (None, None, "")
    assert (block.number, block.facts) == (3, (12, -1, ""))
    RECLAIM_QUEUE.clear()
    del block  # which is unknown to any session
    assert list(RECLAIM_QUEUE) == [cleanup]
    assert (cleanup.number, cleanup.resident_bytes, cleanup.loaded_bytes) == (3, 0, 0)
    assert (cleanup.nbytes, cleanup.serial, cleanup.module, cleanup.facts) == (12, -1, "", None)


def test_what_is_counted_for_a_block_is_left_when_it_dies():
    block = block_of(torch.zeros(3))
    block.cleanup.resident_bytes, block.cleanup.serial, block.cleanup.module = 1, 3, "head"
    assert block.facts == (12, 3, "head")
    RECLAIM_QUEUE.clear()
    del block
    (left,) = RECLAIM_QUEUE
    assert (left.resident_bytes, left.serial, left.module) == (1, 3, "head")
    assert left.facts == (12, 3, "head")


def test_a_dead_block_is_struck_out_before_it_is_subtracted():
    """Else the next caller after an interrupt would count it twice."""
    left = BlockCleanup(RECLAIM_QUEUE, 0, 12)
    left.resident_bytes, left.again_bytes, left.serial = 12, 7, 0
    subtracted = []

    def subtract(**what):
        assert (left.resident_bytes, left.again_bytes) == (0, 0)
        assert (left.serial, left.facts) == (-1, None)
        subtracted.append(what)

    assert left.is_busy() is False
    left.settle(SimpleNamespace(subtract=subtract))
    assert subtracted == [{"resident_bytes": 12, "again_bytes": 7}]


def test_a_block_in_place():
    x = torch.zeros(3, 4, requires_grad=True)
    block = block_of(x.detach())
    assert (block.where, block.has_moved, block.nbytes) == ("keep", False, 48)
    assert not block.is_copy
    x.untyped_storage().resize_(1 << 20)
    assert block.has_moved is True
    block.placement = Writing(block.placement.alias, DISK, object())
    assert block.has_moved is True
    block.placement = Stored(DISK)
    assert block.has_moved is False


def test_where_a_block_is():
    block = block_of(torch.zeros(3))
    block.placement = Writing(block.placement.alias, DISK, object())
    assert block.where == "keep"  # on its way
    block.placement = Stored(DISK)
    assert block.where == "disk"
    block.placement = Stored(None)
    assert block.where == "keep"
    block.placement = Lost(1)
    assert block.where == "keep"


def test_what_was_read_back_is_freed():
    block, root = block_of(torch.zeros(3)), torch.zeros(4, dtype=torch.uint8).add_(1)
    loaded = block.loaded = Loaded(root, 2, arrival := object())
    assert (loaded.low, loaded.version) == (2, 1) and loaded.root is root
    assert loaded.arrival is arrival
    block.free()
    assert block.loaded is None


def test_what_each_placement_has():
    alias, transfer = torch.zeros(3), object()
    has = {
        "resident": (Resident(alias), (alias, None, None, True, False, None)),
        "writing": (Writing(alias, DISK, transfer), (alias, DISK, transfer, False, False, None)),
        "stored": (Stored(DISK), (None, DISK, None, False, False, None)),
        "unordered": (Stored(DISK, is_unordered=True), (None, DISK, None, False, True, None)),
        "lost": (Lost(7), (None, None, None, False, False, 7)),
    }
    for name, (placement, facts) in has.items():
        found = (
            placement.alias,
            placement.backing,
            placement.transfer,
            placement.is_kept,
            placement.is_unordered,
            placement.lost_at,
        )
        assert all(one is other for one, other in zip(found, facts, strict=True)), name


def test_what_a_block_has_that_left():
    x = torch.arange(100.0)
    block = block_of(x)
    assert block.has(x.untyped_storage(), None) is False and block.mark is None  # nothing was noted
    block.take_fingerprint(None)
    assert block.has(x.untyped_storage(), None) is True and block.mark.matched
    x.data[7], x.data[8] = 8.0, 7.0
    assert block.has(x.untyped_storage(), None) is False
    with TorchDispatchMode():
        assert block.has(x.untyped_storage(), None) is False
        block.take_fingerprint(None)
    assert block.mark is None
    block.take_fingerprint(None)
    with TorchDispatchMode():
        assert block.has(x.untyped_storage(), None) is False
    assert block.has(x.untyped_storage(), None) is True


def test_a_block_in_place_that_no_budget_counts_waits():
    block = block_of(torch.zeros(4))
    assert block.waits
    block.cleanup.resident_bytes = 16
    assert not block.waits
    block.cleanup.resident_bytes = 0
    block.placement = Stored(DISK)
    assert not block.waits
