"""What MkDocs is given while it builds the site; ``mkdocs.yml`` names this file.

A page of the API is generated for each public module, with every name of its ``__all__``. A name that several
modules have is described on the page of the one with the shortest path, and the others lead there. Links that
leave ``docs/`` lead to the repository, whose address stands in ``pyproject.toml``.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ("extra.css", "favicon.svg", "iframe-worker.js")
API = "API"
COMMANDS = "reference/command-line.md"  # the help of each command follows what it says
OURS = "backstash"
# What the names of a module return and nobody makes by hand: described next to them.
RETURNED = {
    "backstash": ("_core.stats.Stats", "_core.hook_scope.Attachment", "_runtime.trace.Recording"),
    "backstash.graph": (
        "_torch.graph_labels.Labels",
        "graph._loop._choose.LoopPlan",
        "graph._mutation.MutationContext",
    ),
    "backstash.report": (
        "report._saved.figures.SavedFigures",
        "report._saved.rows.Row",
        "report._saved.rows.SavedTensorRow",
        "report._saved.waste.Waste",
        "report._saved.budgets.Budget",
        "report._draw._records.DrawnGraph",
        "report._timeline_figures.TimelineFigures",
        "report._levels.Level",
        "report._levels.Step",
        "report._levels.Phase",
        "report._lives.ModuleUse",
    ),
}


def repository() -> str:
    """The project's address."""
    return _declared("Repository", "pyproject.toml")


def version() -> str:
    """The version of the package."""
    return _declared("__version__", f"src/{OURS}/__init__.py")


def _declared(name: str, path: str) -> str:
    found = re.search(rf'^{name} = "(.+)"$', (ROOT / path).read_text(encoding="utf-8"), re.M)
    assert found, f"{path} has no line `{name} = ...`"
    return found[1]


def public_modules() -> dict[str, ast.Module]:
    """The modules of the package whose path has no name with an underscore, the shortest paths first."""
    found = {}
    for path in sorted((ROOT / "src" / OURS).rglob("*.py")):
        parts = path.relative_to(ROOT / "src").with_suffix("").parts
        module = ".".join(parts).removesuffix(".__init__")
        if not any(part.startswith("_") for part in module.split(".")):
            found[module] = ast.parse(path.read_text(encoding="utf-8"))
    return dict(sorted(found.items(), key=lambda pair: (pair[0].count("."), pair[0])))


def listed_names(tree: ast.Module) -> list[str]:
    """What the module's ``__all__`` holds."""
    for node in tree.body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if isinstance(node, ast.Assign | ast.AnnAssign) and ast.unparse(targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def imported_from(module: str, tree: ast.Module) -> dict[str, str]:
    """Each name that the module imports, with the path that the import gives it."""
    is_package = (ROOT / "src" / Path(*module.split("."))).is_dir()
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            up = parts[: len(parts) - node.level + is_package] if node.level else []
            for name in node.names:
                origin = ".".join([*up, *filter(None, [node.module]), name.name])
                found[name.asname or name.name] = origin
    return found


def api_pages() -> dict[str, str]:
    """The text of each generated page, by its module."""
    texts = {}
    described: dict[str, str] = {}  # where a name was made: the name that describes it

    def made(path: str) -> str:
        module, _, name = path.rpartition(".")
        further = imported_from(module, _parse(module)).get(name) if module else None
        return path if further in (None, path) else made(further)

    for module, tree in public_modules().items():
        names = listed_names(tree)
        if not names:
            continue
        lines = [f"# {module} {{ #{module} }}", "", f"::: {module}", "    options:"]
        lines += ["      members: false", "      show_root_heading: false", ""]
        for name in names:
            path = f"{module}.{name}"
            origin = made(path)
            if not origin.startswith(OURS):
                where = f"PyTorch's own: `{origin}`."
            elif origin in described:
                first = described[origin]
                where = f"Described at [`{first}`]({first.rpartition('.')[0]}.md#{first})."
            else:
                described[origin] = path
                kind = _private_class(origin)
                if kind is None:
                    lines += [f"::: {path}", ""]
                    continue
                where = f"::: {kind}\n    options:\n      show_root_heading: false\n      filters: ['!^_[^_]']"
            lines += [f"## {name} {{ #{path} }}", "", where, ""]
        if module in RETURNED:
            lines += ["## What they return", "", "Nobody makes these by hand.", ""]
        for path in RETURNED.get(module, ()):
            lines += [f"::: {OURS}.{path}", "    options:", "      heading_level: 3", ""]
        texts[module] = "\n".join(lines)
    return texts


def _private_class(path: str) -> str | None:
    """The private class that ``path`` is the one object of; its methods are that object's documentation."""
    module, _, name = path.rpartition(".")
    for node in _parse(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            found = re.fullmatch(r"(_\w+)\(\)", ast.unparse(node.value))
            return found and f"{module}.{found[1]}"
    return None


def _parse(module: str) -> ast.Module:
    place = ROOT / "src" / Path(*module.split("."))
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8") if path.is_file() else "")


def command_help() -> str:
    """What ``--help`` prints, of each command."""
    text = _help()
    lines = ["", "## backstash", "", "```text", text, "```"]
    for command in re.findall(r"^  ([a-z]+)  ", text.partition("commands:")[2], re.M):
        lines += ["", f"## backstash {command}", "", "```text", _help(command), "```"]
    return "\n".join(lines) + "\n"


def _help(*command: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-m", OURS, *command, "--help"],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout.rstrip()


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.extra["social"] = [{"icon": "fontawesome/brands/git-alt", "link": repository()}]
    config.extra["polyfills"] = ["assets/iframe-worker.js"]  # which the offline plugin looks for
    config.copyright = f"backstash {version()}"
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for name in ASSETS:
        text = (Path(__file__).parent / name).read_text(encoding="utf-8")
        files.append(File.generated(config, f"assets/{name}", content=text))
    pages = api_pages()
    for module, text in pages.items():
        files.append(File.generated(config, f"api/{module}.md", content=text))
    assert config.nav is not None
    order = sorted(pages, key=lambda module: (module.startswith(f"{OURS}.cli"), module))
    for group in config.nav:
        (entries,) = group.values()
        for entry in entries:
            if isinstance(entry, dict) and API in entry:
                entry[API] = [{module: f"api/{module}.md"} for module in order]
    return files


_LEADS_UP = re.compile(r"(\]\(|\b(?:src|href)=\")(\.\./[^)\s\"#]*)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turn links that leave ``docs/`` into links to the repository, and mark sessions as sessions."""
    folder = ROOT / "docs" / Path(page.file.src_uri).parent

    def there(match: re.Match[str]) -> str:
        target = (folder / match[2]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return match[0]
        kind = "tree" if target.is_dir() else "blob"
        return f"{match[1]}{repository()}/{kind}/main/{target.relative_to(ROOT)}"

    if page.file.src_uri == COMMANDS:
        markdown += command_help()

    markdown = re.sub(r"^```python\n(?=>>> )", "```pycon\n", markdown, flags=re.M)
    markdown = re.sub(r"^<BLANKLINE>$", "", markdown, flags=re.M)
    return _LEADS_UP.sub(there, markdown)
