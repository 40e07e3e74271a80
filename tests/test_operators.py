"""Every second operator that can be differentiated, one sample each, and in the long form of the tests every
one; `scripts/soak_operators.py` takes all samples."""

from itertools import islice

import pytest
import torch

from long_tests import IS_ASKED_FOR, mostly_long, takes_long
from operators import LISTS, Stashes, difference

SLICES = 8
OPERATORS = LISTS["operators"]()[:: 1 if IS_ASKED_FOR else 2]


def findings(operators, directory, dtype, *, second, mixes=("disk",)):
    """What a stash changes, by operator, and how many samples said anything."""
    stashes = Stashes(directory)
    found, said = {}, 0
    for operator in operators:
        if second and not operator.second:
            continue
        for case in islice(operator.cases(dtype), 1):
            texts = difference(case, stashes, mixes, second=second)
            for mix, text in texts.items():
                if text and not text.startswith("plain"):
                    found[operator.name, mix] = text
            said += not any(text.startswith("plain") for text in texts.values())
    stashes.close()
    return found, said


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", mostly_long(range(SLICES), SLICES // 2))
def test_first_gradients(tmp_path, part):
    found, said = findings(OPERATORS[part::SLICES], tmp_path, torch.float64, second=False)
    assert not found
    assert said >= 0.9 * len(OPERATORS[part::SLICES])


@takes_long
@pytest.mark.filterwarnings("ignore")
def test_second_gradients_of_every_tenth(tmp_path):
    found, said = findings(OPERATORS[::10], tmp_path, torch.float64, second=True)
    assert not found
    assert said > 0.04 * len(OPERATORS)


@takes_long
@pytest.mark.filterwarnings("ignore")
def test_complex_gradients_of_every_tenth(tmp_path):
    found, said = findings(OPERATORS[::10], tmp_path, torch.complex64, second=False)
    assert not found
    assert said > 0.025 * len(OPERATORS)


@takes_long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", list(LISTS))
def test_every_list_in_several_mixes(tmp_path, kind):
    mixes = ("keep, disk", "straight", "recomputed", "host, disk")
    found, said = findings(LISTS[kind]()[::20], tmp_path, torch.float64, second=False, mixes=mixes)
    assert not found
    assert said
