"""A fingerprint of memory, by which a storage that is saved again is known to have the bytes that left.

A write through ``.data``, NumPy or a tensor with a version counter of its own raises no version, so a storage's
version does not tell what its bytes are. The memory of a block that has left is gone, and nothing but what was
noted of it can be compared with what is saved now.

The memory of the CPU is hashed as Python hashes bytes: SipHash (Aumasson and Bernstein 2012), of 64 bits, with
a key that each process makes unless ``PYTHONHASHSEED`` is set. Where the interpreter has another hash it is the
SHA-256, which takes longer.

On an accelerator the memory is read as words of 32 bits, each times an odd weight of 64 bits that its place
gives it (multilinear hashing, Carter and Wegman 1979), and the products are laid out in squares. What is taken
on are the sums of each square's rows and columns, modulo 2**64; these are words again, until they fill no more
than one square. One word that changed changes its row's sum, since its weight is odd; of two that changed, or
changed places, two rows or two columns tell; more must agree in several random sums at once. The weights are
made anew in each process. What is left is four sums of 64 bits, each with weights of its own. Where Triton can
make a kernel for it, as in PyTorch's builds for CUDA, that reads each word once: see ``fingerprint_kernel``.
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
_WORDS = _SIDE * _SIDE  # of a square: in a core's own cache
_AT_ONCE = 64  # squares: 16 MiB of products
_SUMS = 4


def _siphash() -> Callable[[int, int], int] | None:
    """The hash of the interpreter's ``bytes``, of an address and a number of bytes; other threads go on.
    ``None``: it has another."""
    if not sys.hash_info.algorithm.startswith("siphash") or sys.hash_info.hash_bits != 64:
        return None
    try:
        interpreter = ctypes.CDLL(None)  # all that the process has loaded
    except (TypeError, OSError):  # another system's
        return None
    for name in ("Py_HashBuffer", "_Py_HashBytes"):  # of Python 3.14, and of those before
        found = getattr(interpreter, name, None)
        if found is not None:
            found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_ssize_t), ctypes.c_ssize_t
            return found  # type: ignore[no-any-return]
    return None


_hash = _siphash()


def fingerprint(storage: torch.UntypedStorage, first: int = 0, nbytes: int = -1) -> object:
    """What tells the bytes of a storage of the CPU: equal for equal bytes.

    Args:
        storage: whose memory is read.
        first: of the bytes.
        nbytes: how many; -1: all of them.
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
    """Integers on the storage's device that tell its bytes, whatever they mean; nothing waits for them.

    Args:
        storage: whose memory is read, on the current stream.
        first: of the bytes, a multiple of 4.
        nbytes: how many; -1: all of them.
    """
    nbytes = storage.nbytes() if nbytes < 0 else nbytes
    with without_function_modes(), torch.no_grad():
        made = kernel(storage.device)
        if isinstance(made, str):
            return _sums(storage, first, nbytes)
        try:
            if torch.cuda.current_device() == storage.device.index:  # Triton asks for it
                return _sums_by_kernel(made, storage, first, nbytes)
            with torch.cuda.device(storage.device):
                return _sums_by_kernel(made, storage, first, nbytes)
        except RuntimeError:
            raise
        except Exception as error:  # it is compiled once more for memory that is aligned otherwise
            raise RuntimeError(
                f"the fingerprint's kernel: {type(error).__name__}: {error}"
            ) from error


@functools.cache
def kernel(device: torch.device) -> ModuleType | str:
    """The kernel for the memory of ``device``, or why it has none."""
    if device.type != "cuda":
        return f"none is made for {device.type}"
    try:
        from . import fingerprint_kernel

        with without_function_modes(), torch.no_grad(), torch.cuda.device(device):
            return (
                fingerprint_kernel
                if _is_right(fingerprint_kernel, device)
                else "it tells other sums"
            )
    except torch.OutOfMemoryError:
        raise  # another time
    except Exception as error:  # no Triton, or no compiler for what it makes
        return f"{type(error).__name__}: {error}".partition("\n")[0]


def _is_right(made: ModuleType, device: torch.device) -> bool:
    """Whether the kernel tells of some memory what PyTorch's integers do: of two blocks and a part of a third,
    with a number of words for which Triton makes one kernel, and with one for which it makes another."""
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
        told = torch.zeros(2, dtype=torch.int64, device=device)
        made.add_sums(words.to(device), weights.to(device), told)
        if not torch.equal(told.cpu(), torch.stack(expected)):
            return False
    return True


def _sums_by_kernel(
    made: ModuleType, storage: torch.UntypedStorage, first: int, nbytes: int
) -> Tensor:
    words, rest = _words(storage, first, nbytes)
    weights, factors = _kernel_weights(storage.device, made.COLUMNS)
    told = torch.full((2,), nbytes, dtype=torch.int64, device=storage.device)
    made.add_sums(words, weights, told)
    return told + (rest * factors[: len(rest)]).sum() if len(rest) else told


def _words(storage: torch.UntypedStorage, first: int, nbytes: int) -> tuple[Tensor, Tensor]:
    """Of 32 bits, and the bytes after the last."""
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
            del products  # its memory is the next ones'
        more = words[squares.numel() :]
        words = torch.cat([*(each.view(-1).view(torch.int32) for each in found), more])
    told = torch.cat([words, rest.to(torch.int32)])
    return (told.to(torch.int64) * factors[:, : len(told)]).sum(1) + nbytes


def same_bytes(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    """Whether two storages of the CPU of one size have the same bytes; a twentieth of a fingerprint's time."""
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
    """Of a square's words, and of the words that are left, for each of the sums."""
    # Not from torch's generator: a program's random numbers are its own.
    left = _WORDS + 4
    made = torch.frombuffer(
        bytearray(_random_bytes(8 * (_WORDS + _SUMS * left))), dtype=torch.int64
    )
    made = (made | 1).to(device)
    return made[:_WORDS].view(_SIDE, _SIDE), made[_WORDS:].view(_SUMS, left)


@functools.cache
def _kernel_weights(device: torch.device, columns: int) -> tuple[Tensor, Tensor]:
    """Of the kernel's words, and of the bytes after the last."""
    made = torch.frombuffer(bytearray(_random_bytes(8 * (2 * columns + 4))), dtype=torch.int64) | 1
    places = torch.tensor([1, 1 << 8, 1 << 16])
    return made[:-1].to(device), (made[-1] * places).to(device)


@functools.cache
def _random_bytes(nbytes: int) -> bytes:
    return os.urandom(nbytes)
