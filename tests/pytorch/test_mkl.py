"""One thread makes the first call of each of MKL's vector functions; scripts/soak_first_calls.py shows why."""

import subprocess
import sys

import pytest
import torch

from backstash._torch import mkl

# What PyTorch gives to MKL: torch/include/ATen/cpu/vml.h.
GIVEN = "Acos Asin Atan Cos Erf Erfc ErfInv Exp Ln Log10 Log2 Sin Sqrt Tan Tanh Trunc"
EXPECTED = {f"vm{letter}{name}" for letter in "sd" for name in GIVEN.split()}


class Library:
    """Stands for PyTorch's, and notes which functions are called."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str):
        return lambda *arguments: self.called.append(name)


def test_each_vector_function_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(mkl, "_library", lambda: library)
    mkl.resolve()
    assert len(library.called) == len(EXPECTED) and set(library.called) == EXPECTED


def test_where_mkl_is_hidden_pytorch_s_operations_are_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mkl, "_library", lambda: None)
    before, called = torch.get_rng_state(), []
    for name in mkl.NAMES:
        monkeypatch.setattr(
            torch, name, lambda one, name=name: called.append((name, one.dtype, one.device.type))
        )
    with torch.device("meta"):
        mkl.resolve()
    kinds = (torch.float32, torch.float64)
    assert set(called) == {(name, kind, "cpu") for name in mkl.NAMES for kind in kinds}
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this PyTorch has no MKL")
def test_mkl_s_functions_give_what_pytorch_s_operations_give() -> None:
    """So they are found, and called with the right arguments."""
    library = mkl._library()
    for name in EXPECTED:
        assert hasattr(library, name)
    import ctypes

    one, result = ctypes.c_double(0.5), ctypes.c_double()
    library.vmdLn(
        ctypes.c_int64(1), ctypes.byref(one), ctypes.byref(result), ctypes.c_int64(0x140102)
    )
    assert result.value == torch.tensor(0.5, dtype=torch.float64).log().item()


def test_the_import_makes_the_calls() -> None:
    program = """
import ctypes, torch
seen = []
class Recording(ctypes.CDLL):
    def __getattr__(self, name):
        seen.append(name)
        return super().__getattr__(name)
ctypes.CDLL = Recording
import backstash
print(*(name for name in seen if name.startswith("vm")))
"""
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True
    ).stdout
    assert set(output.split()) == EXPECTED
