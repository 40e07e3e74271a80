"""``gradient_errors``: measure how far gradients under a lossy codec are from the exact ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._text import clean, html_text, show_text
from .._torch.unchanged import unchanged
from ..errors import UsageError

__all__ = ["GradientError", "GradientErrors", "gradient_errors"]


@dataclass(frozen=True, slots=True)
class GradientError:
    """One parameter's gradient compared with the exact one."""

    name: str
    """The parameter's name in the module."""
    relative_l2_error: float
    """The L2 norm of the difference, divided by the norm of the exact gradient. 0 if both are zero, infinite if
    only the exact one is, NaN if one of them has a NaN."""
    cosine: float
    """Cosine of the angle between the two gradients: 1 if they point the same way or both are zero, NaN if one
    is zero or has a NaN."""
    norm: float
    """The L2 norm of the exact gradient."""


@dataclass(frozen=True, slots=True)
class GradientErrors:
    """The result of :func:`gradient_errors`; ``str()`` is a table."""

    rows: tuple[GradientError, ...]
    """A row for each parameter with a gradient, largest error first; NaN is before all."""
    loss_is_equal: bool
    """Whether both losses have the same bits. They should: a codec changes nothing in forward."""

    @property
    def is_exact(self) -> bool:
        """Whether no gradient differs."""
        return all(row.relative_l2_error == 0 for row in self.rows)

    def __str__(self) -> str:
        if self.is_exact:
            return f"{len(self.rows)} gradients, each equal to the exact one"
        width = max(len(clean(row.name)) for row in self.rows)
        lines = [f"{'parameter':{width}}  relative L2 error    cosine  norm"]
        lines += [
            f"{clean(row.name):{width}}  {row.relative_l2_error:17.3g}  {row.cosine:8.6f}  {row.norm:.3g}"
            for row in self.rows
        ]
        if not self.loss_is_equal:
            lines.append(
                "the losses differ: the step is not deterministic, so the errors may not come from a "
                "codec"
            )
        return "\n".join(lines)

    _repr_pretty_ = show_text

    def _repr_html_(self) -> str:
        return html_text(str(self))


def gradient_errors(
    step: Callable[[], Tensor], module: nn.Module, under: AbstractContextManager[Any]
) -> GradientErrors:
    """Run a step twice, once plainly and once ``under`` a stash, and compare the gradients of each parameter.

    Use it to judge a lossy codec (:class:`backstash.codecs.BFloat16`, ``Float8``, ``Int8``) by its effect on a
    program's own gradients. Afterwards the gradients, the buffers and PyTorch's random number states are as
    before. If the step uses random numbers of Python or NumPy, it has to seed them itself.

    Args:
        step: compute the loss, a tensor of one element, from ``module``, without calling ``backward``.
        module: the module whose parameters are compared.
        under: a stash, or another context in which the step's forward and backward run the second time.

    Raises:
        UsageError: ``step`` returned no loss with a gradient function.

    >>> from backstash import Stash
    >>> from backstash.codecs import BFloat16
    >>> model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))
    >>> x = torch.randn(128, 64)
    >>> found = gradient_errors(lambda: model(x).square().mean(), model, Stash(codec=BFloat16()))
    >>> all(row.relative_l2_error < 0.01 and row.cosine > 0.9999 for row in found.rows)
    True
    """
    named = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
    before = [each.grad for _, each in named]
    try:
        exact_loss, exact = _gradients(step, module, named, nullcontext())
        loss, found = _gradients(step, module, named, under)
    finally:
        for (_, parameter), gradient in zip(named, before, strict=True):
            parameter.grad = gradient
    rows = [
        _compared(name, one, other)
        for (name, _), one, other in zip(named, exact, found, strict=True)
        if one is not None or other is not None
    ]
    rows.sort(key=lambda row: (not math.isnan(row.relative_l2_error), -row.relative_l2_error))
    return GradientErrors(tuple(rows), torch.equal(exact_loss, loss))


def _gradients(
    step: Callable[[], Tensor],
    module: nn.Module,
    named: list[tuple[str, nn.Parameter]],
    under: AbstractContextManager[Any],
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the loss and the gradients of one run, and restore everything else."""
    with unchanged(module):
        for _, parameter in named:
            parameter.grad = None
        with under:
            loss = step()
            if not isinstance(loss, Tensor) or loss.grad_fn is None:
                raise UsageError(
                    f"gradient_errors: step returned {type(loss).__name__}: allowed is a loss that follows "
                    "from parameters, before its backward"
                )
            loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), [parameter.grad for _, parameter in named]


def _compared(name: str, exact: Tensor | None, other: Tensor | None) -> GradientError:
    one, two = (_numbers(each, other if each is None else each) for each in (exact, other))
    norm, its_norm = float(one.norm()), float(two.norm())
    difference = float((one - two).norm())
    error = difference / norm if norm else (math.inf if its_norm else 0.0)
    if norm and its_norm:
        cosine = min(float(one @ two) / (norm * its_norm), 1.0)  # in this order NaN stays
    else:
        cosine = math.nan if norm or its_norm else 1.0
    return GradientError(name, error, cosine, norm)


def _numbers(gradient: Tensor | None, like: Tensor | None) -> Tensor:
    """Return a gradient's elements in double precision; zeros if there is none."""
    if gradient is None:
        assert like is not None
        return torch.zeros_like(like.detach(), dtype=torch.float64).flatten()
    flat = gradient.detach().to_dense().flatten()
    return torch.view_as_real(flat).flatten().double() if flat.is_complex() else flat.double()
