"""What takes much processor time, and is left out unless it is asked for."""

import os

import pytest

IS_ASKED_FOR = "BACKSTASH_LONG_TESTS" in os.environ
takes_long = pytest.mark.skipif(
    not IS_ASKED_FOR,
    reason="takes 10 s of processor time or more: `scripts/check long` runs it",
)
