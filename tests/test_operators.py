"""Every operator that can be differentiated, one sample each; `scripts/soak_operators.py` is the long form."""

import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

from backstash import Disk, Stash

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import soak_operators

OPERATORS = soak_operators.operators()
SLICES = 8


def findings(operators, directory, dtype, *, second):
    """What a stash on disk changes, by operator, and how many samples said anything."""
    store = Disk(directory)
    stash = Stash(disk=store, min_bytes=0, inflight=0)
    found, said = {}, 0
    for op in operators:
        if dtype not in op.supported_backward_dtypes("cpu") or (
            second and not op.supports_gradgrad
        ):
            continue
        for sample in islice(soak_operators.samples(op, dtype), 1):
            text = soak_operators.difference(op, sample, stash, second=second)
            said += not text.startswith("plain")
            if text and not text.startswith("plain"):
                found[op.full_name] = text
    stash.close()
    store.close()
    return found, said


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(SLICES))
def test_first_gradients(tmp_path, part):
    found, said = findings(OPERATORS[part::SLICES], tmp_path, torch.float64, second=False)
    assert not found
    assert said >= 0.9 * len(OPERATORS[part::SLICES])


@pytest.mark.filterwarnings("ignore")
def test_second_gradients_of_every_fifth(tmp_path):
    found, said = findings(OPERATORS[::5], tmp_path, torch.float64, second=True)
    assert not found
    assert said > 50


@pytest.mark.filterwarnings("ignore")
def test_complex_gradients_of_every_fifth(tmp_path):
    found, said = findings(OPERATORS[::5], tmp_path, torch.complex64, second=False)
    assert not found
    assert said > 30
