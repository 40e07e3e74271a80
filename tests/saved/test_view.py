"""Regions: which elements a view needs, and moving just those."""

from types import SimpleNamespace

import pytest
import torch

from backstash._saved.view import StridedRegion, snapshot
from oracle import same_bits


def base(dtype=torch.float32):
    return torch.arange(240).to(dtype).view(10, 24)


# view: first element, sizes, strides, elements from first to last
SHAPES = {
    "whole": (lambda x: x, 0, (240,), (1,), 240),
    "a row": (lambda x: x[2], 48, (24,), (1,), 24),
    "a column": (lambda x: x[:, 3], 3, (10,), (24,), 217),
    "a block": (lambda x: x[1:4, 2:5], 26, (3, 3), (24, 1), 51),
    "its transpose": (lambda x: x[1:4, 2:5].t(), 26, (3, 3), (24, 1), 51),
    "one": (lambda x: x[4, 4], 100, (), (), 1),
    "one in two dimensions": (lambda x: x[4:5, 4:5], 100, (), (), 1),
    "expanded": (lambda x: x[4, 4:6].expand(7, 2), 100, (2,), (1,), 2),
    "every second": (lambda x: x.view(-1)[::2], 0, (120,), (2,), 239),
    "rows of every third": (lambda x: x[::3], 0, (4, 24), (72, 1), 240),
    "overlapping windows": (lambda x: x.view(-1).unfold(0, 5, 2)[:10], 0, (23,), (1,), 23),
    "windows side by side": (lambda x: x.view(-1).unfold(0, 5, 5)[:10], 0, (50,), (1,), 50),
    "windows that touch": (lambda x: x.as_strided((3, 3), (4, 2)), 0, (13,), (1,), 13),
    "nested strides": (lambda x: x.as_strided((3, 2), (3, 2)), 0, (3, 2), (3, 2), 9),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_elements_that_a_view_needs(name):
    view, first, sizes, strides, extent = SHAPES[name]
    region = StridedRegion(view(base()))
    assert (region.first, region.sizes, region.strides, region.extent) == (
        first,
        sizes,
        strides,
        extent,
    )
    assert region.count == torch.Size(sizes).numel() and region.nbytes == 4 * region.count
    assert region.is_dense is (region.count == extent)
    assert region.key == (4, first, sizes, strides)


DTYPES = [
    torch.uint8,
    torch.bfloat16,
    torch.float32,
    torch.int64,
    torch.complex128,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_a_copy_is_dense_and_spreads_out_to_where_the_elements_were(name, dtype):
    x = base(dtype)
    view = SHAPES[name][0](x)
    region = StridedRegion(view)
    assert region.itemsize == region.carrier.itemsize == x.element_size()
    assert region.residue == view.data_ptr() % 64 // x.element_size()
    dense = region.copy(view)
    assert dense.numel() == region.residue + region.count
    back = region.spread(dense[region.residue :], dtype)
    assert back.dtype == dtype and back.numel() == region.residue + region.extent
    assert same_bits(back.as_strided(view.shape, view.stride(), region.residue), view)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("conj", [False, True])
@pytest.mark.parametrize("neg", [False, True])
def test_a_snapshot_is_the_view_itself_again(name, conj, neg):
    x = base(torch.complex64) * (1 + 2j)
    view = SHAPES[name][0](x)
    view = torch._neg_view(view) if neg else view
    view = view.conj() if conj else view
    copy = snapshot(view)
    assert (copy.is_conj(), copy.is_neg(), copy.stride()) == (conj, neg, view.stride())
    assert copy.data_ptr() % 64 == view.data_ptr() % 64 or copy.numel() == 1
    assert same_bits(copy, view)
    expected = view.resolve_conj().resolve_neg().clone()
    x.zero_()
    assert same_bits(copy.resolve_conj().resolve_neg(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_snapshot_has_the_bits_of_numbers_that_are_none(dtype):
    """Those of signalling NaNs, for example, in a tensor that is copied without a detour."""
    carrier = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    bits = torch.arange(-(1 << 15), 1 << 15).to(carrier) << 8 * (dtype.itemsize - 2)
    for made in (bits, bits + 1, bits.view(1, -1, 8), bits.as_strided((1, 40), (7, 1))):
        numbers = made.view(dtype)
        numbers.requires_grad_()
        copy = snapshot(numbers)
        assert not copy.requires_grad and copy.stride() == numbers.stride()
        assert copy.data_ptr() % 64 == numbers.data_ptr() % 64
        assert torch.equal(copy.view(carrier), made) and copy.data_ptr() != numbers.data_ptr()


class Elsewhere:
    """A tensor of the CPU that says it is an accelerator's."""

    device = SimpleNamespace(type="cuda")

    def __init__(self, tensor):
        self._tensor = tensor

    def __getattr__(self, name):
        return getattr(self._tensor, name)


def test_the_alignment_that_is_kept():
    """What vector code relies on on the CPU, and what an accelerator's libraries choose a kernel by."""
    x = torch.zeros(4096, dtype=torch.uint8)
    at = -x.data_ptr() % 256
    assert StridedRegion(x[at + 70 :]).residue == 6
    begins = (0, 70, 255, 256, 257)
    assert [StridedRegion(x[at + n :]).residue for n in begins] == [0, 6, 63, 0, 1]
    there = [StridedRegion(Elsewhere(x[at + n :])).residue for n in begins]
    assert there == [0, 70, 255, 0, 1]
