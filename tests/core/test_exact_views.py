"""Views: exact whatever they overlap, their bytes moved once, and one storage again when they come back."""

import contextlib
import itertools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from backstash import Action, Disk, Stash
from backstash._saved.block import Block, Reduction
from backstash._torch.versions import same_counter
from backstash.codecs import EXACT, BFloat16
from backstash.errors import InplaceError, StashIOError, StashWarning
from backstash.stores._file import UnnamedFile
from backstash.testing import Failing, MemoryStore, TwinDevice, stash_on
from oracle import check, gradients, on_disk, same_bits

SIDE = 256
SMALL_READS = 64 << 10  # small blocks are read in units of 4096 bytes


def leaf(*shape, seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_()


class Saves(torch.autograd.Function):
    """Saves exactly the views it is given; backward mixes them all into the gradient."""

    @staticmethod
    def forward(ctx, x, *views):
        ctx.save_for_backward(*views)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        views = ctx.saved_tensors
        total = sum((view * 1.5).abs().sum() for view in views)
        return grad * total, *(None for _ in views)


def saving(make, *shape):
    """A program whose one operation saves the views that ``make`` cuts from one large result."""

    def program():
        x = leaf(*shape or (SIDE, SIDE, 4))
        loss = Saves.apply(x, *make(x.detach() * 2))
        return lambda: gradients(loss, x)

    return program


def windows(x, count, length):
    flat = x.flatten()
    return [flat[i * 1000 : i * 1000 + length] for i in range(count)]


VIEWS = {
    "the same twice": lambda h: (h, h),
    "transposed": lambda h: (h, h.transpose(0, 1), h.permute(2, 0, 1)),
    "viewed": lambda h: (h.view(-1), h.view(SIDE, -1), h.unflatten(0, (2, -1))),
    "chunks": lambda h: h.chunk(4, dim=1),
    "q, k, v": lambda h: h.view(SIDE, 4 * SIDE)[:, : 3 * SIDE].chunk(3, dim=-1),
    "heads of q, k, v": lambda h: [
        part.unflatten(-1, (8, -1)).transpose(0, 1).transpose(-1, -2)
        for part in h.view(SIDE, 4 * SIDE)[:, : 3 * SIDE].chunk(3, dim=-1)
    ],
    "expanded": lambda h: (h[:1].expand(3, SIDE, SIDE, 4), h[..., :1].expand(-1, -1, 7)),
    "expanded column": lambda h: (h.view(SIDE * SIDE, 4)[:, :1].expand(-1, 5),),
    "expanded number": lambda h: (h[3, 4, 1].expand(100, 100),),
    "unfolded": lambda h: (h.view(-1).unfold(0, 7, 3),),
    "unfolded with gaps": lambda h: (h.view(-1)[::50].unfold(0, 3, 1),),
    "patches": lambda h: (h[..., 0].unfold(0, 5, 2).unfold(1, 5, 2),),
    "sliding windows": lambda h: windows(h, 8, 200_000),
    "short windows": lambda h: windows(h, 8, 3_000),
    "overlapping rows": lambda h: (h.as_strided((100, 3, 300), (1000, 1, 2), 17),),
    "as_strided": lambda h: (h.as_strided((10, 20), (3, 40), 5), h.as_strided((2, 2), (9, 1), 99)),
    "rows": lambda h: (h[3], h[5:9], h[-1]),
    "columns": lambda h: (h[:, 3], h[:, 5:9], h[..., -1]),
    "steps": lambda h: (h[::16], h[:, ::16], h[::7, ::5, ::3]),
    "steps of equal length": lambda h: [h.view(-1)[: 90 * step : step] for step in (1, 2, 3)],
    "diagonal": lambda h: (h[..., 0].diagonal(), h[..., 1].diagonal(3)),
    "one number": lambda h: (h[3, 4, 1], h[-1, -1, -1]),
    "part, then whole": lambda h: (h[3], h, h[4]),
    "detached": lambda h: (h, h.detach(), h.detach().t_() if h.dim() == 2 else h.detach()),
    "as other dtypes": lambda h: (
        h,
        h.view(torch.int32),
        h.view(torch.uint8),
        h[:4].view(torch.int16),
    ),
    "as complex": lambda h: (torch.view_as_complex(h.view(SIDE, -1, 2)), h),
    "real and imaginary": lambda h: (
        c := torch.view_as_complex(h.view(SIDE, -1, 2)),
        c.real,
        c.imag,
        c.conj(),
        c.conj().imag,
        c[:5].conj(),
    ),
    "flipped strides": lambda h: (h.permute(2, 1, 0)[1:3, 5:200:3], h.transpose(0, 2)[..., 7]),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_exact(tmp_path, name):
    check(saving(VIEWS[name]), tmp_path)


WHOLE = SIDE * SIDE * 4 * 4
ONE_STORAGE = [
    "the same twice",
    "transposed",
    "viewed",
    "q, k, v",
    "heads of q, k, v",
    "chunks",
    "unfolded",
    "sliding windows",
    "detached",
    "as other dtypes",
    "as complex",
    "real and imaginary",
]


@pytest.mark.parametrize("name", ONE_STORAGE)
def test_views_of_one_storage_move_its_bytes_once_each_way(tmp_path, name):
    stats = on_disk(saving(VIEWS[name]), tmp_path).stats()
    assert stats.written_bytes == stats.read_bytes == stats.eligible_bytes == WHOLE


@pytest.mark.parametrize(
    ("cut", "nbytes"),
    [
        (lambda h: h[3], SIDE * 16),
        (lambda h: h[:, 3], SIDE * 16),
        (lambda h: h[5:9, :, 1], 4 * SIDE * 4),
        (lambda h: h[:99, :, :1].expand(-1, -1, 9), 99 * SIDE * 4),
        (lambda h: h[:9, :9, :1].expand(9, 9, 1000), 81 * 4),
        (lambda h: h.view(-1)[::50].unfold(0, 3, 1)[:9], 501 * 4),
        (lambda h: h[-1, -1, -1], 4),
    ],
    ids=["row", "column", "block", "expanded column", "expanded corner", "windows", "number"],
)
def test_a_small_part_moves_only_what_it_needs(tmp_path, cut, nbytes):
    part_written = on_disk(saving(lambda h: (cut(h),)), tmp_path).stats().written_bytes
    assert part_written == nbytes + residue(cut(torch.empty(SIDE, SIDE, 4)))


def residue(part):
    """Bytes from an aligned address to the first of a part, which keeps its distance to that."""
    return part.data_ptr() % 64


def test_a_small_part_does_not_hold_its_storage(tmp_path):
    with Stash(disk=tmp_path, keep=None, min_bytes=0) as stash:
        x = leaf(SIDE, SIDE, 4)
        loss = Saves.apply(x, (x.detach() * 2)[:, 3])
    assert stash.stats().keep_bytes == SIDE * 16 + 3 * 16
    del loss


def test_the_same_part_seen_in_two_ways_moves_once(tmp_path):
    views = saving(lambda h: (h[:8], h[:8].transpose(0, 1), h[:8].view(-1), h[:8].unsqueeze(2)))
    assert on_disk(views, tmp_path).stats().written_bytes == 8 * SIDE * 16
    columns = saving(lambda h: (h[:, :8], h[:, :8].transpose(0, 1), h[:, :8].expand(2, -1, -1, -1)))
    assert on_disk(columns, tmp_path).stats().written_bytes == 8 * SIDE * 16


def test_parts_that_overlap_never_move_more_than_twice_the_storage(tmp_path):
    many = saving(lambda h: windows(h, 200, 50_000))
    parts = 5 * 50_000 * 4 + 2 * 32  # as many as fit next to the whole; two begin 32 bytes late
    assert on_disk(many, tmp_path).stats().written_bytes == WHOLE + parts <= 2 * WHOLE


def test_parts_of_what_is_held_whole_cost_nothing(tmp_path):
    whole = saving(lambda h: (h, h[3], h[:, 5], h[..., :1].expand(-1, -1, 9)))
    assert on_disk(whole, tmp_path).stats().written_bytes == WHOLE


@pytest.mark.parametrize("options", [{}, {"inflight": 0}, {"keep": None}], ids=str)
def test_views_come_back_with_one_storage(tmp_path, options):
    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, h):
            ctx.save_for_backward(h, h.t(), h[3:], h.detach(), h.view(torch.int32))
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            saved = ctx.saved_tensors
            storages.extend(t.untyped_storage() for t in saved)
            offsets.extend(t.storage_offset() for t in saved)
            strides.extend(t.stride() for t in saved)
            saved[0][0, 0] = 7.0
            seen.extend(t.flatten()[0].item() for t in saved[:2])
            return grad, None

    storages, offsets, strides, seen = [], [], [], []
    x = leaf(SIDE, SIDE)
    with Stash(disk=tmp_path, **options):
        loss = Looks.apply(x, x.detach() * 2).sum()
    loss.backward()
    assert len({storage.data_ptr() for storage in storages}) == 1
    assert len({storage._cdata for storage in storages}) == 1
    assert [offset - offsets[0] for offset in offsets] == [0, 0, 3 * SIDE, 0, 0]
    assert strides == [(SIDE, 1), (1, SIDE), (SIDE, 1), (SIDE, 1), (SIDE, 1)]
    assert seen == [7.0, 7.0]


@pytest.mark.parametrize("offset", [0, 1, 3, 16])
def test_vector_code_gets_the_same_alignment_as_before(tmp_path, offset):
    """Results of matrix libraries may depend on where in a cache line their operands begin."""
    lines = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *views):
            lines.append([view.data_ptr() % 64 for view in views])
            ctx.save_for_backward(*views)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            lines.append([view.data_ptr() % 64 for view in ctx.saved_tensors])
            return grad, *(None for _ in lines[0])

    x = leaf(SIDE, SIDE)
    with Stash(disk=tmp_path, min_bytes=0, inflight=0):
        flat, other = (x.detach() * 2).view(-1), (x.detach() * 3).view(-1)
        views = flat[offset:], other[offset : offset + 90], other[offset + 5 :: 64][:90]
        Looks.apply(x, *views).sum().backward()
    assert lines[0] == lines[1]


