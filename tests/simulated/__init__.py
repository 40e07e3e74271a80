"""An accelerator that needs no hardware: ``torch.device("simulated")``, its streams as late as they may be.

``register()`` builds ``device.cpp`` where it has not been built, and makes it this process's accelerator, for
good. What it plays, and what it finds out, is described there.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import torch

from backstash._device import accelerator
from compiled import CannotBuild, compiled
from engine_threads import wait_at_exit

__all__ = [
    "CannotBuild",
    "begin",
    "build",
    "faults",
    "limit",
    "pinnable",
    "pinned_bytes",
    "rates",
    "reads",
    "register",
]

_SOURCE = Path(__file__).with_name("device.cpp")


def register() -> torch.device:
    """Make it this process's accelerator.

    Raises:
        CannotBuild: no compiler, or it refuses.
    """
    torch.ops.load_library(str(build()))
    torch.utils.rename_privateuse1_backend("simulated")
    torch._register_device_module("simulated", _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    accelerator._FILLED_BYTES = 1 << 20  # a fill of more takes long here, and is played long enough
    devices = [torch.device("simulated", each) for each in range(torch.accelerator.device_count())]
    wait_at_exit(lambda: devices)
    return devices[0]


def begin(chance: float, seed: int) -> None:
    """From now on each look at the device lets each stream do its next work with this chance."""
    torch.ops.simulated.begin(chance, seed)


def faults() -> list[str]:
    """Let everything run; what two streams read differently since the last call, in words."""
    return torch.ops.simulated.faults()


def reads() -> int:
    """How many late reads were compared with early ones so far."""
    return torch.ops.simulated.reads()


def limit(nbytes: int, device: int = 0) -> None:
    """The device has so much memory from now on."""
    torch.ops.simulated.limit(device, nbytes)


def rates(compute: float, down: float, up: float) -> None:
    """From now on, in the time that is played: bytes per second that an operation reads and writes, and that
    copies to the host and from it bring."""
    torch.ops.simulated.rates(compute, down, up)


def pinned_bytes() -> int:
    """What of the host's memory is pinned, what PyTorch's allocator keeps of it included."""
    return torch.ops.simulated.pinned_bytes()


def pinnable(may: bool) -> None:
    """Whether more of the host's memory can be pinned from now on."""
    torch.ops.simulated.pinnable(may)


def _module() -> ModuleType:
    """What PyTorch looks for at ``torch.simulated``."""
    module = ModuleType("torch.simulated")

    def current_device() -> int:
        return torch.accelerator.current_device_index()

    def get_rng_state(device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    for each in (current_device, get_rng_state, set_rng_state, get_amp_supported_dtype):
        setattr(module, each.__name__, each)
    module.device_count = lambda: 2
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    return module


def build() -> Path:
    """The library for this source and this torch, built where there is none.

    Raises:
        CannotBuild: no compiler, or it refuses.
    """
    at = Path(torch.__file__).parent
    includes = [f"-I{at / 'include'}", f"-I{at / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{at / 'lib'}", "-ltorch_cpu", "-lc10"]
    return compiled(_SOURCE, *includes, *libraries, of=torch.__version__)
