"""Models and programs that no one here wrote; `scripts/soak_libraries.py` has more of the latter."""

import sys
from pathlib import Path

import pytest

from long_tests import takes_long

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import soak_libraries
import soak_models
import soak_trainers


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(soak_models.MODELS))
def test_a_training_step_is_equal_to_the_bit(tmp_path, name):
    pytest.importorskip("transformers", reason="needs pip install 'backstash[test-models]'")
    assert soak_models.difference(name, list(soak_models.MIXES), str(tmp_path)) == ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gan", "forces", "lstm"])
def test_a_program_is_equal_to_the_bit(tmp_path, name):
    assert soak_libraries.difference(name, str(tmp_path)) == ""


@takes_long
@pytest.mark.filterwarnings("ignore")
def test_a_training_loop_comes_to_the_same_weights(tmp_path):
    pytest.importorskip("accelerate", reason="needs pip install 'backstash[test-models]'")
    assert soak_trainers.difference(soak_trainers.SCRIPTS["accelerate"], tmp_path) == ""


DIFFERENT = """
layer = torch.nn.Identity()
layer.p = torch.nn.Parameter(torch.zeros(1) + ("backstash.cli" in sys.modules))
report(layer)
"""


@takes_long
@pytest.mark.parametrize(
    "source, found",
    [("report(torch.nn.Identity())", "run: nothing moved"), (DIFFERENT, "run: differs")],
)
def test_a_training_loop_that_differs_would_be_seen(tmp_path, source, found):
    assert soak_trainers.difference(source, tmp_path) == found
