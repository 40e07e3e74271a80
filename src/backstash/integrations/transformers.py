"""Use a stash in a ``Trainer`` of Hugging Face's transformers, and so in those of TRL, and with PEFT models.

:func:`prepare_trainer` enters the stash while the trainer computes a loss. So the stash also holds what the
loss saves outside the model's forward (label smoothing, ``compute_loss_func``), and backward runs outside it.
If you can only pass callbacks, :class:`StashCallback` holds what the model's forward saves.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch

from ..errors import StashWarning, UsageError
from ..stash import Stash

try:
    from transformers import TrainerCallback
except ImportError:
    TrainerCallback = object

__all__ = ["StashCallback", "prepare_trainer"]

_T = TypeVar("_T")
_PREFIX = "stash/"
_OFFLOADS = (
    "activation checkpointing with offload=True moves its saved tensors itself, so the stash never "
    "sees them: leave offload out, and the stash moves the same tensors"
)


_CHECKPOINTING = (
    ("activation_checkpointing", "activation_checkpointing_kwargs"),
    ("gradient_checkpointing", "gradient_checkpointing_kwargs"),
)


def prepare_trainer(trainer: _T, stash: Stash) -> _T:
    """Compute the losses of ``trainer`` under ``stash``, and log the stash's figures with the trainer's own.

    In each training step ``compute_loss`` runs under the stash, and backward after it. Evaluation and
    prediction run without it. ``trainer.log`` gets the figures of ``stash.stats().as_dict(prefix="stash/")``;
    in a job of several processes, those of the process that logs. With ``nn.DataParallel`` the stash also
    holds what the replicas save. An out-of-memory error passes unchanged, so ``auto_find_batch_size`` works.

    Args:
        trainer: a ``transformers.Trainer``, or an instance of a subclass (``trl.SFTTrainer``). It is changed,
            not copied. A second call with the same stash does nothing.
        stash: the stash, which the caller closes.

    Returns:
        ``trainer``.

    Raises:
        UsageError: the trainer has another stash, or its activation checkpointing offloads tensors. If only the
            model is set to offload, the first step raises it. The trainer is unchanged.

    Warns:
        StashWarning: TRL's ``activation_offloading`` is on. It offloads nothing, because the stash is inside it
            and takes every saved tensor.

    >>> trainer = prepare_trainer(Trainer(model, arguments), Stash(disk="/scratch"))  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """
    given: Any = trainer
    known = getattr(given.compute_loss_context_manager, "stash", None)
    if known is stash:
        return trainer
    if known is not None:
        raise UsageError(
            "this trainer already has another stash: create a new trainer, or use that stash"
        )
    if _offloads(given.args):
        raise UsageError(_OFFLOADS)
    if getattr(given.args, "activation_offloading", False):
        warnings.warn(
            "activation_offloading=True has no effect with a stash, which takes the saved tensors "
            "first; leave it out",
            StashWarning,
            stacklevel=2,
        )
    context = _LossContext(given, stash)
    given.log = _log_with(given.log, context)
    given.compute_loss_context_manager = context
    return trainer


class _LossContext:
    """A replacement for ``compute_loss_context_manager``: the trainer's own context, with the stash inside
    it."""

    def __init__(self, trainer: Any, stash: Stash) -> None:
        self.stash = stash
        self.was_entered = False
        self._trainer = trainer
        self._own = trainer.compute_loss_context_manager

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with ExitStack() as contexts:
            contexts.enter_context(self._own())
            if torch.is_grad_enabled():
                if not self.was_entered:
                    _refuse_offloading(self._trainer.model)
                    self.was_entered = True
                if self._trainer.args.n_gpu > 1:
                    # Replicas run in threads, and hooks are per thread.
                    contexts.enter_context(self.stash.attach(self._trainer.model))
                contexts.enter_context(self.stash)
            yield


def _log_with(own: Callable[..., Any], context: _LossContext) -> Callable[..., Any]:
    @functools.wraps(own)
    def log(logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        if not context.was_entered and "loss" in logs:
            warnings.warn(
                "the trainer logged a loss but never called compute_loss_context_manager, so the stash "
                "held nothing: enter the stash where the loss is computed, `with stash:`",
                StashWarning,
                stacklevel=2,
            )
            context.was_entered = True  # warn once
        figures = context.stash.stats().as_dict(prefix=_PREFIX)
        all_logs = {**logs, **figures}
        result = own(all_logs, *args, **kwargs)
        # The trainer expects its own additions in the caller's dictionary.
        logs.update((name, value) for name, value in all_logs.items() if name not in figures)
        return result

    return log


def _offloads(arguments: Any) -> bool:
    """Whether a trainer's arguments make activation checkpointing offload what it saves."""
    for name, options_name in _CHECKPOINTING:
        options = getattr(arguments, options_name, None)
        if getattr(arguments, name, False) and (options or {}).get("offload"):
            return True
    return False


def _refuse_offloading(model: torch.nn.Module) -> None:
    """Raise if the model itself is set to offload: its checkpoint function then enters ``save_on_cpu``."""
    for module in model.modules():
        function = getattr(module, "_gradient_checkpointing_func", None)
        code = getattr(getattr(function, "func", function), "__code__", None)
        if code is not None and "save_on_cpu" in code.co_names:
            raise UsageError(_OFFLOADS)


class StashCallback(TrainerCallback):
    """Hold what the model's forward saves while a ``Trainer`` trains, if you can only pass callbacks.

    It does less than :func:`prepare_trainer`. It does not hold what the loss saves outside the model's forward
    (label smoothing, ``compute_loss_func``, most trainers of TRL), and the stash's figures do not reach
    reporters that were called before it.

    The callback detaches the stash from the model at the end of training. If the callback was passed to the
    trainer's constructor, it does so after an error, too. If it was added by ``add_callback``, the stash stays
    attached after an error, until ``remove()`` or the next training.

    Args:
        stash: the stash, which the caller closes.

    Raises:
        ImportError: transformers is not installed.

    >>> trainer = Trainer(model, arguments, callbacks=[StashCallback(stash)])  # doctest: +SKIP
    """

    def __init__(self, stash: Stash) -> None:
        if TrainerCallback is object:
            raise ImportError(
                "StashCallback needs transformers: pip install 'backstash[transformers]'"
            )
        self._stash = stash
        self._attachment: Any = None

    def remove(self) -> None:
        """Detach the stash from the model; a second call does nothing."""
        if self._attachment is not None:
            self._attachment.remove()
            self._attachment = None

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the trainer that is being constructed call :meth:`remove` however its training ends."""
        frame = sys._getframe(1)
        while frame is not None and not hasattr(
            frame.f_locals.get("self"), "compute_loss_context_manager"
        ):
            frame = frame.f_back  # type: ignore[assignment]
        if frame is not None:
            trainer = frame.f_locals["self"]
            trainer.train = self._removed_after(trainer.train)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach the stash to the model."""
        self.remove()
        if _offloads(args):
            raise UsageError(_OFFLOADS)
        model = kwargs["model"]
        _refuse_offloading(model)
        self._attachment = self._stash.attach(model)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach the stash."""
        self.remove()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the stash's figures to what is logged."""
        kwargs["logs"].update(self._stash.stats().as_dict(prefix=_PREFIX))

    def _removed_after(self, train: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            try:
                return train(*args, **kwargs)
            finally:
                self.remove()

        return wrapped
