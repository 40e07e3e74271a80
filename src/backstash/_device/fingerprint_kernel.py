"""The fingerprint of an accelerator's memory as one kernel in Triton, which PyTorch's builds for CUDA include.

The kernel reads each word once; PyTorch's own operations read and write seven times as much. Each 32-bit word
is multiplied by an odd 64-bit weight for its position, and the products are added modulo 2**64, in two sums
with weights of their own (multilinear hashing, Carter and Wegman 1979). One changed word changes both sums,
since its weights are odd. A weight is the product of three odd factors: a random factor for the position in a
row of words, a power of a random factor for the row in a block of rows, and a factor for the block, mixed from
its number (the finalizer of Steele, Lea and Flood's SplitMix, 2014).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["COLUMNS", "ROWS", "add_sums", "factors_of"]

COLUMNS = 1024
"""Words in a row."""
ROWS = 32
"""Rows in a block."""


@triton.jit
def _mixed(number):  # type: ignore[no-untyped-def]
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB
    return (number ^ (number >> 31)) | 1


@triton.jit  # type: ignore[untyped-decorator]
def _add_block(words, weights, sums, count, columns: tl.constexpr, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    block, column = tl.program_id(0), tl.arange(0, columns)
    first = block.to(tl.int64) * (columns * rows)
    one, other = tl.load(weights + column), tl.load(weights + columns + column)
    step_of_one, step_of_other = tl.load(weights + 2 * columns), tl.load(weights + 2 * columns + 1)
    sum_of_one = tl.zeros([columns], tl.int64)
    sum_of_other = tl.zeros([columns], tl.int64)
    for row in range(rows):
        at = first + row * columns + column
        word = tl.load(words + at, mask=at < count, other=0).to(tl.int64)
        sum_of_one = sum_of_one * step_of_one + word * one
        sum_of_other = sum_of_other * step_of_other + word * other
    key = tl.load(weights + 2 * columns + 2)
    number = (block.to(tl.int64) + key).to(tl.uint64)
    factor_of_one = _mixed(number).to(tl.int64)
    factor_of_other = _mixed(number ^ 0x9E3779B97F4A7C15).to(tl.int64)
    tl.atomic_add(sums, tl.sum(sum_of_one) * factor_of_one)
    tl.atomic_add(sums + 1, tl.sum(sum_of_other) * factor_of_other)


def factors_of(key: int, blocks: int) -> tuple[list[int], list[int]]:
    """Return the factors of the blocks for each of the two sums, as signed 64-bit integers."""

    def mixed(number: int) -> int:
        number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
        number = (number ^ number >> 27) * 0x94D049BB133111EB % (1 << 64)
        number = (number ^ number >> 31) | 1
        return number - (number >> 63 << 64)

    numbers = [(block + key) % (1 << 64) for block in range(blocks)]
    return [mixed(each) for each in numbers], [mixed(each ^ 0x9E3779B97F4A7C15) for each in numbers]


def add_sums(words: Tensor, weights: Tensor, sums: Tensor) -> None:
    """Add the two sums of ``words`` to ``sums``, on the current stream.

    Args:
        words: 32-bit words, on the device.
        weights: two rows of odd 64-bit numbers, then one step for each, and a key.
        sums: two 64-bit integers.
    """
    blocks = triton.cdiv(words.numel(), COLUMNS * ROWS)
    if blocks:
        _add_block[(blocks,)](words, weights, sums, words.numel(), COLUMNS, ROWS)
