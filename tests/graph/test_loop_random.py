"""Loops made at random: all that they give is the plain loop's, to the bit."""

from pathlib import Path

import pytest

from long_tests import mostly_long
from random_loops import differences


@pytest.mark.parametrize("part", mostly_long(range(4), 0, 2))
def test_random_loops(part: int, disk_dir: Path) -> None:
    for seed in range(40 * part, 40 * part + 40):
        assert differences(seed, disk_dir) == [], seed
