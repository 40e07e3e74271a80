"""Rounds by themselves: how blocks are numbered, what is expected after one, and what is learnt."""

from types import SimpleNamespace

import pytest

from backstash._saved import access_order as _access_order
from backstash._saved.access_order import AccessPredictor, ForwardPass


class Piece:
    """As much of a block as an order looks at."""

    def __init__(self):
        self.cleanup = SimpleNamespace(serial=-1)


def pieces(order, count):
    made = [Piece() for _ in range(count)]
    for each in made:
        order.add(each)
    return made


def use(order, among, *indices):
    for index in indices:
        order.use(among[index])


def expected(block, among):
    """Where in ``among`` those are that are expected after ``block``."""
    return [among.index(each) for each in block.forward_pass.successors(block.index)]


def test_blocks_are_numbered_in_their_round_and_of_all():
    order = AccessPredictor()
    assert order.passes == 0
    first = pieces(order, 3)
    assert (order.passes, first[0].forward_pass.wanted) == (1, False)
    use(order, first, 2)
    assert first[0].forward_pass.wanted
    second = pieces(order, 2)
    assert [each.index for each in first + second] == [0, 1, 2, 0, 1]
    assert [each.cleanup.serial for each in first + second] == [0, 1, 2, 3, 4]
    assert (
        first[0].forward_pass is not second[0].forward_pass is second[1].forward_pass
        and order.passes == 2
    )


def test_the_first_guess_is_the_reverse_of_the_saves():
    order = AccessPredictor()
    made = pieces(order, 100)
    use(order, made, 99)
    assert expected(made[99], made) == list(range(98, 34, -1))  # 64 of them
    assert expected(made[2], made) == [1, 0]
    assert expected(made[0], made) == []


def test_after_a_round_comes_the_one_before_it_and_none_before_that():
    order = AccessPredictor()
    oldest = pieces(order, 2)
    use(order, oldest, 1)
    earlier = pieces(order, 70)
    use(order, earlier, 69)
    made = pieces(order, 3)
    assert expected(made[1], made[:1] + earlier) == [0, *range(70, 6, -1)]


def test_the_dead_are_passed_over_and_a_dead_round_too():
    order = AccessPredictor()
    earlier = pieces(order, 2)
    use(order, earlier, 1)
    made = pieces(order, 4)
    newest = made.pop()
    del made[1]
    assert expected(newest, made + earlier) == [1, 0, 3, 2]
    del earlier
    assert expected(newest, made) == [1, 0]


def test_the_order_of_use_is_learnt_by_a_round_of_as_many():
    order = AccessPredictor()
    first = pieces(order, 4)
    use(order, first, 1, 3, 1, 0)  # the second use of one says nothing, and 2 was not used
    second = pieces(order, 4)
    use(order, second, 1)
    assert expected(second[1], first + second)[:2] == [4 + 3, 4 + 0]
    assert expected(second[0], first + second)[:1] == [3]  # nothing followed it: the round before
    assert expected(second[2], first + second)[:2] == [4 + 1, 4 + 0]  # not used: by the saves
    use(order, second, 3)
    third = pieces(order, 5)
    use(order, third, 4)
    assert expected(third[4], third + second)[:4] == [3, 2, 1, 0]  # of another size: nothing learnt


def test_what_is_learnt_is_looked_up_once_when_backward_begins():
    order = AccessPredictor()
    first = pieces(order, 3)
    use(order, first, 0, 1, 2)
    second = pieces(order, 3)
    assert second[0].forward_pass.learned is None
    use(order, second, 0)
    learned = second[0].forward_pass.learned
    assert list(learned.order) == [0, 1, 2]
    order._learned.clear()
    use(order, second, 2)
    assert second[0].forward_pass.learned is learned


def test_of_what_is_learnt_64_steps_are_expected():
    order = AccessPredictor()
    first = pieces(order, 100)
    use(order, first, *range(100))
    second = pieces(order, 100)
    use(order, second, 0)
    assert expected(second[10], second + first)[:65] == [*range(11, 75), 100 + 99]


