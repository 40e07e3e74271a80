"""Convert sizes such as ``"8GiB"`` to bytes and back. No other module parses them."""

from __future__ import annotations

import re

from ._text import shown
from .errors import SizeError

__all__ = ["format_bytes", "in_bytes", "parse_bytes", "parse_limit", "with_unit"]

_FACTORS = {
    "": 1,
    "b": 1,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_LEAST_BARE_BYTES = 4096  # a smaller number without a unit is probably a mistake
_ALLOWED = 'an int of bytes, or a string with a unit such as "512MiB", "2GB" or "64KiB"'


def parse_bytes(value: int | str, *, name: str = "size", also: str = "") -> int:
    """Return ``value`` as a count of bytes.

    Args:
        value: an int of bytes, or a string of a number and a unit, in upper or lower case. Units are B, KB, MB,
            GB, TB (powers of 1000) and KiB, MiB, GiB, TiB (powers of 1024); K, M, G and T mean KiB to TiB. A
            string of digits alone is bytes.
        name: the argument's name, for the error message. Default ``"size"``.
        also: what the error message says is allowed in addition.

    Raises:
        SizeError: ``value`` is negative, has an unknown unit, or is not a size; the message lists what is
            allowed.

    >>> parse_bytes("64KiB"), parse_bytes("1.5 MB"), parse_bytes("6G"), parse_bytes(4096)
    (65536, 1500000, 6442450944, 4096)
    """
    allowed = f"{_ALLOWED}{also}"
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise SizeError(f"{name}={value!r} is negative; allowed: {allowed}")
        return value
    match = _PATTERN.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise SizeError(f"{name}={shown(value)} is not a size; allowed: {allowed}")
    number, unit = match.groups()
    factor = _FACTORS.get(unit.lower())
    if factor is None:
        raise SizeError(f"{name}={value!r} has an unknown unit {unit!r}; allowed: {allowed}")
    return round(float(number) * factor) if "." in number else int(number) * factor


def parse_limit(value: int | str | None, *, name: str = "budget", also: str = "") -> int | None:
    """Return ``value`` as a count of bytes, or ``None`` for ``None``, which means no limit.

    Args:
        value: as for :func:`parse_bytes`, or ``None``.
        name: the argument's name, for the error message. Default ``"budget"``.
        also: what the error message says is allowed in addition.

    Raises:
        SizeError: as :func:`parse_bytes`.

    >>> parse_limit(None) is None, parse_limit("1KiB")
    (True, 1024)
    """
    if value is None:
        return None
    return parse_bytes(value, name=name, also=f"{also}, or None for no limit")


def with_unit(value: object, *, name: str) -> object:
    """Return ``value``, a budget of memory, unless it is a bare number that lacks its unit.

    Args:
        value: a size as for :func:`parse_bytes`, ``None``, or a word such as ``"auto"``.
        name: the argument's name, for the error message.

    Raises:
        SizeError: ``value`` is a number of 1 to 4,095 without a unit, which probably lacks one.

    >>> with_unit("6GiB", name="budget"), with_unit(0, name="keep")
    ('6GiB', 0)
    """
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if is_number or (isinstance(value, str) and value.strip().isdigit()):
        nbytes = int(value)  # type: ignore[call-overload]
        if 0 < nbytes < _LEAST_BARE_BYTES:
            raise SizeError(
                f'{name}={value!r} is {nbytes} bytes; with a unit: {name}="{nbytes}GiB"'
            )
    return value


def in_bytes(value: int | str | None) -> int | str | None:
    """Return a count of bytes as a string with its exact unit, which :func:`with_unit` accepts; else ``value``.

    >>> in_bytes(1024), in_bytes(0), in_bytes("auto"), in_bytes(None)
    ('1024B', 0, 'auto', None)
    """
    return f"{value}B" if isinstance(value, int) and value else value


def format_bytes(nbytes: int) -> str:
    """Return ``nbytes`` as text, in the largest unit of 1024 bytes that gives at least 1, with three digits.

    >>> format_bytes(0), format_bytes(1536), format_bytes(128 * 2**20)
    ('0 B', '1.50 KiB', '128 MiB')
    """
    size = float(nbytes)
    units = ["TiB", "GiB", "MiB", "KiB", "B"]
    while abs(size) >= 1024 and len(units) > 1:
        size /= 1024
        units.pop()
    unit = units[-1]
    if unit == "B":
        return f"{nbytes} B"
    return (
        f"{size:.0f} {unit}"
        if abs(size) >= 100
        else f"{size:.3g} {unit}"
        if abs(size) >= 10
        else f"{size:.2f} {unit}"
    )
