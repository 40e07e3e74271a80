"""Find the module that made the first NaN or infinity."""

from __future__ import annotations

from typing import Any

from torch import nn

from ._compiled import warn_if_compiled
from ._finding import Finding
from ._handle import Handle
from ._names import Names, select
from ._registration import Registration
from ._search import Search
from ._sinks import open_sink

__all__ = ["NonFiniteSearch", "find_nonfinite"]


class NonFiniteSearch(Handle):
    """What :func:`find_nonfinite` returns."""

    __slots__ = ("_search",)

    def __init__(self, registration: Registration, search: Search) -> None:
        super().__init__(registration, each=False)
        self._search = search

    @property
    def found(self) -> Finding | None:
        """The first finding; ``None`` while everything was finite."""
        return self._search.found

    def _finish(self, error: BaseException | None) -> bool:
        self._search.end(raising=error is None)
        return False


def find_nonfinite(
    model: nn.Module, *, names: Names | None = None, inf: bool = True, to: Any = None
) -> NonFiniteSearch:
    """Finds the first module, in forward or backward, that made a NaN or an infinity.

    The inputs and outputs of every module, their gradients and the parameters' gradients are measured on the
    device, and fetched together when the model's forward returns and when backward ends. The first value
    that is not finite is told with its statistics, those of the value before it, and who made it: a
    module, its backward, operations between modules, the input, or the loss.

    This is a tool for the search: it reads every activation several times.

    Args:
        model: the model.
        names: which modules, as in :func:`backstash.hooks.capture`. Default: all.
        inf: whether infinities count, and not only NaN. Masks of ``-inf`` that modules are given are meant.
        to: ``None`` raises :class:`NonFiniteError` where forward or backward ends. Otherwise findings are
            reported and the program goes on: a callable, a path or an open file (JSON lines), a
            TensorBoard writer. With a ``GradScaler``, infinite gradients are its daily business.

    Returns:
        A handle; ``.found`` is the first :class:`Finding`.

    Raises:
        NoMatchError: a name matches nothing; nothing is registered then.
        NonFiniteError: out of the model's call, or ``backward()``, or the end of the ``with`` block. The
            gradients are complete by then.

    Under FSDP2 each process looks at its own part of a parameter's gradient.

    >>> import torch
    >>> from torch import nn
    >>> from backstash.hooks import find_nonfinite
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> _ = nn.init.constant_(model[2].weight, float("inf"))
    >>> with find_nonfinite(model, to=lambda finding: print(finding.path, finding.made_by)):
    ...     _ = model(torch.ones(1, 2))
    2 this module
    """
    sites = select(model, _any if names is None else names)
    registration = Registration("find_nonfinite")
    sink = None if to is None else open_sink(to)
    search = Search(model, sink, count_inf=inf)
    try:
        with registration.all_or_none():
            for site in sites:
                search.attach(registration, site)
            warn_if_compiled(model, sites, owner="find_nonfinite")
    except BaseException:
        search.end(raising=False)
        raise
    return NonFiniteSearch(registration, search)


def _any(path: str, module: nn.Module) -> bool:
    return True
