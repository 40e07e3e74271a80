"""A few models that no one here wrote; `scripts/soak_models.py` is the long form."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs pip install 'backstash[test-models]'")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import soak_models


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt2", "mixtral", "t5", "swin"])
def test_a_training_step_is_equal_to_the_bit(tmp_path, name):
    assert soak_models.difference(name, list(soak_models.MIXES), str(tmp_path)) == ""
