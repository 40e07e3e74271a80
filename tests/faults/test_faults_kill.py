"""``kill -9`` at random moments; ``scripts/soak_faults.py`` kills a hundred."""

import random

import pytest

from faulty import MIXES, gradients, run_python, wrong_after
from killed import kill_at_random, train
from long_tests import mostly_long, takes_long


@pytest.mark.parametrize(
    "seed, mixes",
    mostly_long([(0, ["disk"]), (1, ["accelerator", "at once"])], (0, ["disk"])),
)
def test_a_killed_process_leaves_nothing_and_the_next_begins_cleanly(tmp_path, seed, mixes):
    assert kill_at_random(random.Random(seed), tmp_path, mixes) == []
    stash = MIXES[mixes[0]](tmp_path)
    gradients(stash)
    assert not wrong_after(stash)


@takes_long
def test_what_a_killed_process_held_is_free_again(tmp_path):
    """On a file system of its own, whose free blocks can be counted."""
    code = """
from killed import *
import ctypes
where = Path(sys.argv[1])
assert os.path.ismount(where)
print(kill_at_random(random.Random(7), where, ["disk", "keep"]))
"""
    (tmp_path / "own").mkdir()
    mount = 'mount -t tmpfs -o size=64m none "$0" && exec "$@"'
    enter = ["unshare", "-m", "sh", "-ec", mount, tmp_path / "own"]
    result = run_python(code, tmp_path / "own", before=enter)
    if "unshare" in result.stderr or "mount" in result.stderr:
        pytest.skip(f"no file system may be mounted here: {result.stderr.strip()}")
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_one_that_is_alive_does_not_mind_the_other_s_death(tmp_path):
    stash = MIXES["disk"](tmp_path)
    with stash:
        loss = gradients_later()
    process = train(tmp_path, "disk")
    process.kill()
    process.communicate()
    assert loss()
    del loss
    assert not wrong_after(stash)


def gradients_later():
    import torch

    from faulty import INPUTS, are_right, forward

    loss = forward()
    return lambda: are_right(torch.autograd.grad(loss, INPUTS, retain_graph=True))
