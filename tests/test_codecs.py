"""Codecs: what each takes, how small it makes it, and that a wrong one is found out."""

import pytest
import torch

from backstash.codecs import (
    EXACT,
    BFloat16,
    Bits,
    Chain,
    Codec,
    Constant,
    Encoded,
    FirstOf,
    Float8,
    Int8,
    Narrow,
    TwoValued,
    Zeros,
)
from backstash.errors import UsageError
from backstash.testing import check_codec
from long_tests import mostly_long

ALL = {
    EXACT: {"bool", "float32", "float8_e4m3fn", "complex128", "int64"},
    Constant(): {"float16", "float64", "complex64"},
    Bits(): {"bool"},
    TwoValued(): {"float32", "bfloat16", "complex64"},
    Narrow(): {"int64", "int32", "int16"},
    Zeros(): {"float32", "float64", "complex64"},
    Chain(Narrow(), Zeros()): {"int64"},
    Chain(TwoValued(), Constant()): {"float32"},
    FirstOf(Narrow(), Bits()): {"int64", "bool"},
    BFloat16(): {"float32", "float64", "complex64", "complex128"},
    Float8(): {"float16", "bfloat16", "float32", "float64"},
    Float8(torch.float8_e5m2): {"float16"},
    Int8(): {"float16", "float32"},
    Int8(block=8): {"float32"},
    Chain(BFloat16(), Zeros()): {"float32"},
}


@pytest.mark.parametrize("codec", mostly_long(ALL, *[*ALL][::2]), ids=repr)
def test_a_codec_keeps_its_promises(codec):
    encoded = {name.partition(",")[0] for name in check_codec(codec)}
    assert encoded >= ALL[codec]


def packed_share(codec, values):
    encoded = codec.encode(values)
    assert isinstance(encoded, Encoded), encoded
    return 0.0 if encoded.payload is None else encoded.payload.nbytes / values.nbytes


def test_sizes():
    noise = torch.empty(1 << 20).bernoulli_(0.9).div_(0.9)
    relu = torch.randn(1 << 20).relu()
    assert packed_share(EXACT, noise) == 1 / 32
    assert packed_share(EXACT, noise.bool()) == 1 / 8
    assert packed_share(EXACT, torch.randint(0, 50_000, (1 << 20,))) == 1 / 4
    assert packed_share(EXACT, torch.randint(0, 200, (1 << 20,))) == 1 / 8
    assert packed_share(EXACT, torch.zeros(1 << 20)) == 0
    assert 0.52 < packed_share(EXACT, relu) < 0.54
    assert 0.55 < packed_share(EXACT, relu.bfloat16()) < 0.58
    assert isinstance(EXACT.encode(torch.randn(1 << 20)), str)


def test_nothing_lossy_is_in_the_exact_codecs():
    assert EXACT.exact and all(each.exact for each in EXACT.codecs)
    lossy = [BFloat16(), Float8(), Int8(), Chain(Zeros(), BFloat16()), FirstOf(Bits(), Int8())]
    assert not any(each.exact for each in lossy)


def restored(codec, values):
    encoded = codec.encode(values)
    out = torch.empty_like(values)
    codec.decode(encoded.payload, encoded.recipe, out)
    return out


@pytest.mark.parametrize(
    ("codec", "most"), [(BFloat16(), 2**-8), (Float8(), 2**-4), (Float8(torch.float8_e5m2), 2**-3)]
)
def test_how_lossy_a_float_is(codec, most):
    values = torch.rand(10_000) + 0.5
    error = (restored(codec, values) - values).abs() / values
    assert 0 < error.max() <= most


def test_how_lossy_int8_is():
    values = torch.randn(100, 64) * torch.logspace(-6, 6, 100).unsqueeze(1)
    error = (restored(Int8(64), values.flatten()).view(100, 64) - values).abs().amax(1)
    assert (error <= values.abs().amax(1) / 253).all() and error.min() > 0


@pytest.mark.parametrize("codec", [Float8(), Int8()])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_comes_back_as_nan(codec, value):
    values = torch.randn(256)
    values[7] = value
    assert restored(codec, values).isnan().all()
    values.zero_()
    assert restored(codec, values).eq(0).all()


def test_a_block_of_int8_is_a_multiple_of_8():
    with pytest.raises(UsageError, match="Int8 block=12: allowed is a positive multiple of 8"):
        Int8(12)


class Wrong(Codec):
    """Encodes to half, and says that this is exact."""

    def encode(self, values):
        if values.dtype != torch.float32:
            return "it is not float32"
        return Encoded(values.half())

    def decode(self, payload, recipe, out):
        out.copy_(payload)


class Changing(Wrong):
    exact = False

    def encode(self, values):
        encoded = super().encode(values)
        values.zero_()
        return encoded


class Sharing(Wrong):
    def encode(self, values):
        return Encoded(values[:-1] if values.numel() > 1 else values)

    def decode(self, payload, recipe, out):
        out[:-1] = payload


class ChangingPayload(Wrong):
    exact = False

    def decode(self, payload, recipe, out):
        super().decode(payload.zero_(), recipe, out)


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        (Wrong(), "does not give back the bits of float32"),
        (Changing(), "changed the values"),
        (Sharing(), "in the memory of the values"),
        (ChangingPayload(), "changed the payload"),
    ],
    ids=repr,
)
def test_the_check_finds_a_wrong_codec(codec, message):
    with pytest.raises(AssertionError, match=message):
        check_codec(codec)
