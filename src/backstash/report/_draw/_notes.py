"""What a drawing says in words: what was folded, what was guessed, what cannot be known."""

from __future__ import annotations

from collections import Counter

from ._assemble import short_name
from ._facts import Facts
from ._fold import Choice
from ._tensors import Sums
from ._text import clean

__all__ = ["notes_on"]

_MOST_NAMES = 4
_INSIDE = {
    "CompiledFunctionBackward": "what torch.compile made of a graph: one node, whose inside autograd does "
    "not see",
    "CheckpointFunctionBackward": "a reentrant checkpoint: its inside is not in the graph, and is run again "
    "in backward",
}


def notes_on(facts: Facts, choice: Choice, sums: Sums, *, inferred: bool) -> tuple[str, ...]:
    """Sentences, the most important first."""
    return tuple(
        [
            *_on_outputs(facts),
            *_on_folding(choice),
            *_on_modules(facts, inferred=inferred),
            *_on_nodes(facts),
            *_on_tensors(sums),
            *_on_names(facts),
        ]
    )


def _on_outputs(facts: Facts) -> list[str]:
    if not facts.roots:
        return ["No output needs a gradient: there is no graph."]
    if facts.without_graph:
        return [f"{facts.without_graph:,} of the outputs need no gradient and have no graph."]
    return []


def _on_folding(choice: Choice) -> list[str]:
    found = []
    if choice.depth < choice.deepest:
        found.append(
            f"Modules are opened to depth {choice.depth}; depth={choice.deepest} opens all of them, as far "
            "as there is room."
        )
    elif choice.closed:
        found.append(
            f"Modules in which one operation at most saves something are one box; depth={choice.deepest} "
            "opens them."
        )
    if choice.left_out:
        found.append(
            f"{choice.left_out:,} nodes in the middle of long stretches are drawn as one box each."
        )
    return found


def _on_modules(facts: Facts, *, inferred: bool) -> list[str]:
    if inferred:
        return [
            "Modules are inferred from the parameters' names and the order of execution, which can be "
            "wrong for operations without parameters; forward under backstash.graph.label_modules(model) "
            "makes them certain."
        ]
    if not facts.labelled:
        if len(facts.ops) < 20:
            return []
        return [
            "No modules are known: forward under backstash.graph.label_modules(model), or give the model "
            "as params."
        ]
    without = len(facts.ops) - facts.labelled
    if without:
        return [f"{without:,} of {len(facts.ops):,} operations ran in no labelled module."]
    return []


def _on_nodes(facts: Facts) -> list[str]:
    names = Counter(op.name for op in facts.ops if op.name in _INSIDE)
    return [
        f"{short_name(name)}{f' ({count:,})' if count > 1 else ''} is {_INSIDE[name]}."
        for name, count in names.items()
    ]


def _on_tensors(sums: Sums) -> list[str]:
    found = []
    hooks = sums.silent
    freed = sums.places.get("freed", (0, 0))[0]
    if hooks:
        found.append(
            f"{hooks:,} saved tensor{'s are' if hooks > 1 else ' is'} known to hooks only, which tell "
            "neither shape nor bytes."
        )
    if freed:
        found.append(
            f"{freed:,} saved tensor{'s were' if freed > 1 else ' was'} freed by a backward."
        )
    other = sums.unknown - hooks - freed
    if other > 0:
        found.append(f"The bytes of {other:,} more saved tensors are not known.")
    return found


def _on_names(facts: Facts) -> list[str]:
    found = []
    for names, what in (
        (facts.names.not_reached, "not reached from the outputs"),
        (facts.names.frozen, "without requires_grad"),
    ):
        if names:
            shown = ", ".join(clean(name, 60) for name in names[:_MOST_NAMES])
            rest = len(names) - _MOST_NAMES
            more = f" and {rest:,} more" if rest > 0 else ""
            found.append(f"Of the names given, {what}: {shown}{more}.")
    return found