def test_a_data_alias_is_not_taken_for_its_origin(tmp_path):
    """``.data`` has the same storage and version, and another counter, which its origin's save ignores."""

    def program():
        x = leaf(SIDE, SIDE)
        h = x * 2
        alias = h.data
        held = x * alias
        alias.mul_(3)  # of h's bytes, unseen by h's counter
        loss = h.sin()
        return lambda: (*gradients(loss, x), held)

    check(program, tmp_path)


def test_data_aliases_saved_at_different_times_are_different_bytes(tmp_path):
    def program():
        x = leaf(SIDE, SIDE)
        h = x.detach() * 2
        first = x * h
        alias = h.data
        second = x * alias
        return lambda: gradients(first + second, x)

    stats = on_disk(program, tmp_path).stats()
    assert stats.written_bytes == 2 * SIDE * SIDE * 4


def test_freed_addresses_do_not_confuse(tmp_path):
    """A storage's address is handed out again as soon as it has gone down."""

    def program():
        x = h = leaf(SIDE, SIDE)
        for _ in range(50):
            h = h.tanh()
        return lambda: gradients(h, x)

    check(program, tmp_path, ["all on disk", "in flight", "keep some"])


def test_attention_moves_each_storage_once(tmp_path):
    weight = leaf(SIDE, 3 * SIDE)

    def program():
        x = leaf(2, 64, SIDE)
        h = x * 2
        q, k, v = (
            part.unflatten(-1, (8, -1)).transpose(1, 2) for part in (h @ weight).chunk(3, -1)
        )
        scores = F.softmax(q @ k.transpose(-1, -2), dim=-1)
        loss = (scores @ v).transpose(1, 2).flatten(-2).sin()
        return lambda: gradients(loss, x, weight)

    check(program, tmp_path)
    stats = on_disk(program, tmp_path).stats()
    assert stats.written_bytes == stats.eligible_bytes
    # Not exact: of a small one, the units of 4096 bytes are read that it lies in.
    assert stats.eligible_bytes <= stats.read_bytes <= stats.eligible_bytes + SMALL_READS


