"""The house: which module may import which, and the public names."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import backstash

PACKAGE = Path(backstash.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

# Each part imports from those above its own line, and within its line where no circle comes of it.
LEVELS = (
    ("errors", "units"),
    ("stores", "codecs", "memory", "launcher", "_streams"),
    ("policy",),
    ("_*",),
    ("stash",),
    ("graph",),
    ("testing", "integrations", "cli", "__main__"),
)
# What these may import of the package, besides themselves.
ISOLATED = {
    "stores": {"errors", "units"},
    "codecs": {"errors", "units"},
    "hooks": {"errors", "units", "policy", "_text", "_untraced"},
    "report": {"errors", "units", "policy", "_nodes", "_modules", "_text", "_untraced"},
}
# What knows nothing of a stash, so that an isolated part may read graphs and call stacks by it.
PURE = {"_nodes": {"errors"}, "_modules": set[str](), "_text": set[str](), "_untraced": set[str]()}
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
}


def part(module: str) -> str:
    """The first name below the package: ``backstash.cli.run`` is of ``cli``; the package is of ``""``."""
    return module.partition(".")[2].partition(".")[0]


def level(name: str) -> int:
    exact = [rank for rank, names in enumerate(LEVELS) if name in names]
    if not exact and name.startswith("_"):
        return level("_*")
    assert exact, f"backstash.{name} has no level in test_layout.py: give it one"
    return exact[0]


def is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes below ``tree``, without those that only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if not is_for_types_only(node):
            yield node
            yield from statements(node)


def imported(module: str) -> set[str]:
    """The modules of the package that ``module`` imports when it runs, wherever in it."""
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found = set()
    for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
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
    if own in ISOLATED | PURE:
        return theirs in (ISOLATED | PURE)[own]
    if not theirs or theirs in ISOLATED.keys() - {"stores", "codecs"}:
        return level(own) > level("graph")
    return level(theirs) <= level(own)


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


def test_imports_make_no_circle() -> None:
    TopologicalSorter({module: imported(module) for module in MODULES}).prepare()


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
