"""Reading and following autograd graphs: nodes, what they saved, which module made them, active hook pairs.

It imports nothing of the package but ``errors``, so that both ``graph``, which hands it on, and ``report``,
which knows nothing of a stash, can use it.
"""

from __future__ import annotations

from .handle import Handle
from .held import Held, Routed, changed_in_place, running_node, version_of
from .iterate import Outputs, iter_graph, roots_of
from .labels import Labels, label_modules, module_of
from .pairs import Pair, current_pair, own_pack, pop_owned, push, replace_current, take_all
from .saved import RECOMPUTED, SavedValue, look, packed_of, saved

__all__ = [
    "RECOMPUTED",
    "Handle",
    "Held",
    "Labels",
    "Outputs",
    "Pair",
    "Routed",
    "SavedValue",
    "changed_in_place",
    "current_pair",
    "iter_graph",
    "label_modules",
    "look",
    "module_of",
    "own_pack",
    "packed_of",
    "pop_owned",
    "push",
    "replace_current",
    "roots_of",
    "running_node",
    "saved",
    "take_all",
    "version_of",
]
