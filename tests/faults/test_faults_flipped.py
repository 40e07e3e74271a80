"""Bytes that change on disk: ``verify=True`` reports it, whatever reads them, and reports nothing else."""

import os

import pytest
import torch

from backstash import Disk, Stash
from backstash.errors import InplaceError, StashCorruptError
from faulty import INPUTS, are_right, forward, wrong_after
from long_tests import mostly_long


class Net(torch.nn.Module):
    def forward(self, inputs):
        return forward(inputs)


def held(directory, *, verify=True, prefetch="8MiB"):
    """A stash with a graph whose bytes are all on disk, and that graph."""
    stash = Stash(disk=Disk(directory, verify=verify), min_bytes=64, inflight=0, prefetch=prefetch)
    net = Net()
    with stash:
        loss = net(INPUTS)
    stash._workers.close()
    with stash:
        pass
    return stash, loss


def flip(disk, offset):
    file = os.open(f"/proc/self/fd/{disk._file.fd}", os.O_RDWR)
    try:
        (byte,) = os.pread(file, 1, offset)
        os.pwrite(file, bytes([byte ^ 0x10]), offset)
    finally:
        os.close(file)


def extents(stash):
    """Of each slot on disk: its offset and how many bytes of the file are its own."""
    disk = stash._store
    slots = {ref().offset: ref() for ref in disk._file.leases._lent.values()}
    return [
        (offset, slot.nbytes - len(slot.head) - len(slot.tail))
        for offset, slot in sorted(slots.items())
    ]


@pytest.mark.parametrize("prefetch", mostly_long([0, "8MiB"], "8MiB"))
def test_a_flipped_byte_of_any_block_is_reported_with_what_it_belongs_to(tmp_path, prefetch):
    stash, loss = held(tmp_path, prefetch=prefetch)
    other = held_by(stash)
    mine = extents(stash)
    assert len(mine) > 4
    raised = 0
    for offset, nbytes in mine:
        for at in {offset, offset + nbytes // 2, offset + nbytes - 1}:
            flip(stash._store, at)
            for each in (loss, other):
                # What a retained graph has read would not be read again.
                stash._session.device_tiers[0].prefetcher.free()
                try:
                    assert are_right(torch.autograd.grad(each, INPUTS, retain_graph=True))
                except StashCorruptError as error:
                    raised += 1
                    text = str(error)
                    assert "not what was written" in text and str(tmp_path) in text
                    assert "(Net)" in text and "float32" in text, text
            flip(stash._store, at)  # as it was: nothing was lost by the error
    # What was read ahead by a backward that failed is not read again by the next one.
    assert raised == 3 * len(mine) if prefetch == 0 else raised > len(mine)
    for each in (loss, other):
        assert are_right(torch.autograd.grad(each, INPUTS))
    del loss, other, each
    assert not wrong_after(stash)


def held_by(stash):
    net = Net()
    with stash:
        loss = net(INPUTS)
    with stash:
        pass
    return loss


def test_what_lies_between_the_blocks_is_nobody_s(tmp_path):
    stash, loss = held(tmp_path)
    for offset, nbytes in extents(stash):
        for at in range(offset + nbytes, offset + -(-nbytes // 4096) * 4096, 512):
            flip(stash._store, at)
    assert are_right(torch.autograd.grad(loss, INPUTS))
    del loss
    assert not wrong_after(stash)


def test_without_verify_a_flipped_byte_is_a_wrong_gradient_as_the_docs_say(tmp_path):
    stash, loss = held(tmp_path, verify=False, prefetch=0)
    outcomes = []
    for offset, nbytes in extents(stash):
        flip(stash._store, offset + nbytes // 2)
        try:
            outcomes.append(are_right(torch.autograd.grad(loss, INPUTS, retain_graph=True)))
        except (
            InplaceError
        ) as error:  # what was saved again is compared with what was then in memory
            assert "Disk(verify=True) detects this" in str(error)
        flip(stash._store, offset + nbytes // 2)
    assert False in outcomes
    del loss
    assert "is not detected, and gradients are wrong" in " ".join(Disk.__doc__.split())
    assert not wrong_after(stash)
