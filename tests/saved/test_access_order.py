"""Forward passes by themselves: how blocks are numbered, what is expected after one, and what is learnt."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from backstash import Stash
from backstash._saved import access_order as _access_order
from backstash._saved.access_order import AccessPredictor
from backstash.testing import MemoryStore


class Piece:
    """As much of a block as a predictor looks at."""

    def __init__(self):
        self.cleanup = SimpleNamespace(serial=-1)


def pieces(predictor, count):
    made = [Piece() for _ in range(count)]
    for each in made:
        predictor.add(each)
    return made


def use(predictor, among, *indices):
    for index in indices:
        predictor.use(among[index])


def expected(block, among):
    """Where in ``among`` those are that are expected after ``block``; ``None`` for a dead one."""
    found = (ref() for ref in block.forward_pass.successors(block.index))
    return [None if each is None else among.index(each) for each in found]


def test_blocks_are_numbered_in_their_pass_and_of_all():
    predictor = AccessPredictor()
    assert predictor.passes == 0
    first = pieces(predictor, 3)
    assert (predictor.passes, first[0].forward_pass.seen) == (1, b"")
    use(predictor, first, 2)
    assert first[0].forward_pass.seen == bytes([0, 0, 1])
    second = pieces(predictor, 2)
    assert [each.index for each in first + second] == [0, 1, 2, 0, 1]
    assert [each.cleanup.serial for each in first + second] == [0, 1, 2, 3, 4]
    assert (
        first[0].forward_pass is not second[0].forward_pass is second[1].forward_pass
        and predictor.passes == 2
    )


def test_the_first_guess_is_the_reverse_of_the_saves():
    predictor = AccessPredictor()
    made = pieces(predictor, 100)
    use(predictor, made, 99)
    assert expected(made[99], made) == list(range(98, 34, -1))  # 64 of them
    assert expected(made[2], made) == [1, 0]
    assert expected(made[0], made) == []


def test_after_a_pass_comes_the_one_before_it_and_none_before_that():
    predictor = AccessPredictor()
    oldest = pieces(predictor, 2)
    use(predictor, oldest, 1)
    earlier = pieces(predictor, 70)
    use(predictor, earlier, 69)
    made = pieces(predictor, 3)
    assert expected(made[1], made[:1] + earlier) == [0, *range(70, 6, -1)]


def test_the_dead_are_seen_to_be_dead_and_a_dead_pass_is_passed_over():
    predictor = AccessPredictor()
    earlier = pieces(predictor, 2)
    use(predictor, earlier, 1)
    made = pieces(predictor, 4)
    newest = made.pop()
    del made[1]
    assert expected(newest, made + earlier) == [1, None, 0, 3, 2]
    del earlier
    assert expected(newest, made) == [1, None, 0]


def test_the_order_of_use_is_learnt_by_a_pass_of_as_many():
    predictor = AccessPredictor()
    first = pieces(predictor, 4)
    use(predictor, first, 1, 3, 1, 0)  # the second use of one says nothing, and 2 was not used
    second = pieces(predictor, 4)
    use(predictor, second, 1)
    assert expected(second[1], first + second)[:2] == [4 + 3, 4 + 0]
    assert expected(second[0], first + second)[:1] == [3]  # nothing followed it: the pass before
    assert expected(second[2], first + second)[:2] == [4 + 1, 4 + 0]  # not used: by the saves
    use(predictor, second, 3)
    third = pieces(predictor, 5)
    use(predictor, third, 4)
    assert expected(third[4], third + second)[:4] == [3, 2, 1, 0]  # of another size: nothing learnt


def test_what_is_learnt_is_looked_up_once_when_backward_begins():
    predictor = AccessPredictor()
    first = pieces(predictor, 3)
    use(predictor, first, 0, 1, 2)
    second = pieces(predictor, 3)
    assert second[0].forward_pass.learned is None
    use(predictor, second, 0)
    learned = second[0].forward_pass.learned
    assert list(learned.order) == [0, 1, 2]
    predictor._learned.clear()
    use(predictor, second, 2)
    assert second[0].forward_pass.learned is learned


def test_of_what_is_learnt_64_steps_are_expected():
    predictor = AccessPredictor()
    first = pieces(predictor, 100)
    use(predictor, first, *range(100))
    second = pieces(predictor, 100)
    use(predictor, second, 0)
    assert expected(second[10], second + first)[:65] == [*range(11, 75), 100 + 99]


def test_the_latest_of_as_many_is_believed():
    predictor, made = AccessPredictor(), []
    for steps in ([0, 1, 2], [2, 0, 1]):
        made += pieces(predictor, 3)
        use(predictor, made[-3:], *steps)
    last = pieces(predictor, 3)
    use(predictor, last, 2)
    assert expected(last[2], last + made)[:2] == [0, 1]


def finished(predictor, size):
    made = pieces(predictor, size)
    use(predictor, made, *range(size))
    return made


def known(predictor):
    return list(predictor._learned)


def test_eight_passes_are_remembered_the_latest_ones():
    predictor = AccessPredictor()
    for size in [*range(1, 9), 1, 9]:
        finished(predictor, size)
    pieces(predictor, 1)
    assert known(predictor) == [3, 4, 5, 6, 7, 8, 1, 9]


def test_so_many_blocks_are_remembered_and_the_last_pass_however_large(monkeypatch):
    monkeypatch.setattr(_access_order, "_REMEMBERED_BLOCKS", 10)
    predictor = AccessPredictor()
    for size in (3, 5, 2):
        finished(predictor, size)
    pieces(predictor, 1)
    assert known(predictor) == [3, 5, 2]  # as many as may be
    predictor = AccessPredictor()
    for size in (3, 5, 2, 4):
        finished(predictor, size)
    pieces(predictor, 1)
    assert known(predictor) == [2, 4]
    predictor = AccessPredictor()
    for size in (3, 20):
        finished(predictor, size)
    pieces(predictor, 1)
    assert known(predictor) == [20]


def test_where_no_block_is_alive_the_next_pass_has_none_before_it():
    predictor = AccessPredictor()
    made = finished(predictor, 2)
    predictor.forget()
    assert known(predictor) == [2]
    after = pieces(predictor, 1)
    assert (
        after[0].forward_pass is not made[0].forward_pass and after[0].forward_pass.previous is None
    )
    assert predictor.passes == 2 and after[0].cleanup.serial == 2
    predictor.forget()
    assert known(predictor) == [2]  # nobody wanted that one
    last = pieces(predictor, 1)
    assert (
        last[0].forward_pass is not after[0].forward_pass
        and last[0].index == 0
        and predictor.passes == 3
    )
    predictor.forget()
    empty = predictor._current
    predictor.forget()
    assert predictor._current is empty


@pytest.mark.parametrize("alive", [0, 600, 1024])
def test_a_pass_that_never_ends_forgets_its_dead(alive):
    predictor = AccessPredictor()
    made = pieces(predictor, 1024)
    in_pass = made[0].forward_pass
    del made[: 1024 - alive]
    assert len(in_pass.blocks) == 1024
    made += pieces(predictor, 1)
    assert len(in_pass.blocks) == alive + 1
    assert [each.index for each in made] == list(range(alive + 1))
    assert in_pass.sweep_at == max(1024, 2 * alive)
    assert [ref() for ref in in_pass.blocks] == made


def test_the_dead_of_a_small_pass_are_not_looked_for():
    predictor = AccessPredictor()
    made = pieces(predictor, 1023)
    del made[:1000]
    made += pieces(predictor, 1)
    assert len(made[0].forward_pass.blocks) == 1024 and made[-1].index == 1023


def test_what_a_finalizer_adds_while_the_dead_are_looked_for_is_kept():
    predictor = AccessPredictor()
    made = pieces(predictor, 1024)
    in_pass = made[0].forward_pass
    later = Piece()

    class Late:
        def __call__(self):
            if later not in made:
                made.append(later)
                predictor.add(later)
            return made[0]

    in_pass.blocks[0] = Late()
    made.insert(1024, last := Piece())
    predictor.add(last)
    assert [ref() for ref in in_pass.blocks][-2:] == [later, last]


def grow(in_pass, piece):
    """A pass gets one more block although backward has begun on it."""
    piece.forward_pass, piece.index = in_pass, len(in_pass.blocks)
    in_pass.blocks.append(weakref.ref(piece))
    return piece


def test_a_use_of_a_pass_that_has_grown_since():
    predictor = AccessPredictor()
    made = pieces(predictor, 1)
    use(predictor, made, 0)
    in_pass = made[0].forward_pass
    made += [grow(in_pass, Piece()) for _ in range(2)]
    use(predictor, made, 2, 0)
    assert list(in_pass.used) == [0, 2]
    assert (list(in_pass.history().order), list(in_pass.history().place)) == ([0, 2], [0, -1, 1])


def test_a_history_of_a_pass_that_has_grown_since():
    predictor = AccessPredictor()
    finished(predictor, 2)
    made = pieces(predictor, 2)
    use(predictor, made, 0)
    extra = grow(made[0].forward_pass, Piece())
    assert expected(extra, [*made, extra]) == [1, 0]


def test_an_interrupt_while_a_pass_forgets_its_dead_costs_a_guess_and_no_gradient():
    class Interrupts(weakref.ref):
        def __call__(self):
            if not looks:
                looks.append(1)
                raise KeyboardInterrupt
            return super().__call__()

    looks = []
    stash = Stash(disk=MemoryStore(), min_bytes=0, keep=None)
    x = torch.randn(4, 4, requires_grad=True)
    with stash:
        y = x
        for _ in range(1024):
            y = y.sin()
        blocks = stash._session.predictor._current.blocks
        blocks[500] = Interrupts(blocks[500]())
        with pytest.raises(KeyboardInterrupt):
            for _ in range(3):
                y = y.sin()
        y = y.sin()
    (found,) = torch.autograd.grad(y.sum(), x)
    assert looks and found.isfinite().all()


def test_a_backward_that_builds_a_graph_ends_no_pass_but_an_earlier_one_s_uses_count():
    predictor = AccessPredictor()
    first = pieces(predictor, 2)
    predictor.use(first[1], builds_graph=True)
    first += pieces(predictor, 1)
    assert predictor.passes == predictor.next_pass == 1 and not predictor.is_used
    use(predictor, first, 2, 1, 0)
    assert predictor.next_pass == 2
    (later,) = pieces(predictor, 1)
    predictor.use(first[0], builds_graph=True)
    assert later.forward_pass is not first[0].forward_pass and predictor.next_pass == 2
