import pytest

from backstash import Stash
from backstash._trim import Trimmer
from backstash.errors import SizeError


def trims_of(monkeypatch, setting=None):
    if setting is not None:
        monkeypatch.setenv("BACKSTASH_TRIM", setting)
    calls = []
    trimmer = Trimmer(lambda function, *args: calls.append(function))
    for _ in range(10):
        trimmer.freed(64 << 20)
    return len(calls)


def test_memory_is_given_back_once_in_a_while(monkeypatch):
    monkeypatch.delenv("BACKSTASH_TRIM", raising=False)
    assert trims_of(monkeypatch) == 2
    assert trims_of(monkeypatch, "64MiB") == 10
    assert trims_of(monkeypatch, "0") == 0


def test_a_process_that_gives_back_by_itself_is_left_alone(monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1048576")
    assert trims_of(monkeypatch, "64MiB") == 0


def test_a_wrong_setting_is_named(monkeypatch):
    monkeypatch.setenv("BACKSTASH_TRIM", "often")
    with pytest.raises(SizeError, match="BACKSTASH_TRIM='often'"):
        Stash()
