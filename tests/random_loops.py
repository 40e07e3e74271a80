"""Loops made at random, run as plain PyTorch runs them and by checkpoint_loop."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from backstash import Stash
from backstash.graph import Binomial, KeepAll, TwoLevel, checkpoint_loop

SHAPE = (4, 6)


class Doubled(torch.autograd.Function):
    """Twice the product of its inputs; saves them, and a result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        result = 2 * x * y
        ctx.save_for_backward(x, y, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, y, _ = ctx.saved_tensors
        return 2 * gradient * y, 2 * gradient * x


class Program:
    """One loop: its tensors, its step and how it is run, all from a seed.

    Args:
        seed: two programs of one seed are equal, tensors included.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        pick = random.Random(seed)
        torch.manual_seed(seed)
        self.weights = [torch.randn(SHAPE).requires_grad_() for _ in range(2)]
        self.matrix = (torch.randn(6, 6) / 3).requires_grad_()
        self.module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2))
        self.cell = nn.GRUCell(6, 6)
        self.outside = self.weights[0].sin() * self.weights[1]
        self.n = pick.choice([0, 1, 2, 3, 5, 8, 13, 21])
        self.width = pick.randint(1, 3)
        begins = [torch.randn(SHAPE).requires_grad_(pick.random() < 0.6) for _ in range(self.width)]
        self.begins = begins
        self.start = [each * 1.5 if pick.random() < 0.3 else each for each in begins]
        self.xs = torch.randn(self.n, *SHAPE).requires_grad_(pick.random() < 0.5)
        self.face = {name: pick.random() < 0.4 for name in ("index", "xs", "ys")}
        self.until = pick.randint(1, 9) if pick.random() < 0.15 and not self.face["xs"] else None
        self.nested = pick.random() < 0.5
        self.counts = pick.random() < 0.3
        self.args = [self.weights[0], self.outside] if pick.random() < 0.5 else []
        self.recipe = [
            (pick.choice(list(OPERATIONS)), pick.random(), pick.random())
            for _ in range(pick.randint(1, 7))
        ]
        self.ends = [(pick.random(), pick.random()) for _ in range(self.width)]
        self.y_of = pick.random()
        self.backwards = pick.choice([1, 1, 1, 2])
        self.uses_weight_outside = pick.random() < 0.3
        self.budget = pick.choice(
            ["1", "3", "two levels", "keep", "10KiB", "20KiB", "1GiB", "disk", "stash", "no less"]
        )
        self.calls = 0

    def tree(self, leaves: list[Any]) -> Any:
        """The state: its tensors, hung together."""
        whole: Any = {"a": leaves[0], "b": leaves[1:]} if self.nested else tuple(leaves)
        return (whole, self.calls_in(leaves)) if self.counts else whole

    def calls_in(self, leaves: list[Any]) -> int:
        """A number that is part of the state."""
        return len(leaves)

    def step(self, state: Any, *rest: Any) -> Any:
        """One step of the recipe."""
        given = list(rest)
        number = given.pop(0) if self.face["index"] else 0
        values = [each for each in tree_leaves(state) if isinstance(each, Tensor)]
        old = list(values)
        if self.face["xs"]:
            values.append(given.pop(0))
        values += given
        for name, one, two in self.recipe:
            x, y = values[int(one * len(values))], values[int(two * len(values))]
            values.append(OPERATIONS[name](self, x, y, number))
        new = []
        for place, (one, how) in enumerate(self.ends):
            value = values[-1 - int(one * min(3, len(values)))]
            if how < 0.1:
                new.append(old[place])  # stays as it is
            elif how < 0.2 and new:
                new.append(new[-1])  # one tensor twice
            else:
                new.append(torch.tanh(value + old[place] * 0.5))
        result = self.tree(new)
        if not self.face["ys"]:
            return result
        y = values[int(self.y_of * len(values))]
        kind = int(self.y_of * 1000) % 4
        return result, [y * 2, y.sum(), {"at": number, "y": y.detach() * 3}, (new[0], y.t() * 1)][
            kind
        ]

    def ended(self) -> Callable[[Any], bool] | None:
        """When the loop ends by itself."""
        if self.until is None:
            return None
        count = 0

        def until(_: Any) -> bool:
            nonlocal count
            count += 1
            return count >= self.until

        return until

    def plainly(self) -> Any:
        """As plain PyTorch runs it."""
        state, collected, until = self.tree(self.start), [], self.ended()
        rows = self.xs.unbind(0)
        for number in range(self.n):
            given = [
                *([number] if self.face["index"] else []),
                *([rows[number]] if self.face["xs"] else []),
            ]
            result = self.step(state, *given, *self.args)
            state, y = result if self.face["ys"] else (result, None)
            collected.append(y)
            if until is not None and until(state):
                break
        if not self.face["ys"]:
            return state, None
        if not collected:
            return state, None
        if isinstance(collected[0], Tensor):
            return state, torch.stack(collected)
        if isinstance(collected[0], dict):
            ys = torch.stack([each["y"] for each in collected])
            return state, {"at": [each["at"] for each in collected], "y": ys}
        return state, tuple(torch.stack(each) for each in zip(*collected, strict=True))

    def budgets(self, directory: Path) -> dict[str, Any]:
        """The arguments that say what is held, and where."""
        made: dict[str, Any] = {
            "1": {"schedule": Binomial(1)},
            "3": {"schedule": Binomial(3)},
            "two levels": {"schedule": TwoLevel(4, 2)},
            "keep": {"schedule": KeepAll()},
            "disk": {"disk": str(directory)},
            "no less": {"memory": "0B", "schedule": Binomial(2)},
        }
        if self.budget == "stash":
            stash = Stash(keep="1KiB", disk=str(directory), min_bytes=0)
            return {"stash": stash, "schedule": Binomial(2)}
        return made.get(self.budget, {"memory": self.budget})

    def held(self, directory: Path) -> Any:
        """By checkpoint_loop."""
        given: dict[str, Any] = {"index": self.face["index"], "ys": self.face["ys"]}
        if self.face["xs"]:
            given["xs"] = self.xs
        if self.until is not None:
            given["until"] = self.ended()
        result = checkpoint_loop(
            self.step,
            self.tree(self.start),
            self.n,
            *self.args,
            **given,
            **self.budgets(directory),
        )
        return result if self.face["ys"] else (result, None)

    def run(self, directory: Path | None) -> dict[str, Any]:
        """All that can be compared: outputs, gradients, buffers, random numbers. ``None``: plainly."""
        torch.manual_seed(self.seed + 1)
        state, ys = self.plainly() if directory is None else self.held(directory)
        leaves = tree_leaves((state, ys))
        after_forward = torch.get_rng_state()
        found: dict[str, Any] = {
            f"output {place}": leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
            for place, leaf in enumerate(leaves)
        }
        found |= {
            f"{name} after forward": each.clone() for name, each in self.module.named_buffers()
        }
        wanted = [each for each in leaves if isinstance(each, Tensor) and each.requires_grad]
        loss = sum(
            ((each * (place + 1)).cos().sum() for place, each in enumerate(wanted)), torch.zeros(())
        )
        if self.uses_weight_outside:
            loss = loss + (self.weights[0] * self.begins[0]).sum()
        if loss.requires_grad:
            for last in range(self.backwards - 1, -1, -1):
                loss.backward(retain_graph=bool(last))
        found["random numbers"] = torch.get_rng_state()
        assert torch.equal(after_forward, found["random numbers"])
        named = {f"begin {place}": each for place, each in enumerate(self.begins)}
        named |= {"w": self.weights[0], "v": self.weights[1], "matrix": self.matrix, "xs": self.xs}
        named |= {f"module {name}": each for name, each in self.module.named_parameters()}
        named |= {f"cell {name}": each for name, each in self.cell.named_parameters()}
        found |= {f"gradient of {name}": each.grad for name, each in named.items()}
        found |= dict(self.module.named_buffers())
        return found


def _changed_in_place(_: Program, x: Tensor, y: Tensor, __: int) -> Tensor:
    made = x.clone()
    made.mul_(y)
    made[0] = y[1]
    made[1:].add_(0.25)
    return made


def _force(program: Program, x: Tensor, y: Tensor, __: int) -> Tensor:
    with torch.enable_grad():
        at = x if x.requires_grad else x * program.weights[0]
        energy = (at.sin() * y.detach()).sum() + at.pow(2).sum()
        (gradient,) = torch.autograd.grad(energy, at, create_graph=True)
    return gradient * 0.3


def _hooked(_: Program, x: Tensor, y: Tensor, __: int) -> Tensor:
    made = x * y
    if made.requires_grad:
        made.register_hook(lambda gradient: gradient * 0.5)
    return made


def _half(program: Program, x: Tensor, y: Tensor, __: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return F.linear(x, program.matrix).float() * y


def _without(_: Program, x: Tensor, y: Tensor, __: int) -> Tensor:
    with torch.no_grad():
        scale = x.abs().amax() + 1
    return y / scale


OPERATIONS: dict[str, Callable[[Program, Tensor, Tensor, int], Tensor]] = {
    "product": lambda p, x, y, i: x * y,
    "a weight": lambda p, x, y, i: x * p.weights[0] + y * p.weights[1],
    "a matrix": lambda p, x, y, i: torch.sin(x @ p.matrix) - y,
    "the same matrix twice": lambda p, x, y, i: (x @ p.matrix) + (y @ p.matrix.t()),
    "computed outside": lambda p, x, y, i: x * p.outside,
    "a module": lambda p, x, y, i: p.module(x),
    "a cell": lambda p, x, y, i: p.cell(x, y),
    "dropout": lambda p, x, y, i: F.dropout(x, 0.3) + y,
    "noise": lambda p, x, y, i: x + torch.randn_like(y) * 0.1,
    "in place": _changed_in_place,
    "force": _force,
    "hook": _hooked,
    "half": _half,
    "without": _without,
    "checkpoint": lambda p, x, y, i: checkpoint(
        lambda a, b: torch.exp(-a.square()) * b.sin() @ p.matrix, x, y, use_reentrant=False
    ),
    "checkpoint with noise": lambda p, x, y, i: checkpoint(
        lambda a, b: F.dropout(a.cos() * b, 0.5), x, y, use_reentrant=False
    ),
    "by number": lambda p, x, y, i: x * (1 + 0.1 * i) if i % 2 else y.cos(),
    "views": lambda p, x, y, i: torch.cat([x[:2], y.flip(0)[2:]]).t().contiguous().t(),
    "norm": lambda p, x, y, i: F.layer_norm(x, (6,)) * y,
    "softmax": lambda p, x, y, i: F.softmax(x, -1).cumsum(-1) + y,
    "chosen": lambda p, x, y, i: torch.where(x > y, x.sin(), y),
    "cut": lambda p, x, y, i: x.detach() * y,
    "function": lambda p, x, y, i: Doubled.apply(x, y),
    "mapped": lambda p, x, y, i: torch.vmap(lambda a, b: (a * b).sin())(x, y),
    "nested": lambda p, x, y, i: (
        checkpoint_loop(lambda s, w: torch.sin(s * w), x, 3, p.weights[0], schedule=Binomial(1)) + y
    ),
}


def differences(seed: int, directory: Path) -> list[str]:
    """What differs between the two runs of a program; raises what checkpoint_loop raises."""
    wanted = Program(seed).run(None)
    found = Program(seed).run(directory)
    assert wanted.keys() == found.keys()
    return [name for name in wanted if not _equal(wanted[name], found[name])]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        bits = [each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)
    return bool(type(one) is type(other) and (isinstance(one, Tensor) or one == other))
