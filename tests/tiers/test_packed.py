"""Packed blocks: gradients, budgets, changes in place, refusals, and what is asked of a user's codec."""

import gc
import shutil
import threading

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from backstash import Action, Stash
from backstash.codecs import EXACT, BFloat16, Codec, Encoded, FirstOf, Zeros
from backstash.errors import InplaceError, StashIOError, UsageError
from backstash.policy import by_module
from backstash.report import draw, saved_report, timeline
from backstash.testing import Failing, MemoryStore, TwinDevice, stash_on


def pack(saved):
    return Action("pack")


class Net(nn.Module):
    """Saves a ReLU's result, a pooling's indices, a dropout's noise, a mask, and what nothing packs."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.dropout = nn.Dropout(0.25)
        self.head = nn.Linear(32 * 16 * 16, 16)

    def forward(self, x):
        x = self.dropout(self.pool(self.conv(x).relu()))
        x = x.masked_fill(x > 1.5, 0.5)
        return self.head(x.flatten(1)).square().mean()


def net_and_input():
    torch.manual_seed(0)
    return Net(), torch.randn(16, 3, 32, 32)


def gradients(net, x, **options):
    torch.manual_seed(1)
    return torch.autograd.grad(net(x), list(net.parameters()), **options)


def are_same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


PLACES = {
    "in memory": {},
    "all kept": {"keep": None},
    "to disk": {"disk": MemoryStore},
    "some kept": {"disk": MemoryStore, "keep": "300KiB"},
    "no windows": {"disk": MemoryStore, "inflight": 0, "prefetch": 0},
    "all saves": {"disk": MemoryStore, "min_bytes": 0},
}


def stash_of(place, **options):
    made = {**PLACES[place], **options}
    if "disk" in made:
        made["disk"] = made["disk"]()
    return Stash(**made)


@pytest.mark.parametrize("place", PLACES)
def test_gradients_are_the_same_and_bytes_fewer(place):
    net, x = net_and_input()
    expected = gradients(net, x)
    stash = stash_of(place, policy=pack)
    for _ in range(2):
        with stash:
            assert are_same(gradients(net, x), expected)
    stats = stash.stats()
    # Not exact: how far a codec gets is up to the values, and these to the machine's kernels.
    assert stats.packed_bytes > 6 << 20 and stats.payload_bytes < 0.5 * stats.packed_bytes
    assert (stats.blocks, stats.keep_bytes, stats.ahead_bytes, stats.disk_bytes) == (0, 0, 0, 0)
    assert "packed" in str(stats)


def test_payloads_count_as_kept_and_stay_within_the_budget():
    net, x = net_and_input()
    stash = Stash(policy=pack, keep="1MiB", disk=MemoryStore(), inflight=0)
    with stash:
        loss = net(x)
        held = stash.stats()
    assert 0 < held.keep_bytes <= held.keep_peak_bytes <= 1 << 20
    # Not exact, as above; what is not packed is written too.
    assert held.written_bytes >= held.payload_bytes - held.keep_bytes
    loss.backward()
    stash.close()


def test_what_a_policy_names_is_packed_and_nothing_else():
    net, x = net_and_input()
    expected = gradients(net, x)
    stash = Stash(policy=by_module({"dropout": Action("pack")}), disk=MemoryStore())
    with stash:
        assert are_same(gradients(net, x), expected)
    assert stash.stats().packed_bytes == 16 * 32 * 16 * 16 * 4
    assert stash.stats().payload_bytes == 16 * 32 * 16 * 16 // 8


@pytest.mark.parametrize("codec", [EXACT, lambda saved: EXACT if saved.module != "pool" else None])
def test_a_stash_takes_a_codec_or_a_callable(codec):
    net, x = net_and_input()
    expected = gradients(net, x)
    stash = Stash(codec=codec, disk=MemoryStore())
    with stash:
        assert are_same(gradients(net, x), expected)
    assert stash.stats().packed_bytes > 1 << 20


def test_an_action_with_a_codec_goes_where_it_says():
    x = torch.randn(1 << 18, requires_grad=True)
    stash = Stash(policy=lambda saved: Action("disk", EXACT), keep=None, disk=MemoryStore())
    with stash:
        loss = x.relu().square().sum()
    loss.backward()
    stats = stash.stats()
    assert stats.packed_bytes == 1 << 20 and stats.written_bytes >= stats.payload_bytes > 0


def test_parameters_buffers_and_small_tensors_are_treated_by_default():
    net, x = net_and_input()
    default, packed = Stash(disk=MemoryStore()), Stash(disk=MemoryStore(), policy=pack)
    for stash in (default, packed):
        with stash:
            net(x).backward()
    left = {name: of for name, of in packed.stats().left.items() if "not packed" not in name}
    assert left == dict(default.stats().left)


def refusals(stash):
    return {
        name.removeprefix("not packed: "): left.nbytes
        for name, left in stash.stats().left.items()
        if name.startswith("not packed: ")
    }


def test_what_cannot_be_packed_is_moved_and_the_reason_counted():
    x = torch.randn(1 << 18, requires_grad=True)
    stash = Stash(policy=pack, disk=MemoryStore())
    with stash:
        loss = x.exp().sum()
    assert stash.stats().written_bytes == 1 << 20
    ((reason, nbytes),) = refusals(stash).items()
    assert "two different elements" in reason and nbytes == 1 << 20
    loss.backward()
    assert torch.equal(x.grad, x.exp())


def test_what_cannot_be_packed_stays_where_nothing_is_below():
    x = torch.randn(1 << 18, requires_grad=True)
    stash = Stash(policy=pack)
    with stash:
        y = x.exp()
        loss = y.sum()
    assert refusals(stash) and stash.stats().keep_bytes == 1 << 20
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(InplaceError):
        loss.backward()


class Recorded(Codec):
    """An exact codec, and what it was asked."""

    def __init__(self, while_encoding=lambda values: None):
        self.encoded = self.decoded = 0
        self.while_encoding = while_encoding

    def encode(self, values):
        self.encoded += 1
        encoded = Zeros().encode(values)
        self.while_encoding(values)
        return encoded

    def decode(self, payload, recipe, out):
        self.decoded += 1
        Zeros().decode(payload, recipe, out)


def test_a_storage_saved_several_times_is_packed_once_and_views_share_it():
    codec = Recorded()
    stash = Stash(codec=codec, disk=MemoryStore())
    x = torch.randn(64, 4096, requires_grad=True)
    with stash:
        y = x.relu()
        q, k = y[:, :2048], y[:, 2048:]
        loss = (q * k).sum() + y.square().sum()
    assert codec.encoded == 1
    saved = [loss.grad_fn.next_functions[0][0].next_functions[0][0]]
    views = (saved[0]._saved_self, saved[0]._saved_other)
    assert views[0].untyped_storage().data_ptr() == views[1].untyped_storage().data_ptr()
    expected = torch.zeros_like(x)
    (expected,) = torch.autograd.grad(
        (x.relu()[:, :2048] * x.relu()[:, 2048:]).sum() + x.relu().square().sum(), x
    )
    loss.backward()
    assert torch.equal(x.grad, expected)


def test_strides_and_alignment_come_back():
    stash = Stash(policy=pack, disk=MemoryStore())
    base = torch.zeros(16 + (1 << 18)).bernoulli_(0.5)
    for offset in range(16):
        x = base[offset : offset + (1 << 18)].view(512, 512).t()
        packed = stash.pack(x)
        stash.stats()
        back = stash.unpack(packed)
        assert back.stride() == x.stride() and torch.equal(back, x)
        assert back.data_ptr() % 64 == x.data_ptr() % 64
        del packed


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.half, torch.complex64])
def test_dtypes_views_and_bits_of_conj_and_neg(dtype):
    stash = Stash(policy=pack, min_bytes=0)
    x = (torch.randn(100, 300) > 0.3).to(dtype)
    kinds = [x, x.t(), x[::3, 1::2], x[50:], x[:, 299], x[7].expand(3, 300)]
    if dtype.is_complex:
        kinds += [x.conj(), x.conj().imag, x.conj().t()[3:]]
    entries = [(stash.pack(each), each) for each in kinds]
    with stash:
        pass
    assert stash.stats().packed_bytes
    for entry, each in entries:
        back = stash.unpack(entry)
        assert torch.equal(back, each) and back.stride() == each.stride()
        assert (back.is_conj(), back.is_neg()) == (each.is_conj(), each.is_neg())


def test_nan_payloads_and_negative_zeros_come_back():
    # So many that the few elements that are looked at first are not all of one kind.
    bits = torch.tensor([0x7FC00001, -0x00400002, 0x7F800001, -0x80000000] + [0] * 9)
    x = bits.to(torch.int32).repeat(30_000).view(torch.float32)
    stash = Stash(policy=pack)
    entry = stash.pack(x)
    with stash:
        pass
    assert stash.stats().packed_bytes == x.nbytes
    assert stash.stats().payload_bytes == 4 * 4 * 30_000 + 13 * 30_000 // 8
    assert torch.equal(stash.unpack(entry).view(torch.int32), x.view(torch.int32))


def test_a_change_in_place_before_it_is_packed_is_detected():
    stash = Stash(policy=pack)
    x = torch.zeros(1 << 18)
    with stash:
        entry = stash.pack(x)  # waits for its operation to end
        x.add_(1)
    with pytest.raises(InplaceError, match=r"\(262144,\)"):
        stash.unpack(entry)
    assert stash.stats().keep_bytes == 0


def test_a_change_in_place_while_it_is_packed_is_detected():
    stash = Stash(codec=Recorded(while_encoding=lambda values: values.add_(1)))
    x = torch.zeros(1 << 18)
    with stash:
        entry = stash.pack(x)
    with pytest.raises(InplaceError):
        stash.unpack(entry)


def test_a_change_in_place_afterwards_does_not_matter():
    stash = Stash(policy=pack, disk=MemoryStore())
    x = torch.randn(1 << 18, requires_grad=True)
    with stash:
        y = x.relu()
        loss = y.square().sum()
        with torch.no_grad():
            z = y.detach()
            expected = 2 * z
            stash.stats()
            z.zero_()
    loss.backward()
    assert torch.equal(x.grad, expected)


def test_saved_again_after_a_change_is_another_block():
    stash = Stash(policy=pack)
    x = torch.randn(1 << 18).relu()
    w = torch.ones(1 << 18, requires_grad=True)
    with stash:
        one = (w * x).sum()
        before = x.clone()
        x.mul_(2)
        two = (w * x).sum()
    assert are_same(torch.autograd.grad(two, w), [before * 2])
    with pytest.raises(InplaceError):  # it waited still when it was changed
        torch.autograd.grad(one, w)


def test_uses_of_a_graph():
    net, x = net_and_input()
    x.requires_grad_()

    def penalty():
        torch.manual_seed(1)
        (g,) = torch.autograd.grad(net(x), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), list(net.parameters()), allow_unused=True)

    expected = [each for each in penalty() if each is not None]
    stash = Stash(policy=pack, disk=MemoryStore())
    with stash:
        found = [each for each in penalty() if each is not None]
        torch.manual_seed(1)
        loss = net(x)
    assert are_same(found, expected)
    first = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    assert are_same(torch.autograd.grad(loss, list(net.parameters())), first)
    assert are_same(first, gradients(net, x))


def test_threads():
    net, x = net_and_input()
    expected = gradients(net, x)
    stash, found = Stash(policy=pack, disk=MemoryStore(), keep="128KiB"), []
    barrier = threading.Barrier(3)

    def work():
        barrier.wait(60)
        for _ in range(3):
            with stash, torch.random.fork_rng():
                pass
            with stash:
                loss = net.pool(net.conv(x).relu()).square().mean()
            found.append(torch.autograd.grad(loss, net.conv.weight)[0])

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (alone,) = torch.autograd.grad(net.pool(net.conv(x).relu()).square().mean(), net.conv.weight)
    assert len(found) == 9 and all(torch.equal(each, alone) for each in found)
    assert expected and stash.stats().blocks == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_with_checkpointing(use_reentrant):
    net, x = net_and_input()
    x.requires_grad_()

    def run():
        torch.manual_seed(1)
        loss = checkpoint(net, x, use_reentrant=use_reentrant)
        loss.backward()
        found = [each.grad for each in net.parameters()]
        net.zero_grad()
        return found

    expected = run()
    with Stash(policy=pack, disk=MemoryStore(), min_bytes=0):
        assert are_same(run(), expected)


def test_autocast():
    net, x = net_and_input()
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(net, x)
        with Stash(policy=pack, disk=MemoryStore()) as stash:
            assert are_same(gradients(net, x), expected)
    assert stash.stats().packed_bytes


class Lying(Codec):
    """Says that it is exact, and is not."""

    def encode(self, values):
        return Encoded(values.half()) if values.dtype == torch.float32 else "it is not float32"

    def decode(self, payload, recipe, out):
        out.copy_(payload)


def test_a_codec_that_is_not_exact_is_found_out():
    net, x = net_and_input()
    expected = gradients(net, x)
    stash = Stash(codec=Lying(), disk=MemoryStore())
    with stash:
        assert are_same(gradients(net, x), expected)
    assert "Lying() does not restore the same bytes" in refusals(stash)


class Sharing(Codec):
    exact = False

    def __init__(self, what):
        self.what = what

    def encode(self, values):
        return self.what(values)

    def decode(self, payload, recipe, out):
        out.zero_()[: payload.numel()] = payload


def test_a_payload_in_the_memory_of_the_values_is_copied():
    x = torch.randn(1 << 18, requires_grad=True)
    with Stash(codec=Sharing(lambda values: Encoded(values[: 1 << 17]))):
        y = x.exp()
        loss = y.sum()
    with torch.no_grad():
        y.zero_()
    loss.backward()
    assert torch.equal(x.grad[: 1 << 17], x.exp()[: 1 << 17])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda values: values.half(), r"returned Tensor; allowed: an Encoded"),
        (lambda values: Encoded(values[:0]), r"has the payload Tensor \(0,\) on cpu; allowed"),
        (lambda values: Encoded(values.to("meta")), "on meta; allowed: a nonempty Tensor on cpu"),
        (lambda values: Encoded([1]), "has the payload list"),
    ],
)
def test_what_a_codec_may_not_return(what, message):
    x = torch.randn(1 << 18, requires_grad=True)
    with pytest.raises(UsageError, match=message), Stash(codec=Sharing(what)):
        x.exp()


def test_what_a_codec_raises_comes_out_of_forward_and_nothing_is_left():
    def fail(values):
        raise ZeroDivisionError("raised by the test")

    x = torch.randn(1 << 18, requires_grad=True)
    stash = Stash(codec=Sharing(fail), disk=MemoryStore())
    with pytest.raises(ZeroDivisionError), stash:
        x.exp()
    assert (stash.stats().blocks, stash.stats().keep_bytes) == (0, 0)


def test_no_memory_to_pack_in():
    def fail(values):
        raise torch.OutOfMemoryError("raised by the test")

    x = torch.randn(1 << 18, requires_grad=True)
    stash = Stash(codec=Sharing(fail), disk=MemoryStore())
    with stash:
        loss = x.exp().sum()
    loss.backward()
    assert refusals(stash) == {"no memory to pack it in": 1 << 20}


def test_no_memory_to_decode_in():
    class Short(Recorded):
        def decode(self, payload, recipe, out):
            if self.decoded == 1:
                self.decoded += 1
                raise torch.OutOfMemoryError("raised by the test")
            super().decode(payload, recipe, out)

    x = torch.randn(1 << 18, requires_grad=True)
    with Stash(codec=Short()):
        loss = x.relu().square().sum()
    loss.backward()
    assert torch.equal(x.grad, 2 * x.relu())


def test_a_read_that_fails_names_the_saved_tensor_and_may_be_tried_again():
    store = Failing(MemoryStore())
    x = torch.randn(512, 1024, requires_grad=True)
    with Stash(policy=pack, disk=store, inflight=0):
        loss = x.relu().square().sum()
    store.on_read = StashIOError(5, "failed by the test")
    with pytest.raises(StashIOError, match=r"float32 tensor of shape \(512, 1024\)") as caught:
        loss.backward()
    assert "uint8" not in str(caught.value)
    store.on_read = None
    loss.backward()
    assert torch.equal(x.grad, 2 * x.relu())


def test_a_lossy_codec_is_used_where_it_is_named():
    x = torch.randn(1 << 18, requires_grad=True)
    with Stash(policy=lambda saved: Action("pack", BFloat16())) as stash:
        loss = x.exp().sum()
    loss.backward()
    assert torch.equal(x.grad, x.detach().exp().bfloat16().float())
    assert stash.stats().payload_bytes == x.nbytes // 2


def test_a_lossy_codec_takes_no_bytes_that_are_no_elements():
    stash = Stash(codec=BFloat16())
    x = torch.empty(1 << 19).as_strided((1 << 18,), (2,)).fill_(1.5)
    w = torch.ones(1 << 18, requires_grad=True)
    with stash:
        loss = (w * x.as_strided((1 << 18,), (2,))).sum()
    reason = "it does not fill its storage, and its codec is lossy"
    assert reason in refusals(stash) and not stash.stats().packed_bytes
    loss.backward()


def test_a_dispatch_mode_of_the_program_sees_nothing_of_it():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seeing(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.randn(1 << 18, requires_grad=True)
    stash = Stash(policy=pack)
    with Seeing() as mode, stash:
        x.relu().square().sum()
    assert not any("aminmax" in each for each in mode.seen)
    assert "a dispatch mode of the program would see it" in refusals(stash)


def test_a_twin_of_an_accelerator():
    net, x = net_and_input()
    expected = gradients(net, x)
    device = TwinDevice(chance=0.5, seed=3)
    stash = stash_on(device, host="16MiB", disk=MemoryStore(), policy=pack)
    with stash:
        assert are_same(gradients(net, x), expected)
    assert stash.stats().packed_bytes and not device.faults
    stash.close()


def test_a_block_that_dies_before_its_payload_is_used_leaves_nothing():
    net, x = net_and_input()
    stash = Stash(policy=pack, disk=MemoryStore(), keep="64KiB")
    with stash:
        loss = net(x)
    del loss
    gc.collect()
    stats = stash.stats()
    assert (stats.blocks, stats.keep_bytes, stats.disk_bytes) == (0, 0, 0)


def test_bad_actions_and_codecs():
    with pytest.raises(UsageError, match="Action codec='bf16': allowed is a Codec, or None"):
        Action("pack", "bf16")
    with pytest.raises(UsageError, match=r'Action\("keep"\) has no codec'):
        Action("keep", EXACT)
    with pytest.raises(
        UsageError,
        match="codec=3: allowed is a Codec, for example",
    ):
        Stash(codec=3)
    x = torch.randn(1 << 18, requires_grad=True)
    with pytest.raises(UsageError, match="or None"), Stash(codec=lambda _: 3):
        x.exp()


def test_the_default_packs_nothing():
    net, x = net_and_input()
    with Stash(disk=MemoryStore()) as stash:
        net(x).backward()
    assert stash.stats().packed_bytes == 0 and "packed" not in str(stash.stats())
    assert FirstOf().encode(x) == ""


def test_a_recording_has_what_was_packed(tmp_path):
    x = torch.randn(1 << 18, requires_grad=True)
    stash = Stash(policy=pack, disk=MemoryStore(), inflight=0)
    with timeline(stash) as line, stash:
        loss = x.relu().square().sum()
        loss.backward()
        del loss
        stash.stats()
    packed = [event for event in line.events if event.kind == "pack"]
    assert [event.nbytes for event in packed] == [stash.stats().payload_bytes]
    kinds = [event.kind for event in line.events if event.block == packed[0].block]
    assert kinds[0] == "save" and kinds.index("pack") < kinds.index("use") and kinds[-1] == "free"
    assert kinds.count("free") == kinds.count("save") == 1
    assert line.saved_peak_bytes == 1 << 20  # without a stash all of it would have been held
    held = sum(move.memory_bytes + move.down_bytes for move in line.lives.moves)
    assert held == 0
    line.to_chrome_trace(tmp_path / "trace.json")
    assert "use" in kinds and (tmp_path / "trace.json").stat().st_size


def test_a_compiled_region_s_tensors_are_packed_too():
    net, x = net_and_input()
    block = torch.compile(nn.Sequential(net.conv, nn.ReLU(), net.pool), backend="aot_eager")
    expected = torch.autograd.grad(block(x).square().sum(), list(net.conv.parameters()))
    stash = Stash(policy=pack, disk=MemoryStore())
    with stash:
        loss = block(x).square().sum()
    assert are_same(torch.autograd.grad(loss, list(net.conv.parameters())), expected)
    assert stash.stats().packed_bytes


def test_where_a_packed_tensor_is_in_reports():
    net, x = net_and_input()
    stash = Stash(policy=pack, disk=MemoryStore())
    with stash, saved_report(net) as report:
        loss = net(x)
    places = {row.module: dict(row.where) for row in report.rows}
    assert "packed" in places["pool"] and "packed" in str(report)
    assert 'Action("pack")' in str(report)
    picture = draw(loss)
    assert "packed" in (picture.to_svg() if shutil.which("dot") else str(picture))
    loss.backward()


@pytest.mark.parametrize("rows", [512, 100])  # of the whole storage, or of a region that is copied
def test_what_one_save_may_round_another_gets_exactly(rows):
    lossy = by_module({"rounded": Action("pack", BFloat16())})
    net = Both()
    x = torch.randn(512, 512, requires_grad=True)
    for order in (["rounded", "exact"], ["exact", "rounded"]):
        stash = Stash(policy=lossy, keep=None, disk=MemoryStore())
        y = x.exp()[:rows]
        with stash:
            losses = {name: net(y, name) for name in order}
        (found,) = torch.autograd.grad(losses["exact"], y)
        assert torch.equal(found, 2 * y)
        assert order == ["exact", "rounded"] or stash.stats().packed_bytes
        stash.close()


class Squares(nn.Module):
    def forward(self, y):
        return y.square().sum()


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.rounded, self.exact = Squares(), Squares()

    def forward(self, y, name):
        return getattr(self, name)(y)


def test_another_dtype_of_what_is_rounded_is_exact():
    stash = Stash(codec=BFloat16(), keep=None)
    x = torch.randn(1 << 18)
    with stash:
        rounded, bits = stash.pack(x), stash.pack(x.view(torch.int32))
    assert torch.equal(stash.unpack(bits), x.view(torch.int32))
    assert torch.equal(stash.unpack(rounded), x.bfloat16().float())


def test_a_subclass_that_one_save_may_round_another_gets_exactly():
    x = TwoTensor(torch.randn(512, 512), torch.randn(512, 512))
    choices = iter([BFloat16(), BFloat16(), None, None])
    stash = Stash(codec=lambda saved: next(choices), keep=None, disk=MemoryStore())
    with stash:
        rounded, exact = stash.pack(x), stash.pack(x)
    assert torch.equal(stash.unpack(exact).a, x.a) and torch.equal(stash.unpack(exact).b, x.b)
    assert torch.equal(stash.unpack(rounded).a, x.a.bfloat16().float())


def test_a_change_in_place_by_the_codec_itself_is_detected():
    """Of a tensor that could be moved as it is: nobody may go on with what the codec made of it."""

    class Zeroing(Recorded):
        def encode(self, values):
            values.zero_()
            return "it is zero now"

    stash = Stash(codec=Zeroing(), keep=None)
    with stash:
        entry = stash.pack(torch.ones(1 << 18))
    with pytest.raises(InplaceError):
        stash.unpack(entry)
