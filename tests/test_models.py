"""Models and programs that no one here wrote; `scripts/soak_libraries.py` has more of the latter."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import soak_libraries
import soak_models


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(soak_models.MODELS))
def test_a_training_step_is_equal_to_the_bit(tmp_path, name):
    pytest.importorskip("transformers", reason="needs pip install 'backstash[test-models]'")
    assert soak_models.difference(name, list(soak_models.MIXES), str(tmp_path)) == ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gan", "forces", "lstm"])
def test_a_program_is_equal_to_the_bit(tmp_path, name):
    assert soak_libraries.difference(name, str(tmp_path)) == ""
