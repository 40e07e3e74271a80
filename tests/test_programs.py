"""Random programs: plain PyTorch's gradients to the bit, or an error only where it raises too.

``BACKSTASH_PROGRAMS=10000 pytest tests/test_programs.py`` tries that many instead of the few of the suite.
"""

import os
from contextlib import nullcontext

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks

from backstash import Disk, Stash, _down
from backstash.testing import Gated, MemoryStore
from oracle import same_bits
from programs import OPERATIONS, Run

PROGRAMS = int(os.environ.get("BACKSTASH_PROGRAMS", "500"))
WAYS = {
    "below": {"inflight": 0},
    "below, one by one": {"inflight": 0},
    "below, no read ahead": {"inflight": 0, "prefetch": 0},
    "on its way": {},
    "on its way, one by one": {
        "prefetch": 0
    },  # a read ahead would queue behind a write that is held
    "some kept": {"keep": "5KiB"},
    "some kept, one by one": {"keep": "5KiB", "prefetch": 0},
    "all kept": {"keep": None},
    "small left": {"min_bytes": "1KiB"},
}
PROGRAM = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 7), st.integers(0, 7)),
    min_size=3,
    max_size=30,
)


def cloned():
    """Every saved tensor's storage cloned, at each end: slow, and true whatever is changed in place."""
    return saved_tensors_hooks(with_its_storage, with_its_storage)


def with_its_storage(tensor):
    storage = tensor.untyped_storage().clone()
    geometry = tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, *geometry)


def run_stashed(steps, store, way):
    with pytest.MonkeyPatch.context() as patch:
        if "one by one" in way:  # written from their own memory, as large blocks are
            patch.setattr(_down, "SMALL_BYTES", 0)
        return run_gated(steps, Gated(store), WAYS[way])


def run_gated(steps, store, options):
    stash = Stash(**{"disk": store, "min_bytes": 0, **options})

    def gate(word):
        if word == "hold" and options.get("inflight") != 0:
            store.writes.clear()
        elif word == "let go":
            store.writes.set()
        else:
            stash.stats()

    run = Run(lambda: stash, gate)
    try:
        return run.run(steps)
    finally:
        run.values.clear()
        # After an error the engine holds the nodes it did not run, until its next backward on this thread.
        torch.ones((), requires_grad=True).backward()
        store.writes.set()
        stash.close()
        left = stash.stats()
        store.close()
        assert (left.blocks, left.keep_bytes, left.inflight_bytes, left.ahead_bytes) == (0, 0, 0, 0)


def judge(steps, make_store):
    plain = Run(nullcontext, lambda word: None).run(steps)
    true = Run(cloned, lambda word: None).run(steps) if plain and plain[-1] == "changed" else plain
    for way in WAYS:
        got = run_stashed(steps, make_store(), way)
        for number, (mine, theirs) in enumerate(zip(got, plain, strict=False)):
            where = f"{way}, result {number}"
            if theirs == "changed":
                # "unsupported": a later node's own error, where plain PyTorch stopped at an earlier one
                raised = isinstance(mine, str) and mine in ("changed", "unsupported operation")
                assert raised or agree(mine, true[number]), where
            elif isinstance(theirs, str):
                assert mine == theirs, where
            else:
                assert not isinstance(mine, str), (
                    f"{where}: {mine} where plain PyTorch does not raise"
                )
                assert all(same_bits(*pair) for pair in zip(mine, theirs, strict=True)), where
        assert len(got) >= len(plain)


def agree(mine, true):
    """The alignment of clones may differ, and so the order of a sum."""
    if isinstance(mine, str) or isinstance(true, str):
        return type(mine) is type(true) and mine == true
    return all(
        (one is None and other is None)
        or torch.allclose(one, other, rtol=1e-9, atol=1e-12, equal_nan=True)
        for one, other in zip(mine, true, strict=True)
    )


@settings(
    max_examples=PROGRAMS,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(PROGRAM)
def test_random_programs(steps):
    judge(steps, MemoryStore)


FOUND = {
    "a whole and its parts": [
        ("sin", 0, 0),
        ("rows", 1, 0),
        ("square", 0, 0),
        ("t", 3, 0),
        ("sin", 0, 0),
    ],
    "changed, then saved again": [
        ("sin", 0, 0),
        ("change detached", 1, 0),
        ("sin", 1, 0),
        ("land", 0, 0),
    ],
    "backward changes what it got": [("own", 0, 0), ("sin", 1, 0), ("backward, kept", 1, 0)],
    "held, changed, let go": [
        ("sin", 0, 0),
        ("hold", 0, 0),
        ("sin", 0, 0),
        ("mul_", 1, 0),
        ("let go", 0, 0),
    ],
    "second order through parts": [
        ("column", 0, 0),
        ("exp", 0, 0),
        ("differentiate", 0, 0),
        ("sin", 0, 0),
    ],
}


@pytest.mark.parametrize("name", FOUND)
def test_programs_by_name(tmp_path, name):
    judge(FOUND[name], lambda: Disk(tmp_path))


def test_the_language_reaches_what_it_is_for():
    """Of a fixed set of programs, enough raise, differentiate twice, and give gradients at all."""
    import random

    rng = random.Random(0)
    raised = gradients = 0
    for _ in range(200):
        steps = [(rng.choice(OPERATIONS), rng.randrange(8), rng.randrange(8)) for _ in range(20)]
        results = Run(nullcontext, lambda word: None).run(steps)
        raised += results[-1:] == ["changed"]
        gradients += any(not isinstance(result, str) for result in results)
    assert raised >= 40 and gradients >= 120