def test_the_latest_of_as_many_is_believed():
    order, made = AccessPredictor(), []
    for steps in ([0, 1, 2], [2, 0, 1]):
        made += pieces(order, 3)
        use(order, made[-3:], *steps)
    last = pieces(order, 3)
    use(order, last, 2)
    assert expected(last[2], last + made)[:2] == [0, 1]


def finished(order, size):
    made = pieces(order, size)
    use(order, made, *range(size))
    return made


def known(order):
    return list(order._learned)


def test_eight_rounds_are_remembered_the_latest_ones():
    order = AccessPredictor()
    for size in [*range(1, 9), 1, 9]:
        finished(order, size)
    pieces(order, 1)
    assert known(order) == [3, 4, 5, 6, 7, 8, 1, 9]


def test_so_many_blocks_are_remembered_and_the_last_round_however_large(monkeypatch):
    monkeypatch.setattr(_access_order, "_REMEMBERED_BLOCKS", 10)
    order = AccessPredictor()
    for size in (3, 5, 2):
        finished(order, size)
    pieces(order, 1)
    assert known(order) == [3, 5, 2]  # as many as may be
    order = AccessPredictor()
    for size in (3, 5, 2, 4):
        finished(order, size)
    pieces(order, 1)
    assert known(order) == [2, 4]
    order = AccessPredictor()
    for size in (3, 20):
        finished(order, size)
    pieces(order, 1)
    assert known(order) == [20]


def test_where_no_block_is_alive_the_next_round_has_none_before_it():
    order = AccessPredictor()
    made = finished(order, 2)
    order.forget()
    assert known(order) == [2]
    after = pieces(order, 1)
    assert (
        after[0].forward_pass is not made[0].forward_pass and after[0].forward_pass.previous is None
    )
    assert order.passes == 2 and after[0].cleanup.serial == 2
    order.forget()
    assert known(order) == [2]  # nobody wanted that one
    last = pieces(order, 1)
    assert (
        last[0].forward_pass is not after[0].forward_pass
        and last[0].index == 0
        and order.passes == 3
    )
    order.forget()
    empty = order._current
    order.forget()
    assert order._current is empty


@pytest.mark.parametrize("alive", [0, 600, 1024])
def test_a_round_that_never_ends_forgets_its_dead(alive):
    order = AccessPredictor()
    made = pieces(order, 1024)
    in_pass = made[0].forward_pass
    del made[: 1024 - alive]
    assert len(in_pass.blocks) == 1024
    made += pieces(order, 1)
    assert len(in_pass.blocks) == alive + 1
    assert [each.index for each in made] == list(range(alive + 1))
    assert in_pass.sweep_at == max(1024, 2 * alive)
    assert [ref() for ref in in_pass.blocks] == made


def test_the_dead_of_a_small_round_are_not_looked_for():
    order = AccessPredictor()
    made = pieces(order, 1023)
    del made[:1000]
    made += pieces(order, 1)
    assert len(made[0].forward_pass.blocks) == 1024 and made[-1].index == 1023


def test_what_a_finalizer_adds_while_the_dead_are_looked_for_is_kept():
    order = AccessPredictor()
    made = pieces(order, 1024)
    in_pass = made[0].forward_pass
    later = Piece()

    class Late:
        def __call__(self):
            if later not in made:
                made.append(later)
                order.add(later)
            return made[0]

    in_pass.blocks[0] = Late()
    made.insert(1024, last := Piece())
    order.add(last)
    assert [ref() for ref in in_pass.blocks][-2:] == [later, last]


def test_a_use_of_a_round_that_has_grown_since():
    in_pass = ForwardPass(None)
    made = [Piece() for _ in range(3)]
    in_pass.add(made[0])
    in_pass.use(0)
    for each in made[1:]:
        in_pass.add(each)
    in_pass.use(2)
    in_pass.use(0)
    assert list(in_pass.used) == [0, 2]
    assert (list(in_pass.history().order), list(in_pass.history().place)) == ([0, 2], [0, -1, 1])


def test_a_lesson_of_a_round_that_has_grown_since():
    order = AccessPredictor()
    finished(order, 2)
    made = pieces(order, 2)
    use(order, made, 0)
    made[0].forward_pass.add(extra := Piece())
    assert expected(extra, [*made, extra]) == [1, 0]
