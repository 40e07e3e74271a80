"""Entries: a view is rebuilt to the bit, from bytes that lie anywhere and under any dtype."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from backstash import Stash
from backstash._saved.entry import Entry, WrapperEntry, _at_offset, _offset_of
from backstash._saved.view import StridedRegion, raw_alias
from backstash._torch.versions import same_counter
from oracle import gradients, same_bits

DISK = SimpleNamespace(where="disk", storage_version=None)


def offset_of(tensor):
    return tensor.storage_offset() * tensor.element_size()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int8, torch.bfloat16])
@pytest.mark.parametrize("low", [0, 64, 4096])
def test_a_view_is_cut_from_bytes_that_begin_anywhere(dtype, low):
    x = torch.arange(60).to(dtype).view(5, 12)
    if dtype.is_complex:
        x = x * (1 + 2j)
    for view in (x, x[1:], x.t(), x[::2, 3:7], x[4, 11], x[:1].expand(3, 12)):
        entry = Entry(DISK, view, offset_of(view))
        base = torch.zeros(low + x.nbytes + 3, dtype=torch.uint8)  # three bytes that no item has
        base[low : low + x.nbytes] = x.reshape(-1).view(torch.uint8)
        rebuilt = entry.view_of(base, low)
        assert same_bits(rebuilt, view) and rebuilt.stride() == view.stride()
        assert same_counter(rebuilt, base)
        in_place = entry.view_of(raw_alias(x), 0)
        assert same_bits(in_place, view) and in_place.data_ptr() == view.data_ptr()
        assert (entry.dtype, entry.device) == (view.dtype, view.device)
        assert entry.nbytes == view.numel() * x.element_size() and entry.where == "disk"


def test_a_view_of_another_dtype_than_the_block_in_place():
    x = torch.arange(12, dtype=torch.int64)
    for dtype in (torch.uint8, torch.int16, torch.float64):
        view = x.view(dtype)[4:]
        entry = Entry(DISK, view, offset_of(view))
        assert same_bits(entry.view_of(x, 0), view)
    odd = torch.arange(7, dtype=torch.uint8)  # three int16, and a byte over
    assert same_bits(
        Entry(DISK, odd[:6].view(torch.int16), 0).view_of(odd, 0), odd[:6].view(torch.int16)
    )


@pytest.mark.parametrize("conj", [False, True])
@pytest.mark.parametrize("neg", [False, True])
def test_conj_and_neg_bits_come_back(conj, neg):
    z = torch.complex(torch.tensor([1.0, -2.0]), torch.tensor([3.0, -0.0]))
    view = torch._neg_view(z) if neg else z
    view = view.conj() if conj else view
    rebuilt = Entry(DISK, view, 0).view_of(raw_alias(z), 0)
    assert (rebuilt.is_conj(), rebuilt.is_neg()) == (conj, neg)
    assert same_bits(rebuilt, view)


def test_a_region_with_gaps_is_spread_out_again():
    x = torch.arange(100.0).view(10, 10)
    view = x[1:9:2, 3:5]
    region = StridedRegion(view)
    dense = region.copy(view)
    entry = Entry(DISK, view, region.residue * region.itemsize, region)
    rebuilt = entry.view_of(dense, 0)
    assert same_bits(rebuilt, view) and rebuilt.stride() == view.stride()


def test_a_view_that_begins_inside_an_item_is_refused():
    entry = Entry(DISK, torch.zeros(4), 0)
    with pytest.raises(AssertionError, match=r"a view at byte 2 of torch.float32"):
        entry.view_of(torch.zeros(32, dtype=torch.uint8), 2)


def test_what_was_read_is_freed_when_every_entry_has_had_it(tmp_path):
    def program():
        h = x.sin()
        return h * h.t() + h.exp()

    x = torch.randn(400, 400, requires_grad=True)
    expected = gradients(program(), x)
    stash = Stash(disk=tmp_path, inflight=0, prefetch="1GiB")
    with stash:
        loss = program()
    prefetcher = stash._session.device_tiers[0].prefetcher
    for _ in range(3):  # each use of the graph is a turn of its own; it is retained for another
        assert same_bits(*gradients(loss, x, retain_graph=True), *expected)
        assert prefetcher.ahead.nbytes == 2 * x.nbytes
        assert stash.stats().read_bytes == 2 * x.nbytes
    assert same_bits(*gradients(loss, x), *expected)
    assert prefetcher.ahead.nbytes == 0
    del loss
    stash.close()


# Wrappers.


def wrapper_entry(tensor, where=None):
    def pack(part):
        return SimpleNamespace(where=where[len(packed)]) if where else part.clone()

    packed = []
    return WrapperEntry(tensor, lambda part: packed.append(pack(part)) or packed[-1])


def two(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return TwoTensor(torch.randn(3, 4, generator=generator), torch.randn(3, 4, generator=generator))


def test_a_wrapper_is_rebuilt_around_its_parts():
    tensor = two()
    entry = wrapper_entry(tensor)
    assert (entry.kind, entry.shape, entry.stride) == (TwoTensor, (3, 4), (4, 1))
    assert (entry.dtype, entry.device) == (tensor.dtype, tensor.device)
    rebuilt = entry.rebuild(lambda part: part * 1)
    assert type(rebuilt) is TwoTensor
    assert torch.equal(rebuilt.a, tensor.a) and torch.equal(rebuilt.b, tensor.b)


@pytest.mark.parametrize(
    ("where", "lowest"),
    [
        (("disk", "host"), "disk"), (("host", "disk"), "disk"), (("keep", "host"), "host"),
        (("keep", "keep"), "keep"),
    ],
)  # fmt: skip
def test_a_wrapper_is_where_its_lowest_part_is(where, lowest):
    assert wrapper_entry(two(), where).where == lowest


def test_parts_that_stayed_are_in_place():
    assert wrapper_entry(two()).where == "keep"


def test_a_wrapper_is_known_while_nothing_of_it_changed():
    tensor = two()
    entry = wrapper_entry(tensor)
    assert entry.is_of(tensor)
    assert not entry.is_of(two())
    assert not entry.is_of(tensor.a)
    tensor.b.add_(1)
    assert not entry.is_of(tensor)
    entry = wrapper_entry(tensor)
    assert entry.is_of(tensor)
    tensor.a = tensor.a.clone()  # another part, at the same version
    assert not entry.is_of(tensor)
    nested = TwoTensor(two(), two())
    entry = wrapper_entry(nested)
    assert entry.is_of(nested) and len(entry.seen) == 7
    nested.b.a.mul_(2)
    assert not entry.is_of(nested)


def test_a_wrapper_that_is_gone_is_not_known():
    tensor = two()
    entry = wrapper_entry(tensor)
    entry.seen = [(weakref.ref(two()), 0), *entry.seen[1:]]
    assert not entry.is_of(tensor)


def test_where_a_part_begins_is_known_of_what_can_be_moved():
    assert _offset_of(torch.zeros(10)[3:]) == 3
    assert _offset_of(torch.zeros(10).view(2, 5)[1]) == 5
    assert _offset_of(two()) is None
    assert _offset_of(torch.eye(3).to_sparse()) is None


@pytest.mark.parametrize("conj", [False, True])
@pytest.mark.parametrize("neg", [False, True])
@pytest.mark.parametrize("begin", [0, 2, 7])
def test_a_part_begins_where_it_began(begin, conj, neg):
    x = torch.arange(60.0).view(6, 10) * (1 + 2j)
    view = x[1:5, 2:9:2]
    view = torch._neg_view(view) if neg else view
    view = view.conj() if conj else view
    assert _at_offset(view, None) is view and _at_offset(view, 12) is view
    moved = _at_offset(view, begin)
    assert moved.storage_offset() == begin and moved.stride() == view.stride()
    assert moved.untyped_storage().nbytes() == 8 * (begin + 37)
    assert (moved.is_conj(), moved.is_neg()) == (conj, neg)
    assert same_bits(moved, view)


def test_a_wrapper_s_parts_begin_where_they_began():
    whole = torch.randn(4, 6)
    tensor = TwoTensor(whole[1], (whole + 1)[1])
    entry = wrapper_entry(tensor)
    assert entry.offsets == {"a": 6, "b": 6}
    rebuilt = entry.rebuild(lambda part: part.clone())
    assert (rebuilt.a.storage_offset(), rebuilt.b.storage_offset()) == (6, 6)
    assert same_bits(rebuilt.a, whole[1]) and same_bits(rebuilt.b, whole[1] + 1)
    entry.seen.pop()  # of one that was made up of fewer
    assert entry.is_of(tensor) is False
