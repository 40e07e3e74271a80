"""What a version counter shows, and what it relies on."""

import torch

from backstash._torch import versions
from backstash._torch.versions import same_counter


def test_a_view_shares_its_counter_and_data_does_not():
    x = torch.ones(3)
    assert same_counter(x, x[1:]) and same_counter(x, x.detach())
    assert not same_counter(x, x.data)
    assert x._version == 0


def test_without_the_interpreter_s_lock_the_answer_is_no(monkeypatch):
    """Another thread could look while the counter is raised: then a copy is made, which is right, too."""
    monkeypatch.setattr(versions, "_has_interpreter_lock", False)
    x = torch.ones(3)
    assert not same_counter(x, x[1:])


def test_where_torch_lacks_the_call_the_answer_is_no(monkeypatch):
    monkeypatch.setattr(versions, "_set_versions", None)
    x = torch.ones(3)
    assert not same_counter(x, x.detach())
