"""capture(stop=True): the rest of the forward is not run, and nothing else is ended."""

import pytest
import torch
from torch import nn

from backstash.hooks import HookWarning, capture


class Counting(nn.Module):
    """Three layers; counts what ran, and catches what models catch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.ran: list[int] = []
        self.unwound = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            try:
                x = layer(x)
            except Exception:
                raise AssertionError("the stop must pass") from None
            finally:
                self.unwound += 1
            self.ran.append(index)
        return x


def test_forward_ends_after_the_last_wanted_module() -> None:
    model = Counting()
    with capture(model, ["layers.0", "layers.1"], stop=True) as got:
        model(torch.ones(1, 2))
        pytest.fail("the block goes on after the stopped forward")
    assert model.ran == [0] and model.unwound == 2
    assert set(got) == {"layers.0", "layers.1"}
    model(torch.ones(1, 2))
    assert model.ran == [0, 0, 1, 2]


def test_run_comes_back() -> None:
    model = Counting()
    with capture(model, "layers.1", stop=True) as got:
        for scale in (1.0, 2.0):
            x = torch.ones(1, 2) * scale
            value = got.run(x)["layers.1"].output
            assert torch.equal(value, model.layers[1](model.layers[0](x)))
    assert 2 not in model.ran


def test_run_without_stop_runs_all() -> None:
    model = Counting()
    with capture(model, "layers.0") as got:
        assert torch.equal(
            got.run(torch.ones(1, 2))["layers.0"].output, model.layers[0](torch.ones(1, 2))
        )
    assert model.ran == [0, 1, 2]


def test_outside_a_with_block_nothing_is_raised() -> None:
    model = Counting()
    got = capture(model, "layers.0", stop=True)
    model(torch.ones(1, 2))
    got.remove()
    assert model.ran == [0, 1, 2]


def test_each_capture_ends_only_its_own_stop() -> None:
    model = Counting()
    after = False
    with capture(model, "layers.1", stop=True) as outer:
        with capture(model, "layers.0", stop=True) as inner:
            model(torch.ones(1, 2))
        after = True
        assert list(inner) == ["layers.0"] and list(outer) == []
        with capture(model, "layers.0") as watching:
            model(torch.ones(1, 2))
        pytest.fail("the inner block does not end the outer's stop")
    assert after and list(outer) == ["layers.1"] and list(watching) == ["layers.0"]


def test_an_inner_stop_does_not_end_the_outers() -> None:
    model = Counting()
    with capture(model, "layers.0", stop=True) as outer:
        with capture(model, "layers.2", stop=True) as inner:
            model(torch.ones(1, 2))
        pytest.fail("the outer's stop passes through the inner block")
    assert list(outer) == ["layers.0"] and list(inner) == []


def test_other_exceptions_pass() -> None:
    model = Counting()
    with pytest.raises(ZeroDivisionError), capture(model, "layers.0", stop=True):
        raise ZeroDivisionError


def test_never_reached_is_said() -> None:
    model = Counting()
    unused = nn.Linear(2, 2)
    model.unused = unused
    with pytest.warns(HookWarning, match="unused"), capture(model, "unused", stop=True):
        model(torch.ones(1, 2))
    assert model.ran == [0, 1, 2]


def test_after_run_a_call_of_the_program_s_is_not_ended() -> None:
    model, x = Counting(), torch.ones(1, 2)
    got = capture(model, "layers.0", stop=True)
    got.run(x)
    assert model(x).shape == (1, 2)
    with got:
        got.run(x)
        model.ran.clear()
        model(x)
    assert model.ran == []
