"""Describe saved tensors in a drawing: rows in boxes, sums over the graph, and notes in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..._torch.node_saves import RECOMPUTED
from ._drafts import Draft
from ._facts import Facts
from ._held import HeldTensor
from ._records import SAVED_ABOVE, DrawnTensor, Place, agreed
from ._text import clean, short_name
from ._tree import Choice

__all__ = ["memory_of", "notes_on", "places_of", "same_memory", "tensors_of"]

_MOST_ROWS = 6
_MOST_NAMES = 4
_INSIDE = {
    "CompiledFunctionBackward": "a graph from torch.compile: one node, whose operations autograd does not see",
    "CheckpointFunctionBackward": "a reentrant checkpoint: its operations are not in the graph, and run "
    "again in backward",
}


def places_of(all_held: Iterable[HeldTensor]) -> tuple[Place, ...]:
    """Return where tensors are stored, the place with the most bytes first."""
    counts: dict[str, list[int]] = {}
    for each in all_held:
        place = counts.setdefault(each.where, [0, 0])
        place[0] += 1
        place[1] += each.nbytes or 0
    ordered = sorted(counts.items(), key=lambda pair: -pair[1][1])
    return tuple(Place(clean(where), *both) for where, both in ordered)


def memory_of(facts: Facts) -> tuple[int, int]:
    """Return the bytes of the memory of saved tensors, and the bytes of it that are leaves' own.

    Shared memory counts once, with at most its size. The leaves hold their memory without a graph too, so it is
    only in the second figure.
    """
    leaves = {leaf.storage for leaf in facts.leaves if leaf.storage is not None}
    unique = of_leaves = 0
    memory: Counter[tuple[object, int]] = Counter()
    for held in facts.held():
        if held.where == RECOMPUTED:
            continue  # it takes no memory now
        if held.storage is None:
            unique += held.nbytes or 0
        else:
            memory[held.storage] += held.nbytes or 0
    for storage, nbytes in memory.items():
        if storage in leaves:
            of_leaves += min(nbytes, storage[1])
        else:
            unique += min(nbytes, storage[1])
    return unique, of_leaves


def same_memory(facts: Facts) -> dict[int, str]:
    """Return, for each saved tensor (by ``id``) whose memory is counted elsewhere, its
    ``DrawnTensor.same_as``."""
    leaves = {
        leaf.storage: leaf.name or ("a parameter" if leaf.is_parameter else "a leaf")
        for leaf in facts.leaves
        if leaf.storage is not None
    }
    seen: set[tuple[object, int]] = set()
    found = {}
    for held in facts.held():
        if held.storage in leaves:
            found[id(held)] = leaves[held.storage]
        elif held.storage in seen:
            found[id(held)] = SAVED_ABOVE
        elif held.storage is not None:
            seen.add(held.storage)
    return found


def tensors_of(
    box: Draft, facts: Facts, same: dict[int, str], by_dtype: bool
) -> tuple[DrawnTensor, ...]:
    """Return the rows of one box."""
    ops = facts.ops
    runs = [[op.held for op in ops[first:end] if op.held] for first, end in box.runs()]
    if all(len(run) == 1 for run in runs) and len({len(run[0]) for run in runs}) == 1:
        return _one_by_one([run[0] for run in runs], same)
    groups: dict[str, list[HeldTensor]] = {}
    for first, end in box.runs():
        for op in ops[first:end]:
            for held in op.held:
                key = held.dtype if by_dtype else same.get(id(held), "") and "again"
                groups.setdefault(key, []).append(held)
    return tuple(_row(f"{len(held):,} saved", held, same) for _, held in sorted(groups.items()))


def _one_by_one(runs: list[list[HeldTensor]], same: dict[int, str]) -> tuple[DrawnTensor, ...]:
    """Return a row for each tensor that one operation saves, over all copies of the operation."""
    columns = [list(column) for column in zip(*runs, strict=True)]
    rows = [_row(column[0].name, column, same) for column in columns[:_MOST_ROWS]]
    if len(columns) > _MOST_ROWS:
        rest = [held for column in columns[_MOST_ROWS - 1 :] for held in column]
        rows[-1] = _row(f"{len(rest):,} more", rest, same)
    return tuple(rows)


def _row(name: str, held: list[HeldTensor], same: dict[int, str]) -> DrawnTensor:
    return DrawnTensor(
        name=clean(name),
        shape=agreed((each.shape for each in held), None),
        dtype=clean(agreed((each.dtype for each in held), "")),
        count=len(held),
        nbytes=sum(each.nbytes or 0 for each in held),
        unknown=sum(each.nbytes is None for each in held),
        places=places_of(held),
        same_as=clean(_whose({same.get(id(each), "") for each in held})),
    )


def _whose(again: set[str]) -> str:
    return agreed(again, "" if "" in again else SAVED_ABOVE if SAVED_ABOVE in again else "leaves'")


def notes_on(facts: Facts, choice: Choice, *, inferred: bool) -> tuple[str, ...]:
    """Return the notes of a drawing: sentences, most important first."""
    return tuple(
        [
            *_on_outputs(facts),
            *_on_folding(choice),
            *_on_modules(facts, inferred=inferred),
            *_on_nodes(facts),
            *_on_tensors(facts),
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
            f"Modules are opened to depth {choice.depth}; depth={choice.deepest} opens all of them, as "
            "far as they fit."
        )
    elif choice.closed:
        found.append(
            "Modules in which at most one operation saves something are drawn as one box; "
            f"depth={choice.deepest} opens them."
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


def _on_tensors(facts: Facts) -> list[str]:
    found = []
    unknown = Counter(held.where for held in facts.held() if held.nbytes is None)
    hooks, freed = unknown.pop("hooks", 0), unknown.pop("freed", 0)
    if hooks:
        found.append(
            f"{hooks:,} saved tensor{'s are' if hooks > 1 else ' is'} known only to hooks, which "
            "report no shape and no bytes."
        )
    if freed:
        found.append(
            f"{freed:,} saved tensor{'s were' if freed > 1 else ' was'} freed by a backward."
        )
    if unknown:
        found.append(f"The bytes of {unknown.total():,} more saved tensors are not known.")
    return found


def _on_names(facts: Facts) -> list[str]:
    found = []
    for names, what in (
        (facts.not_reached, "not reached from the outputs"),
        (facts.frozen, "without requires_grad"),
    ):
        if names:
            shown = ", ".join(clean(name, 60) for name in names[:_MOST_NAMES])
            rest = len(names) - _MOST_NAMES
            more = f" and {rest:,} more" if rest > 0 else ""
            found.append(f"Of the names given, {what}: {shown}{more}.")
    return found
