"""What takes much processor time, and is left out unless it is asked for."""

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

IS_ASKED_FOR = "BACKSTASH_LONG_TESTS" in os.environ
takes_long = pytest.mark.skipif(
    not IS_ASKED_FOR,
    reason="of the kinds of tests that take longest: `scripts/check long` runs it",
)


def mostly_long(values: Iterable[Any], *always: Any) -> Collection[Any]:
    """For ``parametrize``: the values, of which only ``always`` are taken where what takes long is left out."""
    return [
        each
        if each in always
        else pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=takes_long)
        for each in values
    ]
