"""What a module's forward depends on beside its inputs, so that it can be run again as it ran.

Random number generators, autocast, and the settings by which PyTorch chooses an algorithm are noted when the
forward begins, and put there for a second run, as ``torch.utils.checkpoint`` does for some of them. What a
forward changes in its module is in ``module_state``.

All names are public but ``torch.nn.utils.stateless._functional_call``, in torch 2.11 to 2.15; where it is
missing, backward of a module whose weights were replaced by other parameters says that they are not those of
forward.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .dispatch import TorchDispatchMode
from .hook_dicts import hooks_of, hooks_of_all_modules
from .lookup import optional
from .tensors import is_wrapper_subclass

__all__ = [
    "Conditions",
    "NoCollectives",
    "are_weights_replaced",
    "foreign_hook",
    "signature_of",
]

_functional_call: Any = optional("torch.nn.utils.stateless._functional_call", None)


def _deterministic() -> tuple[bool, bool]:
    enabled = torch.are_deterministic_algorithms_enabled()
    return enabled, torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(setting: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(setting[0], warn_only=setting[1])


def _attention() -> tuple[bool, ...]:
    cuda: Any = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


def _set_attention(setting: tuple[bool, ...]) -> None:
    cuda: Any = torch.backends.cuda
    cuda.enable_flash_sdp(setting[0])
    cuda.enable_mem_efficient_sdp(setting[1])
    cuda.enable_math_sdp(setting[2])
    cuda.enable_cudnn_sdp(setting[3])


def _cudnn() -> tuple[Any, ...]:
    cudnn = torch.backends.cudnn
    return cudnn.enabled, cudnn.benchmark, cudnn.deterministic, torch.backends.mkldnn.enabled


def _set_cudnn(setting: tuple[Any, ...]) -> None:
    cudnn = torch.backends.cudnn
    cudnn.enabled, cudnn.benchmark, cudnn.deterministic = setting[:3]
    torch.backends.mkldnn.enabled = setting[3]


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (_deterministic, _set_deterministic),
    (_attention, _set_attention),
    (_cudnn, _set_cudnn),
)


def _generators(devices: Iterable[torch.device]) -> list[tuple[Callable[[], Any], Any]]:
    """How the state of each generator is asked for, and set: PyTorch's, its devices', Python's and NumPy's."""
    found: list[tuple[Callable[[], Any], Any]] = [(torch.get_rng_state, torch.set_rng_state)]
    for device in devices:
        module = torch.get_device_module(device)
        if hasattr(module, "get_rng_state"):
            get = functools.partial(module.get_rng_state, device)
            found.append((get, functools.partial(module.set_rng_state, device=device)))
    found.append((random.getstate, random.setstate))
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        found.append((numpy.get_state, numpy.set_state))
    return found


class Conditions:
    """What was in force when a forward began.

    Args:
        devices: of its inputs and parameters, without the CPU.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._generators = [(put, get, get()) for get, put in _generators(devices)]
        kinds = dict.fromkeys(["cpu", *(each.type for each in devices)])
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
        ]
        self._caches = torch.is_autocast_cache_enabled()
        self._settings = [get() for get, _ in _SETTINGS]

    @property
    def key(self) -> tuple[Any, ...]:
        """What decides which operations run."""
        return (*self._autocast, *self._settings)

    @contextmanager
    def again(self) -> Iterator[None]:
        """While it is entered, all of it is in force again; then what was before."""
        with ExitStack() as stack:
            for (get, put), setting in zip(_SETTINGS, self._settings, strict=True):
                now = get()
                if now != setting:
                    stack.callback(put, now)
                    put(setting)
            for put, get, state in self._generators:
                stack.callback(put, get())
                put(state)
            for kind, enabled, dtype in self._autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(
                        torch.autocast(kind, dtype, enabled=enabled, cache_enabled=self._caches)
                    )
            stack.enter_context(torch.enable_grad())
            yield


def signature_of(module: nn.Module) -> tuple[bool, ...]:
    """Which parts of ``module`` are in training mode."""
    return tuple(part.training for part in module.modules())


def are_weights_replaced() -> bool:
    """Whether this thread is inside ``torch.func.functional_call``: a second run would have other weights."""
    frame = sys._getframe() if _functional_call is not None else None
    while frame is not None and frame.f_code is not _functional_call.__code__:
        frame = frame.f_back
    return frame is not None


def foreign_hook(module: nn.Module, is_own: Callable[[Any], bool]) -> str:
    """The kind of a forward hook in ``module`` that is not the caller's own, and that a second run would call
    again; ``""``: it has none."""
    found = (
        kind
        for holder in (None, *module.modules())
        for kind, hook in (hooks_of_all_modules() if holder is None else hooks_of(holder))
        if "forward" in kind and not is_own(hook)
    )
    return next(found, "")


class NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls ``refuse`` before an operation that communicates with other processes."""

    def __init__(self, refuse: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._refuse = refuse

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See ``TorchDispatchMode``. A subclass, DTensor say, is asked first: its operations come here then."""
        if any(is_wrapper_subclass(each) for each in args if isinstance(each, Tensor)):
            return NotImplemented
        if str(getattr(func, "namespace", "")).strip("_").startswith("c10d"):
            self._refuse()
        return func(*args, **(kwargs or {}))
