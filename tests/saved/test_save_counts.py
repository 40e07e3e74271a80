"""How often a block's memory is saved is learnt by the number of the block among those of its module."""

from types import SimpleNamespace

from backstash._saved import save_counts
from backstash._saved.save_counts import BlockSaves, SaveCounts


def block(module="(Layer)"):
    return SimpleNamespace(saves=BlockSaves(), cleanup=SimpleNamespace(module=module))


def test_modules_that_the_program_calls_itself_have_histories_of_their_own():
    """Their paths are the same. Where one of them saves fewer blocks than before, the next one's stay known."""
    counts = SaveCounts()
    for root, of_blocks in ((1, (2, 2)), (2, (1, 3))):
        for saves in of_blocks:
            each = block()
            counts.begin(each, 1, root)
            for _ in range(saves - 1):
                counts.again(each)
    found = []
    for _ in range(2):  # in this pass the first module saves nothing
        found.append(block())
        counts.begin(found[-1], 2, 2)
    assert [each.saves.expected for each in found] == [1, 3]


def test_histories_of_modules_that_come_and_go_do_not_grow_without_end(monkeypatch):
    monkeypatch.setattr(save_counts, "_MOST_MODULES", 8)
    counts = SaveCounts()
    for at in range(100):
        counts.begin(block(), at, at)
    assert len(counts._histories) <= 9
