"""The variants that are compared: a way to hold saved tensors, an allocator, `backstash run` or not."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEFAULT", "VARIANTS", "Variant"]


@dataclass(frozen=True, slots=True)
class Variant:
    """One row of the table."""

    key: str
    """What ``--only`` calls it."""
    title: str
    """What the table calls it."""
    way: str
    """How the worker holds what is saved: a key of ``WAYS``."""
    malloc: str
    """The allocator, as for ``backstash run --malloc``; ``none`` is the system's as it is."""
    launched: bool = False
    """Whether ``backstash run`` starts the worker and holds what it saves."""


_ALL = (
    Variant("plain", "plain PyTorch", "nothing", "none"),
    Variant("plain-tcmalloc", "plain PyTorch, tcmalloc", "nothing", "tcmalloc"),
    Variant("plain-tbb", "plain PyTorch, tbb", "nothing", "tbb"),
    Variant("plain-glibc", "plain PyTorch, glibc set up", "nothing", "glibc"),
    Variant("save_on_cpu", "`save_on_cpu`", "save_on_cpu", "none"),
    Variant("recipe", "the tutorial's recipe", "recipe", "none"),
    Variant("checkpoint", "`torch.utils.checkpoint`", "checkpoint", "none"),
    Variant("checkpoint-tcmalloc", "`torch.utils.checkpoint`, tcmalloc", "checkpoint", "tcmalloc"),
    Variant("stash", "`Stash(disk=...)`", "stash", "none"),
    Variant("stash-tcmalloc", "`Stash(disk=...)`, tcmalloc", "stash", "tcmalloc"),
    Variant("pack", '`Action("pack")`, then disk', "pack", "none"),
    Variant("pack-memory", '`Action("pack")` in memory', "pack-memory", "none"),
    Variant("recompute", '`Action("recompute")`, then disk', "recompute", "none"),
    Variant("recompute-memory", '`Action("recompute")` in memory', "recompute-memory", "none"),
    Variant("recompute-pack", "recomputed, else packed, then disk", "recompute-pack", "none"),
    Variant("regions", "`Stash().recompute(*blocks)`", "regions", "none"),
    Variant(
        "regions-disk",
        '`Stash(keep="256MiB", disk=...).recompute(*blocks)`',
        "regions-disk",
        "none",
    ),
    Variant("run", "`backstash run`", "nothing", "auto", launched=True),
    Variant(
        "run-tcmalloc", "`backstash run --malloc tcmalloc`", "nothing", "tcmalloc", launched=True
    ),
    Variant("run-tbb", "`backstash run --malloc tbb`", "nothing", "tbb", launched=True),
    Variant("run-none", "`backstash run --malloc none`", "nothing", "none", launched=True),
    Variant("run-glibc", "`backstash run --malloc glibc`", "nothing", "glibc", launched=True),
    Variant(
        "run-jemalloc", "`backstash run --malloc jemalloc`", "nothing", "jemalloc", launched=True
    ),
    Variant(
        "run-mimalloc", "`backstash run --malloc mimalloc`", "nothing", "mimalloc", launched=True
    ),
)
VARIANTS = {variant.key: variant for variant in _ALL}
"""All variants, by key."""
DEFAULT = (
    "plain",
    "plain-tcmalloc",
    "plain-tbb",
    "plain-glibc",
    "save_on_cpu",
    "recipe",
    "checkpoint",
    "stash",
    "run",
    "run-glibc",
)
"""The keys of the variants that run without ``--only``."""