@pytest.mark.parametrize("min_bytes", [0, 8192])  # of what all parts take
@pytest.mark.parametrize("keep", [0, None])
def test_parts_of_one_storage_with_versions_of_their_own_move_once(keep, min_bytes):
    """As the gates of ``nn.LSTMCell`` on the CPU: four tensors, no views, of one storage."""
    x = torch.randn(16, 4 * 32, requires_grad=True)

    def program():
        gates = [each.sigmoid_() for each in (x * 1).unsafe_chunk(4, 1)]
        return torch.stack([each.square().sum() for each in gates]).sum()

    (expected,) = torch.autograd.grad(program(), x)
    stash = Stash(disk=MemoryStore(), keep=keep, min_bytes=min_bytes, inflight=0)
    with stash:
        loss = program()
    assert stash.stats().eligible_bytes == x.nbytes
    (found,) = torch.autograd.grad(loss, x)
    assert same_bits(found, expected)
    stash.close()


def parts_stash(keep):
    return Stash(disk=MemoryStore(), keep=keep, min_bytes=1024, inflight=0)


@pytest.mark.parametrize("keep", [0, None])
@pytest.mark.parametrize("changed", [0, 1])
def test_a_part_that_is_changed_in_place_is_changed_alone(keep, changed):
    """The other parts of its storage are what they were, as in plain PyTorch."""

    def run(stash):
        x = leaf(16, 4 * 32)
        with stash:
            gates = [each.sigmoid_() for each in (x * 1).unsafe_chunk(4, 1)]
            losses = [each.sum() for each in gates]
        with torch.no_grad():
            gates[changed].mul_(2)
        for at, loss in enumerate(losses):
            if at == changed:
                with pytest.raises(RuntimeError, match=r"inplace|in place"):
                    loss.backward(retain_graph=True)
            else:
                loss.backward(retain_graph=True)
        return x.grad

    stash = parts_stash(keep)
    expected, found = run(contextlib.nullcontext()), run(stash)
    assert same_bits(found, expected)
    stash.close()


