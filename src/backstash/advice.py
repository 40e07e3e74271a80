"""All advice to the user: each piece with its condition and what to do.

``backstash run``, ``backstash doctor`` and ``saved_report`` collect facts as plain values, and the rules below
turn them into sentences. A condition uses only facts that were measured, or computed from measured ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Advice", "advise"]

_MUCH_WAITING = 0.05  # of the time
_SLOW_BYTES_PER_SECOND = 500e6


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do, with the reason; or the reason to do nothing."""

    text: str
    """The reason, and what would change."""
    code: str
    """What to type or paste; ``""`` if there is nothing to do."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """One piece of advice."""

    applies: Callable[[Mapping[str, Any]], Any]
    """Return whether to give it, from the facts."""
    text: str
    """Its sentence, with names of facts in braces."""
    code: str = ""
    """What to type or paste, with names of facts in braces."""


def _all_stayed(facts: Mapping[str, Any]) -> bool:
    """Whether nothing was moved, recomputed or packed."""
    return not facts["moved_bytes"] and not facts["freed_bytes"]


def _waits(facts: Mapping[str, Any]) -> bool:
    """Whether the script waited much for the stash. With a plan, only if the plan has a time without a
    stash."""
    return bool(facts["waited_share"] > _MUCH_WAITING and facts["is_compared"])


def _is_followed(facts: Mapping[str, Any]) -> bool:
    """Whether the run followed a plan."""
    return facts["plan"] in ("planned", "loaded", "too small") and not facts["is_too_small"]


# The most useful first: a run's summary shows the first that applies, its page shows all.
_RUN = (
    _Rule(
        lambda facts: facts["is_full"],
        "Tensors stayed in memory, since the tier below was full or failed. Give a directory with more space:",
        "--disk DIR",
    ),
    _Rule(
        lambda facts: facts["plan"] == "measuring",
        "A plan is made after three steps or more. Run longer to see what it does.",
    ),
    _Rule(
        lambda facts: facts["is_too_small"],
        "The budget cannot be kept. The smallest that can is about {smallest}:",
        "--budget {smallest_budget}",
    ),
    _Rule(
        lambda facts: facts["plan"] == "left alone",
        "Everything fits into the budget. To see what a smaller one would cost:",
        "backstash plan {script}",
    ),
    _Rule(
        lambda facts: _is_followed(facts) and _waits(facts),
        "The script waited {waited_seconds:.1f} s for the stash, {waited_share:.0%} of its time. To see what "
        "larger budgets would take:",
        "backstash plan {script}",
    ),
    _Rule(
        lambda facts: _is_followed(facts) and not _waits(facts),
        "To see what other budgets would cost:",
        "backstash plan {script}",
    ),
    _Rule(
        lambda facts: not facts["plan"] and _all_stayed(facts) and facts["keep"] == 0,
        "Nothing needs to be done: this script fits as it is.",
    ),
    _Rule(
        lambda facts: not facts["plan"] and _all_stayed(facts) and facts["keep"] != 0,
        "Nothing was moved, since all of it may stay. To take less memory, give a limit:",
        "--budget SIZE",
    ),
    _Rule(
        lambda facts: not facts["plan"] and facts["moved_bytes"] and _waits(facts),
        "The script waited {waited_seconds:.1f} s for the stash, {waited_share:.0%} of its time. A budget "
        "keeps in memory what fits, and moves or recomputes the rest:",
        "--budget SIZE",
    ),
    _Rule(
        lambda facts: not facts["plan"] and not _all_stayed(facts) and not _waits(facts),
        "A budget keeps a limit, and moves as little as that takes:",
        "--budget SIZE",
    ),
    _Rule(
        lambda facts: facts["moved_bytes"] and facts["allocator"] in ("own", "glibc", "none"),
        "glibc keeps some of the memory that is freed. Another allocator may be faster, with --malloc tcmalloc "
        "or --malloc tbb, where it is installed ({install}). To try one:",
        "backstash run --malloc tcmalloc {script}",
    ),
    _Rule(lambda facts: True, "The same inside your own code:", "{stash}"),
)
_MACHINE = (
    _Rule(
        lambda facts: facts["is_in_memory"],
        "This directory is in memory, so what moves there frees none: give a directory on a disk.",
    ),
    _Rule(
        lambda facts: (
            not facts["is_in_memory"] and facts["bytes_per_second"] < _SLOW_BYTES_PER_SECOND
        ),
        "This disk moves {gigabytes_per_second:.2f} GB/s: backward may wait for it.",
    ),
    _Rule(
        lambda facts: not {"tcmalloc", "tbb"} & set(facts["allocators"]),
        "Another allocator may make a script that moves much faster:",
        "{install}",
    ),
    _Rule(
        lambda facts: facts["huge_pages"] == "never",
        "Transparent huge pages are off: reading back costs more processor time.",
    ),
)
# On an accelerator the budget is for its tensors, and the machine's memory is the host tier's.
_START = (
    _Rule(
        lambda facts: facts["accelerator"],
        "In your own code:",
        'Stash(budget="auto", host="{host}", disk={quoted})',
    ),
    _Rule(
        lambda facts: not facts["accelerator"],
        "In your own code:",
        'Stash(budget="{budget}", disk={quoted})',
    ),
    _Rule(
        lambda facts: facts["accelerator"],
        "For a script as it is:",
        "backstash run --budget auto --host {host} --disk {directory} SCRIPT",
    ),
    _Rule(
        lambda facts: not facts["accelerator"],
        "For a script as it is:",
        "backstash run --budget {budget} --disk {directory} SCRIPT",
    ),
)
_SAVED = (
    _Rule(
        lambda facts: facts["code"],
        "Saved tensors take at most {memory} of memory, not {peak}; {moved} move down and up again, "
        "{window} of it at a time.",
        "{code}",
    ),
    _Rule(
        lambda facts: not facts["code"] and facts["places"],
        "A stash holds {places}; {movable} more could move.",
    ),
    _Rule(
        lambda facts: not facts["code"] and not facts["places"] and not facts["peak_bytes"],
        "Nothing was saved that is not there without backward too.",
    ),
    _Rule(
        lambda facts: not facts["code"] and not facts["places"] and facts["peak_bytes"],
        "{movable} of {peak} could move: a stash would gain little.",
    ),
)
_RULES = {"run": _RUN, "machine": _MACHINE, "start": _START, "saved": _SAVED}


def advise(topic: str, facts: Mapping[str, Any]) -> tuple[Advice, ...]:
    """Return the advice that applies, the most useful first.

    Args:
        topic: what the facts describe: ``"run"``, an ended run; ``"machine"``; ``"start"``, the options for a
            machine; ``"saved"``, what forward saved.
        facts: plain values by their names, all that the topic's rules ask for.

    Raises:
        KeyError: there is no such topic, or a fact is missing.

    >>> advise("saved", {"code": "", "places": "", "peak_bytes": 0})[0].text
    'Nothing was saved that is not there without backward too.'
    """
    return tuple(
        Advice(rule.text.format_map(facts), rule.code.format_map(facts))
        for rule in _RULES[topic]
        if rule.applies(facts)
    )
