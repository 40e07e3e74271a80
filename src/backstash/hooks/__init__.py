"""Look at and change activations and gradients, and leave nothing behind.

Every function that registers hooks registers all of them or none, and returns one handle: a context
manager whose ``remove()`` removes the hooks of this handle and no others, and may be called again.
``summary`` and ``hooks_on`` return facts and leave no hook.

The functions use forward hooks, tensor hooks and post-accumulate hooks. ``register_full_backward_hook``
is not used: it fails with in-place modules, never fires for modules that return dicts or dataclasses,
and gives no gradients for keyword inputs. Neither is ``register_multi_grad_hook``, which keeps a buffer
for every backward that raises: each tensor of a value has a hook of its own instead.
"""

from __future__ import annotations

from .._torch.dynamo import leave_untraced as _leave_untraced
from ._capture import Capture, capture
from ._cell import Captured, CapturedCall
from ._clip import clip_gradients
from ._edit import edit_gradients
from ._errors import HookWarning, NoMatchError, NonFiniteError, NotCapturedError
from ._finding import Finding
from ._handle import GradientHooks, Handle
from ._inventory import HookInfo, Inventory, hooks_on
from ._nonfinite import NonFiniteSearch, find_nonfinite
from ._stats import Stats
from ._step import StepInBackward, step_in_backward
from ._summary import Summary, SummaryRow, summary
from ._trace import CallTrace, ModuleCall, trace
from ._watch import GradientReport, GradientWatch, watch_gradients

__all__ = [
    "CallTrace",
    "Capture",
    "Captured",
    "CapturedCall",
    "Finding",
    "GradientHooks",
    "GradientReport",
    "GradientWatch",
    "Handle",
    "HookInfo",
    "HookWarning",
    "Inventory",
    "ModuleCall",
    "NoMatchError",
    "NonFiniteError",
    "NonFiniteSearch",
    "NotCapturedError",
    "Stats",
    "StepInBackward",
    "Summary",
    "SummaryRow",
    "capture",
    "clip_gradients",
    "edit_gradients",
    "find_nonfinite",
    "hooks_on",
    "step_in_backward",
    "summary",
    "trace",
    "watch_gradients",
]

_leave_untraced(__name__)