@pytest.mark.parametrize("keep", [0, None])
def test_a_part_changed_and_saved_again_is_given_back_as_it_was_saved_last(keep):
    def run(stash):
        x = leaf(16, 4 * 32)
        with stash:
            first, *rest = (x * 1).unsafe_chunk(4, 1)
            gates = [first.sigmoid_(), *(each.tanh_() for each in rest)]
            with torch.no_grad():
                first.mul_(2)
            again = (first.detach() * x[:, :32]).sum() + sum(each.sum() for each in gates[1:])
        again.backward()
        return x.grad

    stash = parts_stash(keep)
    assert same_bits(run(stash), run(contextlib.nullcontext()))
    stash.close()


def test_a_part_that_is_changed_before_its_storage_leaves_is_changed_alone():
    x, stash = leaf(16, 4 * 32), parts_stash(None)
    with stash:
        gates = [each.sigmoid_() for each in (x * 1).unsafe_chunk(4, 1)]
        losses = [each.sum() for each in gates]
        with torch.no_grad():
            gates[1].mul_(2)
        stash.set_keep(0)
        _ = (x * 2).square()  # at this save it leaves
    assert stash.stats().written_bytes >= x.nbytes
    with pytest.raises(InplaceError, match="version"):
        losses[1].backward()
    (found,) = torch.autograd.grad(losses[0] + losses[2] + losses[3], x)
    expected = x.detach().sigmoid() * (1 - x.detach().sigmoid())
    expected[:, 32:64] = 0
    torch.testing.assert_close(found, expected)
    stash.close()


def filled_late(stash):
    """A gradient. Two parts go when the program frees them; the others are filled afterwards."""
    x = leaf(16, 4 * 32)
    with stash:
        a, b, c, d = (x * 1).unsafe_chunk(4, 1)
        loss = a.sigmoid_().square().sum() + b.sigmoid_().square().sum()
        del a, b
        for _ in range(4):  # saves at which the stash looks
            loss = loss + (x * 2).square().sum()
        loss = loss + c.tanh_().square().sum() + d.sigmoid_().square().sum()
    loss.backward()
    return x.grad


@pytest.mark.parametrize("keep", [0, None])
def test_parts_that_are_filled_after_their_storage_has_left(keep):
    for _ in range(2):
        stash = parts_stash(keep)
        for _ in range(3):
            assert same_bits(filled_late(stash), filled_late(contextlib.nullcontext()))
        stash.close()


def test_what_is_saved_of_a_part_has_its_version_counter():
    """In place; what was read back is a copy, whose versions are its own."""
    x, stash = leaf(16, 4 * 32), parts_stash(None)
    with stash:
        gates = [each.sigmoid_() for each in (x * 1).unsafe_chunk(4, 1)]
    for each in gates:
        saved = each.grad_fn._saved_result
        assert same_bits(saved, each.detach())
        assert same_counter(saved, each)
        assert not any(same_counter(saved, other) for other in gates if other is not each)
    stash.close()


def test_a_few_parts_of_many_are_copied():
    """So that a large storage is not held for a ninth of it."""
    x, stash = leaf(16, 9 * 32), parts_stash(0)
    with stash:
        gate = (x * 1).unsafe_chunk(9, 1)[4].sigmoid_()
    (found,) = torch.autograd.grad(gate.sum(), x)
    assert stash.stats().eligible_bytes == x.nbytes // 9
    (expected,) = torch.autograd.grad((x * 1).unsafe_chunk(9, 1)[4].sigmoid_().sum(), x)
    assert same_bits(found, expected)
    stash.close()


