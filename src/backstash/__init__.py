"""What backward needs, stashed: in place while it fits, then host memory, then disk, to the bit.

>>> from backstash import Stash
>>> stash = Stash(keep="2GiB")
"""

from ._torch.dynamo import leave_untraced as _leave_untraced
from ._torch.mkl import resolve as _resolve
from .errors import StashError, StashFullError, StashWarning
from .policy import Action, SavedTensor
from .stash import Stash
from .stores import Disk

__all__ = [
    "Action",
    "Disk",
    "SavedTensor",
    "Stash",
    "StashError",
    "StashFullError",
    "StashWarning",
    "__version__",
]

__version__ = "0.1.0"

_resolve()
_leave_untraced(__name__)
