"""Use a stash in a ``Trainer`` of PyTorch Lightning.

Lightning Fabric needs no callback: write ``with stash:`` around forward in your own loop.
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
    """Run each ``training_step`` under a stash, and log the stash's figures.

    The callback wraps the ``train_step_context`` of the trainer's precision plugin while ``fit`` runs, so it
    works with any precision. With automatic optimization, backward runs outside the stash; with manual
    optimization, inside it. Gradients are the same. Every ``log_every_n_steps`` steps, ``log_dict`` sends the
    figures of ``stash.stats().as_dict(prefix="stash/")`` to the loggers. In a job of several processes these
    are the figures of the process that logs.

    Args:
        stash: the stash, which the caller closes.

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
        """Restore the plugin's own context."""
        self._restore()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Restore the plugin's own context after an error or Ctrl-C."""
        self._restore()

    def _restore(self) -> None:
        if self._plugin is not None:
            delattr(self._plugin, _CONTEXT)  # this uncovers the class's own
            self._plugin = None
