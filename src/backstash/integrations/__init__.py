"""Use a stash with a trainer in one line. Each module imports its library only when it is used.

``transformers``    ``prepare_trainer(trainer, stash)``, or ``StashCallback(stash)``; TRL and PEFT with it
``lightning``       ``StashCallback(stash)``
``notebook``        ``%load_ext backstash``: the cell magics ``%%stash`` and ``%%saved_report``

If a library is not installed, its classes raise ``ImportError`` with the line that installs it.
"""

from __future__ import annotations

__all__: list[str] = []
