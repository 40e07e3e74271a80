"""A stash in a ``Trainer`` of PyTorch Lightning.

With Lightning Fabric the loop is the caller's own, and nothing is needed: ``with stash:`` around forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ..stash import Stash

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError:
        Callback = object

__all__ = ["StashCallback"]

_CONTEXT = "train_step_context"


class StashCallback(Callback):
    """Runs each ``training_step`` under a stash, and logs the stash's figures.

    It wraps the ``train_step_context`` of the trainer's precision plugin for as long as ``fit`` runs, so it
    works with any precision. With automatic optimization backward runs outside; with manual optimization
    inside, which changes no gradient. Figures go to the loggers by ``log_dict``, as
    ``stash.stats().as_dict(prefix="stash/")`` names them, every ``log_every_n_steps`` steps, in a job of
    several processes those of the process that logs.

    Args:
        stash: it stays the caller's to close.

    Raises:
        ImportError: lightning is not installed.

    >>> trainer = Trainer(callbacks=[StashCallback(Stash(disk="/scratch"))])  # doctest: +SKIP
    """

    def __init__(self, stash: Stash) -> None:
        if Callback is object:
            raise ImportError("StashCallback needs lightning: pip install 'backstash[lightning]'")
        self._stash = stash
        self._plugin: Any = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Wrap the context in which training steps run."""
        self._restore()
        plugin = trainer.strategy.precision_plugin
        own: Callable[[], AbstractContextManager[Any]] = getattr(plugin, _CONTEXT)

        @contextmanager
        def train_step_context() -> Iterator[None]:
            with own(), self._stash:
                yield

        setattr(plugin, _CONTEXT, train_step_context)
        self._plugin = plugin

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the stash's figures."""
        if trainer.loggers and trainer.global_step % trainer.log_every_n_steps == 0:
            pl_module.log_dict(self._stash.stats().as_dict(prefix="stash/"))

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Put the plugin's own context back."""
        self._restore()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The same, where training ends by an error or Ctrl-C."""
        self._restore()

    def _restore(self) -> None:
        if self._plugin is not None:
            delattr(self._plugin, _CONTEXT)  # what stood below it is the class's
            self._plugin = None
