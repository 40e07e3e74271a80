"""What is saved again has the bytes that it has then, however it was written in between.

A write through ``.data``, NumPy, or a tensor with a version counter of its own raises no version. Plain PyTorch
gives the graph that was made after it the right gradient, and so does a stash; the first graph may be given
the bytes that were saved.
"""

import os
import threading

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from backstash import Stash
from backstash._device import fingerprint as _fingerprint
from backstash._device.fingerprint import fingerprint, same_bytes, sums
from backstash._saved import block as _block
from backstash.errors import InplaceError, StashError
from backstash.testing import Gated, MemoryStore, TwinDevice, stash_on
from oracle import gradients

SIDE = 300  # 720 KB in float64: written by itself


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def by_data(x):
    x.data.copy_(x.flip(0) * 2)


def by_fill(x):
    x.data.fill_(2.0)


def by_numpy(x):
    x.detach().numpy()[...] = 3.0


def one_element(x):
    x.data[-1, 7] = -5.0


def two_swapped(x):
    x.data[[3, -2], [1, 5]] = x.data[[-2, 3], [5, 1]]


def a_sign(x):
    x.data[0, 0] *= -1


def by_another_tensor(x):
    other = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage(), 0, x.shape)
    other.mul_(3)


WRITES = [by_data, by_fill, by_numpy, one_element, two_swapped, a_sign, by_another_tensor]
WAYS = {
    "below": {"inflight": 0},
    "in segments": {"inflight": 0, "min_bytes": 1},
    "on its way": {},
    "kept": {"keep": None},
    "some kept": {"keep": "1MiB"},
}


def program(write, context, side=SIDE):
    """``(second's gradient, what it is given then)`` of a program that writes unseen between two saves."""
    x = leaf(side, side)
    held = torch.randn(side, side, dtype=x.dtype)
    with context():
        first = x * held
        third = first.sin()  # so that what the first has saved may go
        write(held)
        second = x * held
    (grad,) = gradients(second, x)
    return grad, held.clone(), (first, second, third)