def test_parts_on_an_accelerator_are_copied():
    """One that is saved after the rest has left would be known to differ in backward only."""
    stash = stash_on(TwinDevice(), host="1MiB", keep=0, min_bytes=1024)
    assert same_bits(filled_late(stash), filled_late(contextlib.nullcontext()))
    stash.close()


def test_a_packed_storage_of_parts_is_shared_by_no_later_save():
    """Another thread may have filled a part after they were encoded, and before their bytes were noted."""
    x = torch.zeros(16, 4 * 32, requires_grad=True)
    stash = parts_stash(None)
    with stash:
        gates = [each.sigmoid_() for each in (x * 1).unsafe_chunk(4, 1)]
        block = gates[0].grad_fn._raw_saved_result.data.block
        block.reduction = Reduction(x.dtype)
        stash._session.device_tiers[0].packer.pack(EXACT, block)
        assert block.where == "packed" and block.mark is None
        loss = gates[0].square().sum()
        assert loss.grad_fn.next_functions[0][0]._raw_saved_self.data.block is not block
    (found,) = torch.autograd.grad(loss + sum(each.sum() for each in gates[1:]), x)
    expected = torch.full((16, 4 * 32), 0.25)
    assert same_bits(found, expected)
    stash.close()


def test_a_part_that_is_rounded_is_rounded_alone():
    stash = Stash(
        disk=MemoryStore(),
        min_bytes=1024,
        policy=lambda saved: Action("pack", codec=BFloat16()) if saved.index % 4 == 1 else None,
    )
    x = leaf(16, 4 * 32)
    with stash:
        gates = [each.sigmoid_() for each in (x * 1).unsafe_chunk(4, 1)]
    for at, each in enumerate(gates):
        assert same_bits(each.grad_fn._saved_result, each.detach()) == (at != 1)
    stash.close()


@pytest.mark.parametrize("action", ["pack", "recompute", "disk"])
def test_parts_that_a_policy_treats_differently(action):
    """One of them is packed, recomputed or sent to disk; it is not given back as part of the others' block."""

    def run(stash):
        x = leaf(16, 4 * 32)
        with stash:
            gates = [each.sigmoid_() for each in (x * 1).unsafe_chunk(4, 1)]
            loss = sum(each.square().sum() for each in gates)
        loss.backward()
        return x.grad

    count = itertools.count()
    stash = Stash(
        disk=MemoryStore(),
        keep=None,
        min_bytes=1024,
        policy=lambda saved: Action(action) if next(count) % 3 == 1 else None,
    )
    for _ in range(3):
        assert same_bits(run(stash), run(contextlib.nullcontext()))
    stash.close()


@pytest.mark.parametrize("keep", [0, "40KiB", None])
@pytest.mark.parametrize("cell", [torch.nn.LSTMCell, torch.nn.GRUCell])
def test_cells_of_the_library(cell, keep):
    torch.manual_seed(0)
    net = cell(32, 32)

    def run(stash):
        torch.manual_seed(1)
        net.zero_grad()
        state, loss = None, 0.0
        with stash:
            for _ in range(4):
                state = net(torch.randn(16, 32), state)
                loss = (
                    loss + (state if isinstance(state, torch.Tensor) else state[0]).square().sum()
                )
        loss.backward()
        return [each.grad.clone() for each in net.parameters()]

    expected, stash = run(contextlib.nullcontext()), parts_stash(keep)
    for _ in range(3):
        assert all(map(same_bits, run(stash), expected))
    stash.close()


def large_parts(x, count=4):
    """Of a storage of 1 MiB, which a worker writes from where it lies."""
    return (x * 1).unsafe_chunk(count, 1)


def test_a_part_that_is_written_between_the_write_and_its_checksum(tmp_path, monkeypatch):
    """A part may be changed in place after its storage has left with the others."""
    weight, changed, write = leaf(256, 256), threading.Event(), UnnamedFile.write

    def held_up(file, address, nbytes, offset):
        write(file, address, nbytes, offset)
        assert changed.wait(30)

    monkeypatch.setattr(UnnamedFile, "write", held_up)
    stash, x = Stash(disk=Disk(tmp_path, verify=True), keep=0, inflight="64MiB"), leaf(256, 4 * 256)
    with stash:
        a, b, _, _ = large_parts(x)
        loss, expected = (a * weight).sum(), a.detach().clone()
        del a
        for _ in range(4):  # saves at which the stash sees that the program has freed it
            (x * 2).square()
        assert stash.stats().inflight_bytes >= x.nbytes
        b.sigmoid_()
        changed.set()
    stash._workers.close()
    stash.stats()  # the write has ended, and its memory is freed
    assert same_bits(torch.autograd.grad(loss, weight)[0], expected)
    del loss
    stash.close()


