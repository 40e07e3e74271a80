"""An accelerator without data, ``torch.device("timed")``, whose time is played: see ``device.cpp``.

:func:`register` builds it where it has not been built, and makes it this process's accelerator, for good.
From then on ``time.perf_counter`` is the host's clock of the play, which moves on with each Python call of a
function of the package, or of PyTorch's checkpoint, in the calling thread and in that of the device's backward.
"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path
from types import ModuleType

import torch

from backstash._device import accelerator as _accelerator

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from compiled import compiled  # noqa: E402
from engine_threads import wait_at_exit  # noqa: E402

__all__ = ["register"]


def register() -> torch.device:
    """Make it this process's accelerator."""
    import torch._meta_registrations

    at = Path(torch.__file__).parent
    includes = [f"-I{at / 'include'}", f"-I{at / 'include/torch/csrc/api/include'}"]
    library = compiled(
        HERE / "device.cpp",
        *includes,
        f"-L{at / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
        of=torch.__version__,
    )
    torch.ops.load_library(str(library))
    functions = ctypes.PyDLL(str(library))
    functions.timed_now.restype, functions.timed_profile.restype = ctypes.c_double, None
    time.perf_counter = functions.timed_now  # type: ignore[assignment]
    torch.utils.rename_privateuse1_backend("timed")
    torch._register_device_module("timed", _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    device = torch.device("timed", 0)
    wait_at_exit(lambda: [device])
    # Its bytes cannot be compared, and a fingerprint is one kernel that reads them, as CUDA's.
    _accelerator.Accelerator.try_out = lambda self: None  # type: ignore[method-assign]
    _accelerator.sums = _sums
    functions.timed_profile()
    x = torch.ones((), device=device, requires_grad=True).exp()
    x.register_hook(lambda _: functions.timed_profile())  # in the thread that backward will run in
    x.backward()
    return device


def _sums(storage: torch.UntypedStorage, first: int = 0, nbytes: int = -1) -> torch.Tensor:
    nbytes = storage.nbytes() if nbytes < 0 else nbytes
    words = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return words.set_(storage, first, (nbytes,), (1,)).sum()


def _module() -> ModuleType:
    """What PyTorch looks for at ``torch.timed``."""
    module = ModuleType("torch.timed")
    module.device_count = lambda: 1  # type: ignore[attr-defined]
    module.is_available = lambda: True  # type: ignore[attr-defined]
    module.is_initialized = lambda: True  # type: ignore[attr-defined]
    module.current_device = lambda: 0  # type: ignore[attr-defined]
    module.get_rng_state = lambda device=None: torch.get_rng_state()  # type: ignore[attr-defined]
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)  # type: ignore[attr-defined]
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]  # type: ignore[attr-defined]
    module._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]
    module.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]
    return module
