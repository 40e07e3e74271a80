"""Fingerprints of memory, to check whether a storage still has the bytes that left memory.

A write through ``.data``, NumPy, or a tensor with a version counter of its own does not raise the version. So
a storage's version does not identify its bytes. The memory of an evicted block is gone, and only a fingerprint
of it can be compared with the bytes that are saved now.

CPU fingerprints use Python's bytes hash (usually SipHash, Aumasson and Bernstein 2012): 64 bits, with a key
that each process makes unless ``PYTHONHASHSEED`` is set. If the interpreter uses another hash, the fingerprint
is SHA-256, which takes longer.

On an accelerator the memory is read as 32-bit words. Each word is multiplied by an odd 64-bit weight for its
position (multilinear hashing, Carter and Wegman 1979), and the products are arranged in squares. The sums of
each square's rows and columns, modulo 2**64, are the words of the next round, until they fill at most one
square. One changed word changes the sum of its row, since its weight is odd. Two words that changed, or were
swapped, change two rows or two columns. For more changes several random sums would have to agree at once. Each
process makes new weights. The fingerprint is four sums of 64 bits, each with weights of its own. If Triton can
compile a kernel, as in PyTorch's builds for CUDA, a kernel computes it and reads each word once: see
``fingerprint_kernel``.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import sys
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from .._torch.dispatch import without_function_modes

__all__ = ["fingerprint", "kernel", "same_bytes", "sums"]

_SIDE = 180
_WORDS = _SIDE * _SIDE  # in a square; fits a core's own cache
_AT_ONCE = 64  # squares at a time: 16 MiB of products
_SUMS = 4


def _siphash() -> Callable[[int, int], int] | None:
    """Return the interpreter's hash function for ``bytes`` (address, number of bytes), which releases the GIL;
    ``None`` if it is not SipHash."""
    if not sys.hash_info.algorithm.startswith("siphash") or sys.hash_info.hash_bits != 64:
        return None
    try:
        interpreter = ctypes.CDLL(None)  # everything the process has loaded
    except (TypeError, OSError):  # not on this operating system
        return None
    for name in ("Py_HashBuffer", "_Py_HashBytes"):  # since Python 3.14, and before
        found = getattr(interpreter, name, None)
        if found is not None:
            found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_ssize_t), ctypes.c_ssize_t
            return found  # type: ignore[no-any-return]
    return None


_hash = _siphash()


def fingerprint(storage: torch.UntypedStorage, first: int = 0, nbytes: int = -1) -> object:
    """Return a fingerprint of a CPU storage's bytes: equal for equal bytes.

    Args:
        storage: the storage to read.
        first: the offset of the first byte.
        nbytes: how many bytes; -1: all of them.
    """
    if storage.device.type != "cpu":
        raise AssertionError(f"memory of {storage.device}, which is read here")
    if nbytes < 0:
        nbytes = storage.nbytes()
    address = storage.data_ptr() + first
    if _hash is not None:
        return _hash(address, nbytes), nbytes
    memory = (ctypes.c_char * nbytes).from_address(address)
    return hashlib.sha256(memory, usedforsecurity=False).digest()


def sums(storage: torch.UntypedStorage, first: int = 0, nbytes: int = -1) -> Tensor:
    """Return a fingerprint of a storage's bytes as integers on its device. Nothing waits for the result.

    Args:
        storage: the storage to read, on the current stream.
        first: the offset of the first byte, a multiple of 4.
        nbytes: how many bytes; -1: all of them.
    """
    nbytes = storage.nbytes() if nbytes < 0 else nbytes
    with without_function_modes(), torch.no_grad():
        made = kernel(storage.device)
        if isinstance(made, str):
            return _sums(storage, first, nbytes)
        try:
            if torch.cuda.current_device() == storage.device.index:  # as Triton requires
                return _sums_by_kernel(made, storage, first, nbytes)
            with torch.cuda.device(storage.device):
                return _sums_by_kernel(made, storage, first, nbytes)
        except RuntimeError:
            raise
        except Exception as error:  # Triton compiles again for memory with another alignment
            raise RuntimeError(
                f"the fingerprint's kernel: {type(error).__name__}: {error}"
            ) from error


@functools.cache
def kernel(device: torch.device) -> ModuleType | str:
    """Return the kernel for the memory of ``device``, or why there is none."""
    if device.type != "cuda":
        return f"none is made for {device.type}"
    try:
        from . import fingerprint_kernel

        with without_function_modes(), torch.no_grad(), torch.cuda.device(device):
            return (
                fingerprint_kernel
                if _is_right(fingerprint_kernel, device)
                else "it computes other sums"
            )
    except torch.OutOfMemoryError:
        raise  # try again another time
    except Exception as error:  # no Triton, or no compiler for its output
        return f"{type(error).__name__}: {error}".partition("\n")[0]


def _is_right(made: ModuleType, device: torch.device) -> bool:
    """Return whether the kernel gives the same sums as PyTorch's integer operations. The memory is two blocks
    and a part of a third, with two word counts for which Triton compiles different kernels."""
    columns, rows, blocks = made.COLUMNS, made.ROWS, 3
    weights, _ = _kernel_weights(torch.device("cpu"), columns)
    factors = made.factors_of(int(weights[2 * columns + 2]), blocks)
    for count in (2 * columns * rows + columns + 1, 2 * columns * rows + columns + 16):
        words = torch.frombuffer(bytearray(os.urandom(4 * count)), dtype=torch.int32)
        padded = torch.zeros(blocks * columns * rows, dtype=torch.int64, device="cpu")
        padded[:count] = words
        table = padded.view(blocks, rows, columns)
        expected = []
        for which in range(2):
            total = torch.zeros(blocks, columns, dtype=torch.int64, device="cpu")
            for row in range(rows):
                ours = table[:, row] * weights[which * columns : (which + 1) * columns]
                total = total * weights[2 * columns + which] + ours
            expected.append((total.sum(1) * torch.tensor(factors[which], device="cpu")).sum())
        found = torch.zeros(2, dtype=torch.int64, device=device)
        made.add_sums(words.to(device), weights.to(device), found)
        if not torch.equal(found.cpu(), torch.stack(expected)):
            return False
    return True


def _sums_by_kernel(
    made: ModuleType, storage: torch.UntypedStorage, first: int, nbytes: int
) -> Tensor:
    words, rest = _words(storage, first, nbytes)
    weights, factors = _kernel_weights(storage.device, made.COLUMNS)
    both = torch.full((2,), nbytes, dtype=torch.int64, device=storage.device)
    made.add_sums(words, weights, both)
    return both + (rest * factors[: len(rest)]).sum() if len(rest) else both


def _words(storage: torch.UntypedStorage, first: int, nbytes: int) -> tuple[Tensor, Tensor]:
    """Return the 32-bit words, and the bytes after the last one."""
    device = storage.device
    count = nbytes // 4
    words = torch.empty(0, dtype=torch.int32, device=device).set_(
        storage, first // 4, (count,), (1,)
    )
    left = nbytes - count * 4
    rest = torch.empty(0, dtype=torch.uint8, device=device)
    return words, rest.set_(storage, first + count * 4, (left,), (1,)) if left else rest


def _sums(storage: torch.UntypedStorage, first: int, nbytes: int) -> Tensor:
    words, rest = _words(storage, first, nbytes)
    weights, factors = _weights(storage.device)
    while len(words) > _WORDS:
        squares = words[: len(words) // _WORDS * _WORDS].view(-1, _SIDE, _SIDE)
        found = []
        for some in torch.split(squares, _AT_ONCE):
            products = some * weights
            found += [products.sum(1), products.sum(2)]
            del products  # so that the next ones reuse its memory
        more = words[squares.numel() :]
        words = torch.cat([*(each.view(-1).view(torch.int32) for each in found), more])
    last = torch.cat([words, rest.to(torch.int32)])
    return (last.to(torch.int64) * factors[:, : len(last)]).sum(1) + nbytes


def same_bytes(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    """Return whether two CPU storages of one size have equal bytes, in a twentieth of a fingerprint's time."""
    nbytes = one.nbytes()
    dtype = next(
        each for each in (torch.int64, torch.int32, torch.uint8) if not nbytes % each.itemsize
    )
    with without_function_modes(), torch.no_grad():
        first, second = (
            torch.empty(0, dtype=dtype, device="cpu").set_(
                each, 0, (nbytes // dtype.itemsize,), (1,)
            )
            for each in (one, other)
        )
        return torch.equal(first, second)


@functools.cache
def _weights(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the weights of a square's words, and for each sum those of the words that are left."""
    # Not from torch's generator, whose random numbers belong to the program.
    left = _WORDS + 4
    made = torch.frombuffer(
        bytearray(_random_bytes(8 * (_WORDS + _SUMS * left))), dtype=torch.int64
    )
    made = (made | 1).to(device)
    return made[:_WORDS].view(_SIDE, _SIDE), made[_WORDS:].view(_SUMS, left)


@functools.cache
def _kernel_weights(device: torch.device, columns: int) -> tuple[Tensor, Tensor]:
    """Return the weights of the kernel's words, and of the bytes after the last word."""
    made = torch.frombuffer(bytearray(_random_bytes(8 * (2 * columns + 4))), dtype=torch.int64) | 1
    places = torch.tensor([1, 1 << 8, 1 << 16])
    return made[:-1].to(device), (made[-1] * places).to(device)


@functools.cache
def _random_bytes(nbytes: int) -> bytes:
    return os.urandom(nbytes)
