"""Models of every awkward kind, and what hooks there are on one."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.modules.module as torch_module
from torch import nn

MODULE_DICTS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
GLOBAL_DICTS = tuple(name for name in vars(torch_module) if name.startswith("_global_"))


def hook_state(model: nn.Module) -> dict[str, Any]:
    """The contents of every dict of hooks there is for a model, and torch's function for clipping."""
    state: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name in MODULE_DICTS:
            state[f"{path}.{name}"] = dict(getattr(module, name))
        for key, parameter in module._parameters.items():
            if parameter is not None:
                for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                    state[f"{path}.{key}.{name}"] = dict(getattr(parameter, name) or {})
    for name in GLOBAL_DICTS:
        value = getattr(torch_module, name)
        state[name] = dict(value) if isinstance(value, dict) else value
    state["clip"] = torch.nn.utils.clip_grad._clip_grads_with_norm_
    return state


@dataclass
class Out:
    logits: torch.Tensor
    extra: tuple[torch.Tensor, ...]
    note: str = "kept"


class Structured(nn.Module):
    """Children that return a tuple, a dict and a dataclass, and take keyword inputs."""

    class Tuple(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
            return x * 2, None, x + 1

    class Dict(nn.Module):
        def forward(self, *, x: torch.Tensor, scale: float) -> dict[str, Any]:
            return {"y": x * scale, "inner": {"z": [x + 2]}}

    class Record(nn.Module):
        def forward(self, x: torch.Tensor, bias: torch.Tensor) -> Out:
            return Out(x + bias, (x, bias))

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.tuple = self.Tuple()
        self.dict = self.Dict()
        self.record = self.Record()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, _, b = self.tuple(self.first(x))
        found = self.dict(x=a, scale=3.0)
        out = self.record(found["y"], bias=b)
        return out.logits + out.extra[1] + found["inner"]["z"][0]


class Residual(nn.Module):
    """In-place ReLU, used twice, and a residual sum in place."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 4)
        self.fc2 = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.fc1(x))
        z = self.fc2(y)
        z += x
        return self.relu(z)


class Table(nn.Module):
    """Returns its parameter: a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self) -> torch.Tensor:
        return self.weight


@pytest.fixture(scope="session", autouse=True)
def quick_collections() -> Iterator[None]:
    """torch's half million objects are not walked again by every ``gc.collect()``."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def structured() -> Structured:
    torch.manual_seed(0)
    return Structured()


@pytest.fixture
def residual() -> Residual:
    torch.manual_seed(0)
    return Residual()


@pytest.fixture
def table() -> Table:
    return Table()


@pytest.fixture
def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))


@pytest.fixture
def state_of() -> Callable[[nn.Module], dict[str, Any]]:
    return hook_state
