"""Every name of ``torch.autograd.graph``, and more.

A program may import ``backstash.graph`` instead of ``torch.autograd.graph`` without a change of meaning. Most
names are torch's own objects. Where torch's version has a fault, the name is backstash's own, with the same
meaning.

====================  ============================================================================
torch's own           ``Node``, ``GradientEdge``, ``get_gradient_edge``, ``increment_version``,
                      ``disable_saved_tensors_hooks``, and all others that the installed torch has
ours, same meaning    ``saved_tensors_hooks``, ``save_on_cpu``, ``register_multi_grad_hook``,
                      ``allow_mutation_on_saved_tensors``
to disk               ``save_on_disk``, ``SaveOnCpu``, ``SaveOnDisk``
scopes                ``saved_tensors_hooks(compose=True)``, ``only``, ``skip``
a function, a call    ``saved_on``, ``save_for_backward``, ``saved_tensors``
checkpoints           ``checkpoint``, whose selective form keeps outputs in the stash
long loops            ``checkpoint_loop``, its schedules ``Binomial``, ``TwoLevel``, ``KeepAll``
looking               ``iter_graph``, ``saved``, ``label_modules``, ``log_backward``
====================  ============================================================================
"""

from __future__ import annotations

from typing import Any

from torch.autograd import graph as _stock
from torch.autograd.graph import (
    GradientEdge,
    Node,
    disable_saved_tensors_hooks,
    get_gradient_edge,
    increment_version,
)

from .._torch.dynamo import leave_untraced as _leave_untraced
from .._torch.graph_labels import label_modules
from .._torch.graph_walk import iter_graph
from .._torch.handle import Handle
from .._torch.node_saves import SavedValue, saved
from ._checkpoint import checkpoint
from ._faces import save_on_cpu, save_on_disk
from ._functions import save_for_backward, saved_on, saved_tensors
from ._hooks import saved_tensors_hooks
from ._log import BackwardLog, NodeRun, log_backward
from ._loop import Binomial, KeepAll, Schedule, TwoLevel, checkpoint_loop
from ._modules import SaveOnCpu, SaveOnDisk
from ._multi import register_multi_grad_hook
from ._mutation import allow_mutation_on_saved_tensors
from ._scopes import only, skip

__all__ = [
    "BackwardLog",
    "Binomial",
    "GradientEdge",
    "Handle",
    "KeepAll",
    "Node",
    "NodeRun",
    "SaveOnCpu",
    "SaveOnDisk",
    "SavedValue",
    "Schedule",
    "TwoLevel",
    "allow_mutation_on_saved_tensors",
    "checkpoint",
    "checkpoint_loop",
    "disable_saved_tensors_hooks",
    "get_gradient_edge",
    "increment_version",
    "iter_graph",
    "label_modules",
    "log_backward",
    "only",
    "register_multi_grad_hook",
    "save_for_backward",
    "save_on_cpu",
    "save_on_disk",
    "saved",
    "saved_on",
    "saved_tensors",
    "saved_tensors_hooks",
    "skip",
]

# Names that only some versions of torch have refer to torch's own objects.
_handed_on: dict[str, Any] = {
    name: getattr(_stock, name) for name in _stock.__all__ if name not in __all__
}
globals().update(_handed_on)
__all__ += list(_handed_on)

_leave_untraced(__name__)
