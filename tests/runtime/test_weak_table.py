"""The table that owns nothing: what is dead is not found, and its key is free for another."""

from backstash._runtime.weak import WeakTable


class Value:
    pass


def test_a_value_is_found_while_it_lives():
    table, value = WeakTable(), Value()
    assert table.get("a") is None
    table["a"] = value
    assert table.get("a") is value
    del value
    assert table.get("a") is None


def test_entries_of_the_dead_go_when_the_next_is_made():
    table, last = WeakTable(), Value()
    for number in range(100):
        table[number] = Value()
        assert len(table.refs) == 1
    table["last"] = last
    assert list(table.refs) == ["last"] and not table._gone


def test_a_key_that_is_in_use_again_is_not_taken_from_its_new_value():
    """The old value may die on another thread between the clearing away and the new entry."""
    table, old, new, other = WeakTable(), Value(), Value(), Value()
    table["a"] = old
    seen_later = table.refs["a"]
    table["a"] = new
    del old
    assert list(table._gone) == [seen_later]
    table["b"] = other
    assert (table.get("a"), table.get("b")) == (new, other)