def test_a_part_that_is_saved_again_and_again_waits_for_the_others():
    """In a first step, of which nothing is known."""
    x, weights = leaf(16, 4 * 32), [leaf(16, 32, seed=seed) for seed in range(5)]
    stash = parts_stash(0)
    with stash:
        a, b, c, d = (x * 1).unsafe_chunk(4, 1)
        loss = sum((a * weight).sum() for weight in weights)
        loss = loss + sum(each.sigmoid_().sum() for each in (b, c, d))
        assert stash.stats().written_bytes == x.nbytes
    assert stash.stats().eligible_bytes == x.nbytes
    found = torch.autograd.grad(loss, weights)
    assert all(same_bits(each, a.detach()) for each in found)
    stash.close()


def test_parts_whose_storage_could_not_leave():
    """It is a copy that stays then: a part that was changed since is not given back from it."""

    def run(stash):
        x = leaf(256, 4 * 256)
        with stash:
            a, b, c, d = large_parts(x)
            loss = a.sigmoid_().square().sum() + b.sigmoid_().square().sum()
            del a, b
            for _ in range(6):
                loss = loss + (x * 2).square().sum()
            if stash is not none:
                stash._workers.close()  # all that was begun has ended
                loss = loss + (x * 3).square().sum()
            else:
                loss = loss + (x * 3).square().sum()
            loss = loss + c.tanh_().square().sum() + d.sigmoid_().square().sum()
        loss.backward()
        return x.grad

    none = contextlib.nullcontext()
    failing = Failing(MemoryStore())
    failing.on_write = StashIOError(5, "the disk broke")
    expected = run(none)
    with pytest.warns(StashWarning):
        stash = Stash(disk=failing, keep=0, inflight="64MiB")
        found = run(stash)
    assert same_bits(found, expected)
    stash.close()


def could_not_leave(x):
    """A stash with parts whose storage is a copy now, since the disk broke; and these."""
    failing = Failing(MemoryStore())
    failing.on_write = StashIOError(5, "the disk broke")
    stash = Stash(disk=failing, keep=0, inflight="64MiB")
    with pytest.warns(StashWarning), stash:
        gates = [each.sigmoid_() for each in large_parts(x)]
        stash._workers.close()
        (x * 3).square()
    return stash, gates


def test_a_copy_that_a_backward_has_changed_is_not_shared():
    """The tensor itself is what it was, and is saved once more at its new version."""
    stash, (gate, *_) = could_not_leave(leaf(256, 4 * 256))
    before = gate.detach().clone()
    with torch.no_grad():
        gate.grad_fn._saved_result.zero_()  # as a custom backward may
    assert same_bits(gate.detach(), before) and gate._version > 1
    with stash:
        loss = gate.square().sum()
    assert same_bits(torch.autograd.grad(loss, gate)[0], 2 * before)
    stash.close()


def test_parts_that_no_copy_can_be_made_of_stay(monkeypatch):
    monkeypatch.setattr(Block, "copy_out", lambda block: False)
    x, stash = leaf(256, 4 * 256), Stash(disk=MemoryStore(), keep=0)
    with stash:
        loss = sum(each.sigmoid_().sum() for each in large_parts(x))
        (x * 3).square()
    assert stash.stats().keep_bytes >= x.nbytes
    (expected,) = torch.autograd.grad(x.sigmoid().sum(), x)
    assert same_bits(torch.autograd.grad(loss, x)[0], expected)
    stash.close()


def test_no_mode_of_the_program_sees_that_parts_are_copied():
    seen = []

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    stash, x = Stash(disk=MemoryStore(), keep=0, inflight=0), leaf(256, 4 * 256)
    with Sees(), stash:
        gates = [each.sigmoid_() for each in large_parts(x)]
        (x * 3).square()
    assert stash.stats().written_bytes >= x.nbytes
    assert torch.ops.aten.sigmoid_.default in seen and torch.ops.aten.clone.default not in seen
    del gates
    stash.close()
