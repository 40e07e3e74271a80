"""The house: which module may import which, and the public names."""

import ast
import json
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path
from tempfile import TemporaryDirectory

import backstash

PACKAGE = Path(backstash.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

# The floors, the lowest first: each imports from those above its own line, and within its line where no
# circle comes of it. An import for type checkers only counts as any other.
FLOORS = (
    ("errors", "units", "_text", "memory", "launcher", "scratch", "advice", "places"),
    ("_plan", "codecs"),
    ("plan",),
    ("policy",),
    ("_torch",),
    ("stores",),
    ("_runtime",),
    ("_device",),
    ("_saved",),
    ("_tiers",),
    ("_core",),
    ("_budget", "_recompute"),
    ("stash",),
    ("graph", "fake"),
    ("testing", "cli", "integrations", "__main__"),
)
# These stand next to the floors: they know nothing of a stash, and who imports them stands above ``graph``.
NEXT_TO = {
    "hooks": {"errors", "units", "_text", "codecs", "policy", "_torch"},
    "report": {"errors", "units", "_text", "advice", "places", "codecs", "policy", "_torch"},
}
PUBLIC_ONLY = ("cli", "integrations")

NAMES = {
    "Action",
    "Disk",
    "SavedTensor",
    "Stash",
    "StashError",
    "StashFullError",
    "StashWarning",
    "__version__",
    "recomputable",
}


def part(module: str) -> str:
    """The first name below the package: ``backstash.cli.run`` is of ``cli``; the package is of ``""``."""
    return module.partition(".")[2].partition(".")[0]


def floor(name: str) -> int:
    found = [rank for rank, names in enumerate(FLOORS) if name in names]
    assert found, f"backstash.{name} has no floor in test_layout.py: give it one"
    return found[0]


def imported(module: str) -> set[str]:
    """The modules of the package that ``module`` imports, wherever in it, for types only too."""
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*up, *filter(None, [node.module])])
            names = {f"{origin}.{alias.name}" for alias in node.names}
            found.update(names & MODULES.keys() or {origin})
    return {name for name in found if name.partition(".")[0] == "backstash"} - {module}


def may_import(module: str, other: str) -> bool:
    own, theirs = part(module), part(other)
    if not own or own == theirs:
        return True
    if own in NEXT_TO:
        return theirs in NEXT_TO[own]
    if not theirs or theirs in NEXT_TO:
        return floor(own) > floor("graph")
    return floor(theirs) <= floor(own)


def is_private(module: str) -> bool:
    return any(name.startswith("_") for name in module.split("."))


def listed_names(module: str) -> list[str] | None:
    """What a module's ``__all__`` holds."""
    for node in ast.parse(MODULES[module].read_text(encoding="utf-8")).body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if isinstance(node, ast.Assign | ast.AnnAssign) and ast.unparse(targets[0]) == "__all__":
            assert node.value is not None
            return list(ast.literal_eval(node.value))
    return None


def test_imports_point_one_way() -> None:
    wrong = [
        f"{module} imports {other}"
        for module in MODULES
        for other in imported(module)
        if not may_import(module, other)
    ]
    assert wrong == []


def test_every_floor_is_there() -> None:
    named = {name for names in FLOORS for name in names} | NEXT_TO.keys()
    assert named == {part(module) for module in MODULES} - {""}


def test_the_core_knows_neither_budgets_nor_replay() -> None:
    above = FLOORS.index(("_budget", "_recompute"))
    lower = {name for names in FLOORS[:above] for name in names}
    wrong = [
        f"{module} imports {other}"
        for module in MODULES
        for other in imported(module)
        if part(module) in lower and part(other) in ("_budget", "_recompute", "_plan")
        if part(module) not in ("_plan", "plan")
    ]
    assert wrong == []


