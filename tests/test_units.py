import pytest

from backstash.errors import SizeError
from backstash.units import format_bytes, parse_bytes, parse_limit, with_unit


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (0, 0),
        (4096, 4096),
        ("0", 0),
        ("12", 12),
        ("12B", 12),
        ("64KiB", 65536),
        ("64 kib", 65536),
        ("2GB", 2 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("6G", 6 * 2**30),
        ("64k", 65536),
        ("1TiB", 2**40),
    ],
)
def test_sizes_that_can_be_read(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "wrong",
    ["", "GiB", "12 parsecs", "-1", "1e9", "64Q", "٣GiB"[:1] + "x", True, 1.5, None, -1, [1]],
)
def test_what_is_no_size_says_what_is_allowed(wrong):
    with pytest.raises(SizeError, match=r'inflight=.*allowed: an int of bytes.*"512MiB"'):
        parse_bytes(wrong, name="inflight")


@pytest.mark.parametrize("bare", [6, "6", 4095])
def test_a_budget_that_lacks_its_unit_is_refused(bare):
    with pytest.raises(
        SizeError, match=rf'budget={bare!r} is {bare} bytes; with a unit: budget="{bare}GiB"'
    ):
        with_unit(bare, name="budget")


@pytest.mark.parametrize("size", [0, 4096, "1B", "6GiB", "auto", None, True])
def test_other_budgets_pass(size):
    assert with_unit(size, name="budget") is size


def test_none_is_no_limit():
    assert parse_limit(None) is None
    assert parse_limit("1KiB") == 1024


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (15 * 2**20, "15 MiB"),
        (2**40, "1.00 TiB"),
        (5 * 2**50, "5120 TiB"),
    ],
)
def test_format(nbytes, text):
    assert format_bytes(nbytes) == text
