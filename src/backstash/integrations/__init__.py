"""One line for each trainer: a module for each library, which is not imported before it is asked for.

``transformers``    ``prepare_trainer(trainer, stash)``, or ``StashCallback(stash)``; TRL and PEFT with it
``lightning``       ``StashCallback(stash)``
``notebook``        ``%load_ext backstash``: the cell magics ``%%stash`` and ``%%saved_report``

Where a library is not installed, what needs it raises ``ImportError`` with the line that installs it.
"""

from __future__ import annotations

__all__: list[str] = []
