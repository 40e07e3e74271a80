"""One thread makes the first call of each of MKL's vector functions; scripts/soak_first_calls.py shows why."""

import subprocess
import sys

SEEN = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

class Calls(TorchDispatchMode):
    seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor) and args[0].numel() == 1:
            self.seen.add((function.overloadpacket.__name__, str(args[0].dtype)))
        return function(*args, **(kwargs or {}))

before = torch.get_rng_state()
with Calls(), torch.device("meta"):
    import backstash
assert torch.equal(before, torch.get_rng_state())
print(*(" ".join(call) for call in sorted(Calls.seen)), sep="\\n")
"""


def test_the_import_calls_each_vector_function_once() -> None:
    output = subprocess.run(
        [sys.executable, "-c", SEEN], capture_output=True, text=True, timeout=100, check=True
    ).stdout
    seen = {tuple(line.split()) for line in output.splitlines()}
    # What PyTorch gives to MKL: aten/src/ATen/cpu/vml.h, with the two that it once gave.
    names = "abs acos asin atan cos cosh erf erfc exp expm1 log log10 log1p log2 sin sinh sqrt tan"
    for name in (*names.split(), "tanh", "trunc"):
        for dtype in ("torch.float32", "torch.float64"):
            assert (name, dtype) in seen