def test_a_stash_on_disk_loads_little() -> None:
    """No budget, no plan, no replay; at most 100 files and 16,000 lines."""
    code = """
import json, sys
import torch
from backstash import Stash
stash = Stash(disk=sys.argv[1])
x = torch.ones(300, 300, requires_grad=True)
with stash:
    y = (x * 2).exp().sum()
y.backward()
print(json.dumps([each.__file__ for name, each in sys.modules.items() if name.startswith("backstash")]))
"""
    with TemporaryDirectory() as directory:
        done = subprocess.run(
            [sys.executable, "-c", code, directory], check=True, capture_output=True, text=True
        )
    files = [Path(each) for each in json.loads(done.stdout)]
    parts = {each.relative_to(PACKAGE).parts[0] for each in files}
    assert parts.isdisjoint({"_budget", "_plan", "_recompute", "plan.py", "graph", "report", "cli"})
    assert len(files) <= 100
    assert sum(len(each.read_text(encoding="utf-8").splitlines()) for each in files) <= 16_000


def test_imports_make_no_circle() -> None:
    in_order = [*TopologicalSorter({each: imported(each) for each in MODULES}).static_order()]
    assert set(in_order) >= set(MODULES), "a circle raises CycleError"


def test_command_line_and_integrations_use_public_names() -> None:
    wrong = [
        f"{module} imports {other}"
        for module in MODULES
        for other in imported(module)
        if part(module) in PUBLIC_ONLY and part(other) != part(module) and is_private(other)
    ]
    assert wrong == []


def test_every_module_lists_its_names() -> None:
    without = [name for name in MODULES if listed_names(name) is None and part(name) != "__main__"]
    assert without == []


def test_no_name_is_listed_twice() -> None:
    for module in MODULES:
        names = listed_names(module) or []
        assert len(set(names)) == len(names), module


def test_top_level_names_are_these() -> None:
    assert set(backstash.__all__) == NAMES
    assert len(backstash.__all__) == len(NAMES) <= 25
    assert all(hasattr(backstash, name) for name in NAMES)


# Where a value is asked for its class, and where that value comes from. Nowhere else: what differs between
# our own classes is a method of theirs.
ASKED = {
    ("_core/admission.py", "Action"): "what a policy returned",
    ("_core/admission.py", "Codec"): "what the caller gave, or a callable of the caller's returned",
    ("_recompute/region.py", "Call"): "a pack hook on autograd's stack",
    ("_recompute/region.py", "Tape"): "a mode on PyTorch's stack",
    ("_recompute/tape.py", "Tape"): "a mode on PyTorch's stack",
    ("_saved/handout.py", "_Guard"): "metadata of one of autograd's nodes",
    ("_saved/handout.py", "_Loan"): "metadata of one of autograd's nodes",
    ("_tiers/packing.py", "Encoded"): "what a user's codec returned",
    ("graph/_functions.py", "Store"): "the caller's",
    ("graph/_loop/_call.py", "Schedule"): "the caller's",
    ("graph/_loop/_state.py", "_PackedLeaf"): "a leaf of the caller's tree",
    ("graph/_mutation.py", "Guard"): "a pack hook on autograd's stack",
    ("policy.py", "Codec"): "the caller's",
    ("stash.py", "Action"): "the caller's",
    ("stash.py", "Codec"): "the caller's",
    ("_budget/making.py", "Plan"): "the caller's",
    ("stash.py", "Store"): "the caller's",
}


def test_only_what_comes_from_outside_is_asked_for_its_class() -> None:
    trees = {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text())
        for name, path in MODULES.items()
        if part(name) not in ("report", "hooks", "cli", "integrations", "testing")
    }
    nodes = [(file, node) for file, tree in trees.items() for node in ast.walk(tree)]
    own = {node.name for _, node in nodes if isinstance(node, ast.ClassDef)}
    found = {
        (file, name.id)
        for file, node in nodes
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
        for name in ast.walk(node.args[1])
        if isinstance(name, ast.Name) and name.id in own and not name.id.endswith("Error")
    }
    assert found == set(ASKED)


PUBLIC_TWICE = {"Handle", "StashCallback", "Stats"}  # each of two public modules has one


def test_each_class_has_a_name_of_its_own() -> None:
    names = Counter(
        node.name
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in names.items() if count > 1} == PUBLIC_TWICE
