"""Hold what backward needs bit for bit: in place while it fits, then in host memory, then on disk.

>>> from backstash import Stash
>>> stash = Stash(keep="2GiB")

The names, and torch with them, are loaded on first use: ``backstash --help`` needs neither.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = [
    "Action",
    "Disk",
    "SavedTensor",
    "Stash",
    "StashError",
    "StashFullError",
    "StashWarning",
    "__version__",
    "recomputable",
]

__version__ = "0.2.0"
"""The version of the package."""

if TYPE_CHECKING:
    from ._recompute.declared import recomputable
    from .errors import StashError, StashFullError, StashWarning
    from .policy import Action, SavedTensor
    from .stash import Stash
    from .stores import Disk
else:
    _WHERE = {
        "Action": "policy",
        "Disk": "stores",
        "SavedTensor": "policy",
        "Stash": "stash",
        "StashError": "errors",
        "StashFullError": "errors",
        "StashWarning": "errors",
        "recomputable": "_recompute.declared",
    }
    _MODULES = (
        "codecs",
        "errors",
        "graph",
        "hooks",
        "memory",
        "policy",
        "report",
        "stash",
        "stores",
        "units",
    )

    def __getattr__(name):
        if name in _MODULES:
            return import_module(f".{name}", __name__)
        if name not in _WHERE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f".{_WHERE[name]}", __name__), name)
        return value

    def __dir__():
        return sorted({*globals(), *__all__, *_MODULES})


def load_ipython_extension(shell: Any) -> None:
    """Register the cell magics ``%%stash`` and ``%%saved_report``. IPython calls this at ``%load_ext
    backstash``."""
    from .integrations.notebook import Magics

    Magics(shell).register()


if "torch" in sys.modules:
    from . import _torch  # noqa: F401  to call each of MKL's vector functions for the first time