@pytest.mark.parametrize("step", ["first step", "later"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("write", WRITES)
def test_a_save_after_an_unseen_write_has_the_bytes_of_now(tmp_path, write, way, step):
    options = dict(WAYS[way])
    side = 60 if way == "in segments" else SIDE
    stash = Stash(disk=tmp_path, **options)
    for _ in range(1 if step == "first step" else 3):
        grad, now, graphs = program(write, lambda: stash, side)
        assert torch.equal(grad, now)
        gradients(graphs[2].sum(), graphs[0])
        del graphs
    stash.close()


def test_what_was_not_written_moves_once(tmp_path):
    """The same memory, three times: in the first step by its fingerprint, in the next it has not left yet."""
    stash = Stash(disk=tmp_path, inflight=0)
    x, held = leaf(SIDE, SIDE), torch.randn(SIDE, SIDE, dtype=torch.float64)
    for step in range(3):
        before = stash.stats()
        with stash:
            outputs = [(x * held).sum() for _ in range(3)]
        after = stash.stats()
        assert after.written_bytes - before.written_bytes == held.nbytes, step
        assert after.deduplicated_bytes - before.deduplicated_bytes == 2 * held.nbytes
        (grad,) = gradients(sum(outputs), x)
        assert torch.equal(grad, held + held + held)
        del outputs
    assert after.moved_again_bytes == 0
    stash.close()


def test_what_was_written_moves_again_and_is_counted(tmp_path):
    stash = Stash(disk=tmp_path, inflight=0)
    _, now, graphs = program(by_fill, lambda: stash)
    assert stash.stats().moved_again_bytes == now.nbytes
    del graphs
    stash.close()


@pytest.mark.parametrize("times", [2, 3])
def test_what_is_expected_again_leaves_after_its_last_save(tmp_path, times):
    stash = Stash(disk=tmp_path, inflight=0)
    x, held = leaf(SIDE, SIDE), torch.randn(SIDE, SIDE, dtype=torch.float64)
    for step in range(2):
        written = stash.stats().written_bytes
        with stash:
            kept = []
            for time in range(times):
                kept.append((x * held).sum())
                x.exp()  # an operation later, what is complete has gone
                gone = stash.stats().written_bytes > written + x.nbytes * (time + 1)
                assert gone == (time == times - 1 or not step), (step, time)
        assert stash.stats().keep_bytes == 0
        gradients(sum(kept), x)
        del kept


def test_a_block_that_is_not_saved_again_goes_when_its_tensor_does(tmp_path):
    """Saved twice in the first step and once in the second."""
    stash = Stash(disk=tmp_path, inflight=0)
    x = leaf(SIDE, SIDE)

    def step(times):
        held = torch.randn(SIDE, SIDE, dtype=torch.float64)
        return sum((x * held).sum() for _ in range(times)), held

    with stash:
        loss, held = step(2)
    gradients(loss, x)
    del loss, held
    with stash:
        loss, held = step(1)
        x.cos()
        assert stash.stats().blocks == 1 and stash.stats().disk_bytes == 0
        expected = held.clone()
        del held
    assert stash.stats().disk_bytes == -(-expected.nbytes // 4096) * 4096
    assert torch.equal(gradients(loss, x)[0], expected)
    del loss
    stash.close()


def test_a_block_that_is_not_saved_again_goes_when_its_tensor_gets_other_memory(tmp_path):
    """Then only the stash has the old one, and a budget would not be kept. No version shows this."""
    stash = Stash(disk=tmp_path, inflight=0)
    x, held = leaf(SIDE, SIDE), torch.randn(SIDE, SIDE, dtype=torch.float64)
    for step in range(2):
        was = held.clone()
        with stash:
            losses = [(x * held).sum()]
            if step == 0:
                losses.append((x * held).sum())
            else:
                written = stash.stats().written_bytes
                held.data = torch.randn(SIDE, SIDE, dtype=torch.float64)
                y = x.exp()  # which goes, too
                assert stash.stats().written_bytes == written + was.nbytes + y.nbytes
        assert torch.equal(gradients(sum(losses), x)[0], was * len(losses))
        del losses
    del y
    stash.close()


def test_a_write_that_was_undone_while_the_bytes_were_copied():
    """The memory has the bytes that left, and the disk may have others: then nobody knows, and says so."""
    store = Gated(MemoryStore())
    stash = Stash(disk=store, prefetch=0)
    x, held = leaf(SIDE, SIDE), torch.ones(SIDE, SIDE, dtype=torch.float64)
    store.writes.clear()
    with stash:
        first = x * held
        third = first.sin()
        held.data.fill_(2.0)
        store.writes.set()
        stash._session.device_tiers[0].evictor.inflight.finish(stash._session.thread_state())
        held.data.fill_(1.0)
        second = x * held
    with pytest.raises(InplaceError, match=r"shape \(300, 300\) that no module saved are unknown"):
        gradients(second, x)
    del first, second, third
    stash.close()


# Slices of what has no gradient.


@pytest.mark.parametrize("pieces", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("min_bytes", [1, "64KiB"])
def test_slices_move_once_each(tmp_path, pieces, min_bytes):
    """Together they are the tensor: whole where the first of them is a quarter or more, else one by one."""
    stash = Stash(disk=tmp_path, inflight=0, min_bytes=min_bytes)
    x = leaf(120 * SIDE // pieces, 8)
    data = torch.randint(-9, 9, (120 * SIDE // pieces * pieces, 8)).double()
    for step in range(3):
        before = stash.stats().written_bytes
        with stash:
            losses = [(x * piece).sum() for piece in data.chunk(pieces)]
        down = stash.stats().written_bytes - before
        # A piece keeps the distance of its first element from an aligned address.
        residues = sum(piece.data_ptr() % 64 for piece in data.chunk(pieces)) if pieces > 4 else 0
        assert down == data.nbytes + residues, step
        (grad,) = gradients(sum(losses), x)
        assert torch.equal(grad, sum(data.chunk(pieces)))
        del losses
    stash.close()


def test_slices_that_are_written_in_between(tmp_path):
    stash = Stash(disk=tmp_path, inflight=0)
    for _ in range(3):
        x, data = leaf(SIDE, SIDE), torch.ones(6 * SIDE, SIDE, dtype=torch.float64)
        with stash:
            outputs = []
            for turn in range(2):
                for number, piece in enumerate(data.chunk(6)):
                    piece.data.fill_(10 * turn + number)
                    outputs.append(x * piece)
        for at, output in enumerate(outputs[6:]):
            assert torch.all(gradients(output, x)[0] == 10 + at)
        del outputs
    stash.close()


# Tensors that are made of others.


@pytest.mark.parametrize("step", [1, 3])
def test_a_part_of_a_subclass_that_is_written_unseen(tmp_path, step):
    stash = Stash(disk=tmp_path, inflight=0)
    for _ in range(step):
        parts = [torch.ones(SIDE, SIDE, dtype=torch.float64) for _ in range(2)]
        x, held = leaf(SIDE, SIDE), TwoTensor(*parts)
        other = TwoTensor(x.detach().clone(), x.detach().clone()).requires_grad_()
        with stash:
            first = other * held
            third = first.sin()
            parts[0].data.fill_(4.0)
            second = other * held
        (grad,) = torch.autograd.grad(second.sum(), other)
        assert torch.all(grad.a == 4.0) and torch.all(grad.b == 1.0)
        del first, second, third
    stash.close()


# On an accelerator.


@pytest.mark.parametrize("write", [None, *WRITES])
def test_an_accelerator_compares_by_itself_and_raises_when_asked(tmp_path, write):
    device = TwinDevice()
    stash = stash_on(device, inflight=0)
    for step in range(3):
        x, held = leaf(SIDE, SIDE), torch.randn(SIDE, SIDE, dtype=torch.float64)
        before = stash.stats().written_bytes
        with stash:
            first = x * held
            third = first.sin()
            if write is not None:
                write(held)
            waits = device.waits
            second = x * held
            assert device.waits == waits
        moved = stash.stats().written_bytes - before
        assert moved == held.nbytes + first.nbytes  # sin's input
        if write is None or step:  # from the second step on it has not left when it is saved again
            assert torch.equal(gradients(second, x)[0], held)
        else:
            with pytest.raises(
                StashError, match=r"shape \(300, 300\) that no module saved are unknown"
            ):
                gradients(second, x)
            with pytest.raises(InplaceError):  # and whenever it is asked
                gradients(second, x)
        gradients(third.sum(), first)
        del first, second, third
    stash.close()


# The fingerprint.


@pytest.fixture(
    params=["the interpreter's hash", "SHA-256", "an accelerator's sums", "a kernel's sums"]
)
def fingerprint_of(request, monkeypatch):
    """One way to fingerprint bytes: of a storage, the first byte and how many, something that has an ``==``."""
    if request.param == "SHA-256":
        monkeypatch.setattr(_fingerprint, "_hash", None)
    elif request.param == "a kernel's sums":
        if os.environ.get("TRITON_INTERPRET") != "1":  # it is read when Triton is imported
            pytest.skip("needs Triton, and TRITON_INTERPRET=1 from the start")
        from backstash._device import fingerprint_kernel

        return lambda storage, first=0, nbytes=-1: _fingerprint._sums_by_kernel(
            fingerprint_kernel, storage, first, storage.nbytes() if nbytes < 0 else nbytes
        ).tolist()
    elif request.param != "the interpreter's hash":
        return lambda *given: sums(*given).tolist()
    else:
        assert _fingerprint._hash is not None
    return fingerprint


@pytest.mark.parametrize("nbytes", [1, 3, 4, 7, 8, 129_599, 129_600, 129_603, 1_000_001])
def test_a_fingerprint_is_of_every_byte_and_of_its_place(nbytes, fingerprint_of):
    raw = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    now = fingerprint_of(raw.untyped_storage())
    assert now == fingerprint_of(raw.clone().untyped_storage())
    for at in {0, nbytes // 2, nbytes - 1}:
        other = raw.clone()
        other[at] += 1
        assert now != fingerprint_of(other.untyped_storage()), at
    moved = raw.roll(1)
    assert torch.equal(raw, moved) or now != fingerprint_of(moved.untyped_storage())
    assert now != fingerprint_of(raw[1:].clone().untyped_storage())
    longer = torch.cat([raw, raw.new_zeros(1)])
    assert now != fingerprint_of(longer.untyped_storage())
    framed = torch.cat([raw.new_ones(8), raw, raw.new_ones(5)]).untyped_storage()
    assert now == fingerprint_of(framed, 8, nbytes)


@pytest.mark.parametrize("value", [0.0, -1.5, 2.5, float("nan")])
def test_a_changed_element_is_detected_wherever_it_is(value, fingerprint_of):
    """A sign is the highest bit of a word: products modulo a power of two are weakest in that."""
    places = range(0, 160_000, 401)
    found = set()
    for at in places:
        x = torch.full((160_000,), 1.5)
        x[at] = value
        found.add(str(fingerprint_of(x.untyped_storage())))
    assert len(found) == len(places)


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton, and TRITON_INTERPRET=1 from the start",
)
def test_a_kernel_that_computes_other_sums_is_refused(monkeypatch):
    from backstash._device import fingerprint_kernel

    assert _fingerprint._is_right(fingerprint_kernel, torch.device("cpu"))
    true = fingerprint_kernel.factors_of
    monkeypatch.setattr(fingerprint_kernel, "factors_of", lambda key, n: true(key + 1, n))
    assert not _fingerprint._is_right(fingerprint_kernel, torch.device("cpu"))


def test_memory_of_another_device_is_not_read_by_the_host():
    storage = torch.empty(64, device="meta").untyped_storage()
    with pytest.raises(AssertionError, match="memory of meta"):
        fingerprint(storage)


def test_permutations_of_rows_and_columns_are_seen(fingerprint_of):
    """Their sums by rows and by columns are all the same."""
    eyes = (torch.eye(180)[torch.randperm(180)] for _ in range(200))
    assert len({str(fingerprint_of(each.untyped_storage())) for each in eyes}) == 200


def test_a_fingerprint_takes_no_random_numbers(fingerprint_of):
    before = torch.get_rng_state()
    _fingerprint._weights.cache_clear(), _fingerprint._random_bytes.cache_clear()
    fingerprint_of(torch.zeros(10).untyped_storage())
    assert torch.equal(before, torch.get_rng_state())


def saved_twice_and_then_once(stash, x, held, second):
    """In the first step twice; in the second once, then ``second()``. ``None``: the context is not left."""
    with stash:
        losses = [(x * held).sum() for _ in range(2)]
    gradients(sum(losses), x)
    del losses
    stash.__enter__()
    loss = (x * held).sum()
    assert stash.stats().keep_bytes == 0  # while its tensor is the program's
    if second is not None:
        second()
        stash.__exit__(None, None, None)
    return loss


def test_a_block_that_another_thread_saves_again_leaves_in_its_turn(tmp_path):
    stash = Stash(disk=tmp_path, inflight=0, keep="1MiB")
    x, held = leaf(SIDE, SIDE), torch.randn(SIDE, SIDE, dtype=torch.float64)
    losses = []

    def save_again():
        with stash:
            losses.append((x * held).sum())

    def second():
        thread = threading.Thread(target=save_again)
        thread.start()
        thread.join()
        assert stash.stats().keep_bytes == held.nbytes

    losses.append(saved_twice_and_then_once(stash, x, held, second))
    stash.set_keep(0)
    with stash:
        x.exp()
    assert stash.stats().keep_bytes == 0
    assert stash.stats().disk_bytes == -(-held.nbytes // 4096) * 4096
    assert torch.equal(gradients(sum(losses), x)[0], held + held)
    del losses[:]
    stash.close()


def test_a_block_that_a_thread_expected_again_and_left_counts_when_the_thread_has_ended(tmp_path):
    stash = Stash(disk=tmp_path, inflight=0, keep="8MiB")
    x, held = leaf(SIDE, SIDE), torch.randn(SIDE, SIDE, dtype=torch.float64)
    losses = []

    def work():
        losses.append(saved_twice_and_then_once(stash, x, held, None))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    with stash:
        y = x.exp()
    assert stash.stats().keep_bytes == held.nbytes + y.nbytes
    stash.set_keep(0)
    with stash:
        x.exp()
    assert stash.stats().keep_bytes == 0
    assert torch.equal(gradients(losses[0], x)[0], held)


def test_a_recording_has_a_save_that_is_expected_again_once(tmp_path):
    stash = Stash(disk=tmp_path, inflight=0)
    x, held = leaf(SIDE, SIDE), torch.randn(SIDE, SIDE, dtype=torch.float64)
    with stash.record() as recording:
        loss = saved_twice_and_then_once(stash, x, held, lambda: None)
    saves = [each for each in recording.events if each.kind == "save"]
    assert len(saves) == 2, recording.events
    gradients(loss, x)


@pytest.mark.parametrize("nbytes", [1, 7, 8, 12, 36, 4096])
def test_two_storages_are_compared_whole(nbytes):
    raw = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
    assert same_bytes(raw.untyped_storage(), raw.clone().untyped_storage())
    for at in {0, nbytes // 2, nbytes - 1}:
        other = raw.clone()
        other[at] ^= 128
        assert not same_bytes(raw.untyped_storage(), other.untyped_storage())


def test_a_part_that_is_saved_again_is_compared_with_the_copy_in_place(monkeypatch):
    """With its bytes, not by a fingerprint; a copy that was written unseen is not given back."""
    whole = torch.randn(8, 4096)
    monkeypatch.setattr(_block, "fingerprint", lambda *_: pytest.fail("it is in place"))
    w = torch.ones(4096, requires_grad=True)
    stash = Stash(min_bytes=0, disk=MemoryStore(), keep=None)
    with stash:
        one, two = w * whole[1], w * whole[1]
    assert stash.stats().deduplicated_bytes == whole[1].nbytes
    (got,) = torch.autograd.grad((one + two).sum(), w)
    assert torch.equal(got, whole[1] * 2)
    with stash:
        one = w * whole[2]
        whole[2].data.zero_()
        two = w * whole[2]
    assert torch.equal(torch.autograd.grad(two.sum(), w)[0], torch.zeros(4096))
